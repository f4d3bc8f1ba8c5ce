"""Workers that a sender makes beside objects of other processes, which know nothing of it.

Such an endpoint lives on an event loop in a thread of its own, as the blocking twins' do on theirs:
from its first commit after ``connect`` on, none lands in a running forward pass. Or it lives on the
object's own. It ends with its sender.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, TypeAlias

from aiosync.errors import AiosyncError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.stats import logger
from aiosync.transports._offload import LoopThread, aside

__all__ = ["enlist"]

_Key: TypeAlias = tuple[bytes, int]

_enlisted: set[_Key] = set()
_tasks: set[asyncio.Task[None]] = set()
_lock = threading.Lock()


def enlist(
    target: Any, scheme: WeightSyncScheme, model_id: str | None, worker_idx: int, *, own_loop: bool = False
) -> bool:
    """Make a worker of an object. Returns before it has connected; idempotent as long as it lives.

    Args:
        target: has the model, as a context of ``init_on_receiver`` has.
        scheme: the recipe, for this worker alone.
        model_id: the model's name.
        worker_idx: which worker it is to be.
        own_loop: whether it is to live on the running event loop, where nothing keeps its commits out of
            forward passes but :meth:`~aiosync.WeightSyncScheme.pinned`.

    Returns:
        Whether it was none before.

    Raises:
        AttributeError: it has no such model.
    """
    key = bytes(scheme._token), worker_idx
    with _lock:
        if key in _enlisted:
            return False
        _enlisted.add(key)
    try:
        scheme.init_on_receiver(model_id=model_id, context=target, worker_idx=worker_idx)
        if own_loop:
            _keep(asyncio.get_running_loop().create_task(_serve(scheme, key, guard=False)))
        else:
            thread = LoopThread("aiosync-enlisted")
            thread.call(_begin, thread, scheme, key)
    except BaseException:
        _forget(key)
        raise
    return True


def _forget(key: _Key) -> None:
    with _lock:
        _enlisted.discard(key)


def _keep(task: asyncio.Task[None]) -> None:
    """A loop alone does not."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _begin(thread: LoopThread, scheme: WeightSyncScheme, key: _Key) -> None:
    """In the thread."""
    _keep(thread.loop.create_task(_in_thread(thread, scheme, key)))


async def _in_thread(thread: LoopThread, scheme: WeightSyncScheme, key: _Key) -> None:
    try:
        await _serve(scheme, key, guard=True)
    finally:
        aside(thread.close, "aiosync-enlisted")


async def _serve(scheme: WeightSyncScheme, key: _Key, *, guard: bool) -> None:
    """Connect and receive, until the sender has gone."""
    try:
        await scheme.connect()
        receiver = scheme.get_receiver()
        if guard:
            receiver.intake.guard_forwards(scheme.timeout)
        await receiver.run()
    except AiosyncError as exc:
        # Its sender knows, if it is there.
        logger.warning("worker %d did not join: %s", key[1], exc)
    finally:
        await scheme.aclose()
        _forget(key)
