"""The answers that calls wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from aiosync._deadline import Deadline, DeadlineTimer
from aiosync.errors import (
    NotConnectedError,
    Phase,
)
from aiosync.reports import WorkerReport

__all__ = ["AwaitedAcks", "PendingAcks"]


class PendingAcks:
    """Waits for the answers of some workers.

    Args:
        version: the version that the workers have to reach.
        workers: their indices.
        phase: the phase that an error names for a worker that has not answered and has not staged.
        versions: the version that a worker has to reach, where that differs.

    Attributes:
        reports: worker -> its answer.
        pending: the workers that have not answered.
        troubled: whether a worker has answered anything but that it has the version.
    """

    def __init__(
        self,
        version: int,
        workers: Iterable[int],
        *,
        phase: Phase = "stage",
        versions: Mapping[int, int] | None = None,
    ) -> None:
        self.version = version
        self.phase: Phase = phase
        self.reports: dict[int, WorkerReport] = {}
        self.pending = set(workers)
        self.troubled = False
        self._versions = versions or {}
        self._refused = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def all_refused(self) -> bool:
        """Whether every worker refused the version. A worker that was lost may have it."""
        return 0 < self._refused == len(self.reports) and not self.pending

    def include(self, worker: int) -> None:
        """Wait for this worker too."""
        if worker not in self.reports:
            self.pending.add(worker)

    def expects(self, worker: int, version: int) -> bool:
        """Whether a worker's answer for this version is what the call waits for."""
        return worker in self.pending and version >= self._versions.get(worker, self.version)

    def settle(self, report: WorkerReport) -> None:
        """Take a worker's answer; only its first counts."""
        if report.worker in self.pending:
            self.pending.discard(report.worker)
            self.reports[report.worker] = report
            if report.status != "applied":
                self.troubled = True
                self._refused += report.status == "failed"
            if not self.pending:
                self.give_up()

    def give_up(self) -> None:
        """End a :meth:`wait` although workers are pending."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, deadline: Deadline, timer: DeadlineTimer) -> bool:
        """Wait until all have answered, or the deadline; returns whether they have."""
        if not self.pending:
            return True
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await timer.wait(self._waiter, deadline)
        finally:
            self._waiter = None
        return not self.pending


class AwaitedAcks:
    """The answers that calls wait for at the moment.

    Attributes:
        tracked: one for each call.
    """

    def __init__(self) -> None:
        self.tracked: list[PendingAcks] = []

    def track(self, acks: PendingAcks) -> None:
        """Settle ``acks`` with the workers' answers until :meth:`untrack`."""
        self.tracked.append(acks)

    def untrack(self, acks: PendingAcks) -> None:
        """The call that waited for these answers has returned."""
        self.tracked.remove(acks)

    @contextmanager
    def tracking(self, acks: PendingAcks) -> Iterator[PendingAcks]:
        """:meth:`track` for the body."""
        self.track(acks)
        try:
            yield acks
        finally:
            self.untrack(acks)

    def settle(self, report: WorkerReport) -> None:
        """A worker's answer, for all calls that wait for it, whatever version they wait for."""
        for acks in self.tracked:
            acks.settle(report)

    def answered(self, report: WorkerReport, version: int) -> bool:
        """A worker's answer for a version. Return whether a call waited for it."""
        awaited = False
        for acks in self.tracked:
            if acks.expects(report.worker, version):
                acks.settle(report)
                awaited = True
        return awaited

    def include(self, worker: int) -> None:
        """All calls wait for this worker too."""
        for acks in self.tracked:
            acks.include(worker)

    def close(self, reason: str, version_of: Callable[[int], int]) -> None:
        """Settle all with NotConnectedError: no answer will come."""
        for acks in self.tracked:
            for worker in list(acks.pending):
                error = NotConnectedError(f"{reason} before worker {worker} had answered")
                acks.settle(WorkerReport(worker, "lost", version_of(worker), error=error))
