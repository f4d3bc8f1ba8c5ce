"""Receivers that a sender creates beside objects in other processes.

Such a receiver runs on an event loop in a separate thread, and no commit happens during a forward pass of
the object's model. With :class:`~aiosync.ray.WeightActorMixin` it runs on the object's own event loop.
It closes when its sender closes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from aiosync.errors import AiosyncError
from aiosync.events import logger
from aiosync.schemes.distributed import ProcessGroupScheme
from aiosync.transports._loop_thread import LoopThread
from aiosync.transports._offload import start_thread

_Key: TypeAlias = tuple[bytes, int, int]
"""The sender's token, the worker's index and the sender's port."""

_seats: dict[_Key, Callable[[], object] | None] = {}
"""Each running receiver -> creates it again; set when the sender enlists the same worker a second time."""

_tasks: set[asyncio.Task[None]] = set()
_lock = threading.Lock()


async def all_joined(calls: Iterable[Awaitable[object]]) -> None:
    """Wait for the calls that enlist workers, then raise the first error, if there is one."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def enlist(target: Any, scheme: ProcessGroupScheme, model_id: str | None, worker_idx: int) -> None:
    """Start a receiver for an object, on an event loop in a new thread. ``scheme``: for this worker only.

    Returns before the receiver has connected. Does nothing while the worker's receiver is running.
    AttributeError: the object, a context of ``init_on_receiver``, has no such model.
    """
    again = partial(enlist, target, scheme, model_id, worker_idx)
    seat = take_seat(target, scheme, model_id, worker_idx, again)
    if seat is not None:
        # Guard before the first commit, so that no commit happens during a forward pass.
        scheme.create_receiver().model_applier.guard_forwards(scheme.timeout)
        thread = LoopThread("aiosync-enlisted")
        thread.call(lambda: keep(thread.loop.create_task(_in_thread(thread, scheme, seat))))


def take_seat(
    target: Any,
    scheme: ProcessGroupScheme,
    model_id: str | None,
    worker_idx: int,
    again: Callable[[], object],
) -> _Key | None:
    """Initialise the receiver and return its key, or None if this worker's receiver is running.

    A running receiver calls ``again`` when it ends, unless its sender closed in order.
    """
    key = bytes(scheme._token), worker_idx, scheme.port_of_sender
    with _lock:
        if key in _seats:
            _seats[key] = again
            return None
        _seats[key] = None
    try:
        scheme.init_on_receiver(model_id=model_id, context=target, worker_idx=worker_idx)
        scheme.create_receiver()
    except BaseException:
        with _lock:
            del _seats[key]
        raise
    return key


def keep(task: asyncio.Task[None]) -> None:
    """Keep a strong reference to a task until it is done: an event loop refers to tasks weakly."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _in_thread(thread: LoopThread, scheme: ProcessGroupScheme, key: _Key) -> None:
    try:
        await serve(scheme, key)
    finally:
        start_thread(thread.close, "aiosync-enlisted")


async def serve(scheme: ProcessGroupScheme, key: _Key) -> None:
    """Connect and receive until the sender has gone, then release the seat."""
    receiver = scheme.create_receiver()
    try:
        await scheme.connect()
        await receiver.run()
    except AiosyncError as exc:
        # A live sender has had this error already.
        logger.warning("worker %d did not join: %s", key[1], exc)
    except Exception:  # noqa: BLE001 - what the model, or its owner's methods, raise
        logger.exception("worker %d has ended", key[1])
    finally:
        closed_in_order = receiver.ended is not None and not receiver.lost
        try:
            await scheme.aclose()
        finally:
            with _lock:
                again = _seats.pop(key)
            if again is not None and not closed_in_order:
                again()
