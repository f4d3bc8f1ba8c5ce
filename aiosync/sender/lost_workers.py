"""Processes that have lost their sender, or were dropped by it, and may still be reading its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable

from aiosync.sender.connection import WorkerConnection
from aiosync.transports.process_watch import ProcessWatch

__all__ = ["LostWorkers"]


class LostWorkers:
    """A process that lost its channel but runs on may be computing with a slot: the slot stays held in its
    name until it has ended, is back, or says that it has let go."""

    def __init__(self) -> None:
        self._watches: dict[tuple[int, int], tuple[ProcessWatch, Callable[[], None]]] = {}

    def adopt(self, connection: WorkerConnection, unseen: Hashable | None = None) -> Hashable | None:
        """The name in which what a worker reads is to be held; None if it reads nothing any more.

        Args:
            connection: the worker.
            unseen: the name if its process cannot be watched, or is this one; None: then its channel is all
                there is.
        """
        pid, group = connection.pid, connection.group
        if not connection.reading:
            return None
        if pid in (0, os.getpid()):
            return unseen
        key, name = (connection.worker, pid), ("orphan", connection.worker, pid)

        def over() -> None:
            self._watches.pop(key, None)
            group.release(name)

        watch = ProcessWatch(pid, over)
        if not watch.watching:
            return None if watch.gone else unseen
        if key in self._watches:  # another of the same index: both are over when the process is
            self._watches.pop(key)[0].close()
        self._watches[key] = watch, over
        return name

    def let_go(self, worker: int, pid: int) -> None:
        """It reads nothing any more: so it says, or it has connected again."""
        found = self._watches.get((worker, pid))
        if found is not None:
            watch, over = found
            watch.close()
            over()

    def close(self) -> None:
        """Stop watching all processes."""
        for watch, _ in self._watches.values():
            watch.close()
        self._watches.clear()
