"""Workers that a sender makes beside objects of other processes, which know nothing of it.

Such an endpoint lives on an event loop in a thread of its own, as the blocking twins' do on theirs:
no commit lands in a running forward pass. Or it lives on the object's own (see
:class:`~aiosync.ray.WeightActorMixin`). It ends with its sender.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from aiosync.errors import AiosyncError
from aiosync.events import logger
from aiosync.schemes.ranked import RankedWeightSyncScheme
from aiosync.transports._offload import LoopThread, start_thread

__all__ = ["enlist", "keep", "serve", "take_seat"]

_Key: TypeAlias = tuple[bytes, int, int]


@dataclass
class _Seat:
    """One worker, as long as it lives.

    Attributes:
        again: makes it anew: the sender has asked once more, perhaps because it has seen this one break.
    """

    again: Callable[[], object] | None = None


_seats: dict[_Key, _Seat] = {}
_tasks: set[asyncio.Task[None]] = set()
_lock = threading.Lock()


def enlist(target: Any, scheme: RankedWeightSyncScheme, model_id: str | None, worker_idx: int) -> None:
    """Make a worker of an object, on a loop of its own. Returns before it has connected; idempotent as long
    as it lives.

    Args:
        target: has the model, as a context of ``init_on_receiver`` has.
        scheme: the recipe, for this worker alone.
        model_id: the model's name.
        worker_idx: which worker it is to be.

    Raises:
        AttributeError: it has no such model.
    """
    again = partial(enlist, target, scheme, model_id, worker_idx)
    seat = take_seat(target, scheme, model_id, worker_idx, again)
    if seat is not None:
        # Before anything is committed: from here on, none lands in a forward pass.
        scheme.create_receiver().model_applier.guard_forwards(scheme.timeout)
        thread = LoopThread("aiosync-enlisted")
        thread.call(_begin, thread, scheme, seat)


def take_seat(
    target: Any,
    scheme: RankedWeightSyncScheme,
    model_id: str | None,
    worker_idx: int,
    again: Callable[[], object],
) -> _Key | None:
    """Initialise the receiver; None if there is one already, which is made ``again`` if it is just ending."""
    key = bytes(scheme._token), worker_idx, scheme.port_of_sender
    with _lock:
        seat = _seats.get(key)
        if seat is not None:
            seat.again = again
            return None
        _seats[key] = _Seat()
    try:
        scheme.init_on_receiver(model_id=model_id, context=target, worker_idx=worker_idx)
    except BaseException:
        with _lock:
            del _seats[key]
        raise
    return key


def keep(task: asyncio.Task[None]) -> None:
    """A loop alone does not."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _begin(thread: LoopThread, scheme: RankedWeightSyncScheme, key: _Key) -> None:
    """In the thread."""
    keep(thread.loop.create_task(_in_thread(thread, scheme, key)))


async def _in_thread(thread: LoopThread, scheme: RankedWeightSyncScheme, key: _Key) -> None:
    try:
        await serve(scheme, key)
    finally:
        start_thread(thread.close, "aiosync-enlisted")


async def serve(scheme: RankedWeightSyncScheme, key: _Key) -> None:
    """Connect and receive, until the sender has gone; then give the seat up."""
    receiver = scheme.create_receiver()
    try:
        await scheme.connect()
        await receiver.run()
    except AiosyncError as exc:
        # Its sender knows, if it is there.
        logger.warning("worker %d did not join: %s", key[1], exc)
    except Exception:  # noqa: BLE001 - what the model, or its owner's methods, raise
        logger.exception("worker %d has ended", key[1])
    finally:
        goodbye = receiver.ended is not None and not receiver.lost
        try:
            await scheme.aclose()
        finally:
            with _lock:
                seat = _seats.pop(key)
            if seat.again is not None and not goodbye:
                seat.again()
