"""Rounds: one published version, and who has answered for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiosync._deadline import Deadline, DeadlineTimer
from aiosync.errors import (
    AiosyncError,
    JointUpdateError,
    Phase,
    SyncTimeoutError,
    WorkerLostError,
)
from aiosync.reports import WorkerReport
from aiosync.transfer.slots import JointRound

__all__ = ["Round", "first_failure"]


class Round:
    """Waits for the answers of some workers.

    Attributes:
        number: never used twice; -1 for one that only waits for what was sent before.
        version: the version that workers have to reach.
        reports: the answers so far.
        phases: how far each worker got that has not answered.
        pending: the workers that have not.
        troubled: whether one has answered anything but that it has the version.
        wanted: the version that each worker has to reach.
        joint: set if this is one part of a joint update.
    """

    def __init__(
        self,
        number: int,
        version: int,
        workers: Iterable[int],
        joint: JointRound | None = None,
        *,
        phase: Phase = "stage",
    ) -> None:
        self.number = number
        self.version = version
        self.reports: dict[int, WorkerReport] = {}
        self.joint = joint
        self.phases: dict[int, Phase] = dict.fromkeys(workers, phase)
        self.wanted: dict[int, int] = dict.fromkeys(self.phases, version)
        self.pending = set(self.phases)
        self.troubled = False
        self._refused = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def withdrawn(self) -> bool:
        """Whether every worker answered that it did not take this version. One that was lost may have it."""
        return 0 < self._refused == len(self.phases)

    def include(self, worker: int, phase: Phase = "stage") -> None:
        """Wait for this worker too."""
        if worker not in self.phases:
            self.phases[worker], self.wanted[worker] = phase, self.version
            self.pending.add(worker)

    def settle(self, report: WorkerReport) -> None:
        """Take a worker's answer; only its first counts."""
        if report.worker in self.pending:
            self.pending.discard(report.worker)
            self.reports[report.worker] = report
            if report.status != "applied":
                self.troubled = True
                self._refused += report.status == "failed"
            if self._waiter is not None and not self._waiter.done() and not self.pending:
                self._waiter.set_result(None)

    def give_up(self) -> None:
        """End a :meth:`wait` for those that are pending."""
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
