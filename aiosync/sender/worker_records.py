"""What a sender remembers of its workers beyond their connections."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aiosync.errors import AiosyncError, WorkerLostError
from aiosync.reports import WorkerReport

__all__ = ["WorkerRecord", "WorkerRecords"]


class WorkerRecord(msgspec.Struct, eq=False):
    """What a sender remembers of one worker.

    Attributes:
        last_version: the version that the worker acknowledged last over an earlier connection; -1: none.
        lost: why the worker is not connected.
        unreported: a refusal that no call has waited for.
    """

    last_version: int = -1
    lost: WorkerLostError | None = None
    unreported: AiosyncError | None = None


class WorkerRecords(dict[int, WorkerRecord]):
    """Worker -> its record; a worker without one has nothing to remember."""

    def record(self, worker: int) -> WorkerRecord:
        """The record of a worker, which is made if there is none."""
        return self.setdefault(worker, WorkerRecord())

    def disconnected(self, worker: int, version: int, error: WorkerLostError) -> None:
        """The worker's connection has ended; it acknowledged ``version`` last."""
        record = self.record(worker)
        record.last_version, record.lost = version, error

    def connected(self, worker: int) -> None:
        """The worker has connected."""
        if worker in self:
            self[worker].lost = None

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
