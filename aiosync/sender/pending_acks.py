"""The answers that a call waits for, and the one error to raise for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from aiosync._deadline import Deadline, DeadlineTimer
from aiosync.errors import (
    AiosyncError,
    JointUpdateError,
    Phase,
    SyncTimeoutError,
    WorkerLostError,
)
from aiosync.reports import WorkerReport

__all__ = ["PendingAcks", "first_failure"]


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


def first_failure(reports: Iterable[WorkerReport], deadline: Deadline) -> AiosyncError | None:
    """The one error to raise for a send: a refusal before a loss before a deadline.

    Losses are raised as one error that names all lost workers, and so are deadlines. What is not
    raised itself is added to it as notes.
    """
    refused: list[AiosyncError] = []
    gave_way: list[AiosyncError] = []
    lost: dict[int, str] = {}
    late: list[WorkerReport] = []
    for report in reports:
        if report.status == "lost" and isinstance(report.error, WorkerLostError):
            lost[report.worker] = report.error.reason
        elif report.status == "timeout":
            late.append(report)
        elif report.error is not None:
            # Of a joint update the cause says more than the siblings that gave way to it.
            (gave_way if isinstance(report.error, JointUpdateError) else refused).append(report.error)
    found = refused
    if lost:
        found.append(WorkerLostError(lost, "; ".join(sorted(set(lost.values())))))
    if late:
        found.append(_timeout(late, deadline))
    found += gave_way
    if not found:
        return None
    for other in found[1:]:
        found[0].add_note(f"also: {type(other).__name__}: {str(other).splitlines()[0]}")
    return found[0]


def _timeout(late: list[WorkerReport], deadline: Deadline) -> SyncTimeoutError:
    known = [report.error for report in late if isinstance(report.error, SyncTimeoutError)]
    order: tuple[Phase, ...] = ("connect", "stage", "commit", "ack")
    reached: list[Phase] = [error.phase for error in known]
    phase = min(reached, key=order.index) if reached else "ack"
    version = known[0].version if known else None
    hints = dict.fromkeys(error.hint for error in known if error.hint)
    return SyncTimeoutError(
        phase,
        seconds=deadline.seconds,
        workers={r.worker for r in late},
        version=version,
        hint="; ".join(hints),
    )
