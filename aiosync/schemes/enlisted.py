"""Workers that a sender makes beside objects of other processes, which know nothing of it.

Such an endpoint lives on an event loop in a thread of its own, as the blocking twins' do on theirs:
from its first commit after ``connect`` on, none lands in a running forward pass. It ends with its
sender.
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
_lock = threading.Lock()


def enlist(target: Any, scheme: WeightSyncScheme, model_id: str | None, worker_idx: int) -> None:
    """Make a worker of an object. Returns before it has connected; idempotent as long as it lives.

    Args:
        target: has the model, as a context of ``init_on_receiver`` has.
        scheme: the recipe, for this worker alone.
        model_id: the model's name.
        worker_idx: which worker it is to be.

    Raises:
        AttributeError: it has no such model.
    """
    key = bytes(scheme._token), worker_idx
    with _lock:
        if key in _enlisted:
            return
        _enlisted.add(key)
    try:
        scheme.init_on_receiver(model_id=model_id, context=target, worker_idx=worker_idx)
        _Endpoint(scheme, key).begin()
    except BaseException:
        _forget(key)
        raise


def _forget(key: _Key) -> None:
    with _lock:
        _enlisted.discard(key)


class _Endpoint:
    """One worker.

    Args:
        scheme: initialised on the receiver.
        key: what it is known by here.
    """

    def __init__(self, scheme: WeightSyncScheme, key: _Key) -> None:
        self._scheme = scheme
        self._key = key
        self._thread = LoopThread("aiosync-enlisted")
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Connect and receive, until the sender has gone."""
        self._thread.call(self._start)

    def _start(self) -> None:
        self._task = self._thread.loop.create_task(self._main())

    async def _main(self) -> None:
        scheme = self._scheme
        try:
            await scheme.connect()
            receiver = scheme.get_receiver()
            receiver.intake.guard_forwards(scheme.timeout)
            await receiver.run()
        except AiosyncError as exc:
            logger.warning(
                "worker %d did not join: %s", self._key[1], exc
            )  # its sender knows, if it is there
        finally:
            await scheme.aclose()
            _forget(self._key)
            aside(self._thread.close, "aiosync-enlisted")
