"""Workers without a connection: what is remembered of them, and which may still read the sender's memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from aiosync._deadline import Deadline
from aiosync.errors import AiosyncError, WorkerLostError
from aiosync.protocol.frames import Bye, Frame
from aiosync.reports import WorkerReport
from aiosync.transfer.slots import Lease, release_all
from aiosync.transports.process_watch import ProcessWatch

_MOMENT = 2.0
"""Seconds that a worker whose connection broke has to come back before the trainer learns of its absence."""


class WorkerRecord(msgspec.Struct, eq=False):
    """What a sender remembers of one worker beyond its connections."""

    last_version: int = -1
    """The version that the worker acknowledged last over an earlier connection; -1: none."""
    lost: WorkerLostError | None = None
    """Why the worker is not connected."""
    unreported: AiosyncError | None = None
    """A refusal that no call has waited for."""


class WorkerRecords(dict[int, WorkerRecord]):
    """Worker -> its record; a worker without one has nothing to remember."""

    def __missing__(self, worker: int) -> WorkerRecord:
        record = self[worker] = WorkerRecord()
        return record

    def disconnected(self, worker: int, version: int, error: WorkerLostError) -> None:
        """The worker's connection has ended; it acknowledged ``version`` last."""
        record = self[worker]
        record.last_version, record.lost = version, error

    def last_version(self, worker: int) -> int:
        """The version that the worker acknowledged over an earlier connection; -1: none."""
        return self[worker].last_version if worker in self else -1

    def absence(self, worker: int) -> WorkerReport:
        """The answer of a worker that is not connected."""
        lost = self[worker].lost if worker in self else None
        error = lost or WorkerLostError([worker], "it has not connected yet")
        return WorkerReport(worker, "lost", self.last_version(worker), error=error)

    def take_unreported(self, worker: int) -> AiosyncError | None:
        """A refusal that no call has waited for. It is returned once."""
        record = self.get(worker)
        if record is None:
            return None
        error, record.unreported = record.unreported, None
        return error

    def take_all_unreported(self, workers: Iterable[int]) -> dict[int, AiosyncError]:
        """The refusals of these workers that no call has waited for. Each is returned once."""
        if not self:
            return {}
        found = {worker: self.take_unreported(worker) for worker in workers}
        return {worker: error for worker, error in found.items() if error is not None}


@dataclass(eq=False, repr=False)
class LostWorkers:
    """Keeps the leases of processes that lost their connection but run on.

    Such a process may be computing with a slot. Its leases end when the process has ended, when its worker
    connects again, or when the worker confirms that it has released the slots.
    """

    # By worker and process, because a worker's index may go to another process.
    _watches: dict[tuple[int, int], ProcessWatch] = field(default_factory=dict)
    _leases: dict[tuple[int, int], list[Lease]] = field(default_factory=dict)

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
            release_all(leases)
            return []
        if not watch.watching:
            return leases
        self._close_watch(worker, pid)
        self._watches[worker, pid] = watch
        self._leases.setdefault((worker, pid), []).extend(leases)
        return []

    def release(self, worker: int, pid: int) -> None:
        """The process reads no slot any more: it has ended, has sent a Bye, or has connected again."""
        self._close_watch(worker, pid)
        release_all(self._leases.pop((worker, pid), ()))

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


@dataclass(eq=False, repr=False)
class DroppedConnection:
    """The sink of a dropped worker's connection, which waits for the worker's Bye or for the end."""

    # Called once; with True if the worker's Bye confirms that it reads no slot any more.
    _on_end: Callable[[bool], None] | None

    def frame_received(self, frame: Frame) -> None:
        """Handle the Bye that confirms; ignore all other frames, such as one that announces that Bye."""
        if isinstance(frame, Bye) and not frame.dropped:
            self._end(released=True)

    def connection_lost(self, reason: str) -> None:
        """Handle the end of the connection."""
        self._end(released=False)

    def _end(self, *, released: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(released)


@dataclass(eq=False, repr=False)
class AwayWorkers:
    """Workers of a relay that were disconnected without a goodbye, and may still act on an older version."""

    _patience: float  # seconds after which a worker that has not come back has given up its relay
    # Worker -> when its connection broke, in monotonic seconds.
    _since: dict[int, float] = field(default_factory=dict, init=False)
    _returned: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def add(self, worker: int) -> None:
        self._since[worker] = time.monotonic()

    def remove(self, worker: int) -> bool:
        """The worker that had this index is connected again. Return whether it was away."""
        self._returned.set()
        return self._since.pop(worker, None) is not None

    def now(self) -> list[int]:
        """The indices of the workers that are away."""
        now = time.monotonic()
        self._since = {w: since for w, since in self._since.items() if since + self._patience > now}
        return sorted(self._since)

    async def one_returns(self, deadline: Deadline) -> bool:
        """Wait for a worker that left a moment ago to come back, as most do. Return whether one has."""
        left = [self._since[worker] + _MOMENT - time.monotonic() for worker in self.now()]
        seconds = min(max(left, default=0.0), deadline.remaining())
        if seconds <= 0:
            return False
        self._returned.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._returned.wait()
        except TimeoutError:
            return False
        return True
