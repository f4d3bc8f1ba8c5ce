"""Processes that have lost their sender, or were dropped by it, and may still read its memory."""

from __future__ import annotations

import os
from collections.abc import Callable

from aiosync.protocol.frames import Bye, Frame
from aiosync.transfer.slots import Lease
from aiosync.transports.process_watch import ProcessWatch

__all__ = ["DroppedConnection", "LostWorkers"]


class LostWorkers:
    """Keeps the leases of processes that lost their connection but run on.

    Such a process may be computing with a slot. Its leases end when the process has ended, when its worker
    connects again, or when the worker says that it has released the slots.
    """

    def __init__(self) -> None:
        # By worker and process, because a worker's index may go to another process.
        self._watches: dict[tuple[int, int], ProcessWatch] = {}
        self._leases: dict[tuple[int, int], list[Lease]] = {}

    def keep(self, worker: int, pid: int, leases: list[Lease]) -> list[Lease]:
        """Keep leases until the process has ended.

        Args:
            worker: the worker's index.
            pid: its process; 0 if unknown.
            leases: leases on the slots that the process may read.

        Returns:
            The leases that stay the caller's, because the process cannot be watched or is this one.
        """
        if not leases or pid in (0, os.getpid()):
            return leases
        watch = ProcessWatch(pid, lambda: self.release(worker, pid))
        if watch.gone:
            for lease in leases:
                lease.release()
            return []
        if not watch.watching:
            return leases
        self._close_watch(worker, pid)
        self._watches[worker, pid] = watch
        self._leases.setdefault((worker, pid), []).extend(leases)
        return []

    def release(self, worker: int, pid: int) -> None:
        """The process reads nothing any more: it has ended, has said so, or has connected again."""
        self._close_watch(worker, pid)
        for lease in self._leases.pop((worker, pid), ()):
            lease.release()

    def _close_watch(self, worker: int, pid: int) -> None:
        watch = self._watches.pop((worker, pid), None)
        if watch is not None:
            watch.close()

    def close(self) -> None:
        """Stop watching all processes."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self._leases.clear()


class DroppedConnection:
    """The sink of a dropped worker's connection. Only the worker's goodbye, or its end, counts.

    Args:
        on_end: called once; with True if the worker said that it reads no slot any more.
    """

    def __init__(self, on_end: Callable[[bool], None]) -> None:
        self._on_end: Callable[[bool], None] | None = on_end

    def frame_received(self, frame: Frame) -> None:
        """Handle the worker's Bye; ignore all other frames."""
        if isinstance(frame, Bye):
            self._end(said_so=not frame.dropped)

    def connection_lost(self, reason: str) -> None:
        """Handle the end of the connection."""
        self._end(said_so=False)

    def _end(self, *, said_so: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(said_so)
