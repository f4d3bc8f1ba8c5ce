"""What a call of the sender returns and raises, once its workers have answered or its deadline has passed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from aiosync._deadline import Deadline
from aiosync._options import SchemeOptions
from aiosync.errors import AiosyncError, JointUpdateError, Phase, SyncTimeoutError, WorkerLostError
from aiosync.events import EventSource, logger
from aiosync.reports import SendReport, WorkerReport
from aiosync.sender.pending_acks import PendingAcks
from aiosync.sender.registry import WorkerRegistry

__all__ = ["SendReports", "first_failure"]


class SendReports:
    """Makes the reports of one sender's calls.

    Args:
        registry: the workers.
        options: the scheme's options.
        model_id: the model's name.
        events: gets an event for each send.
    """

    def __init__(
        self, registry: WorkerRegistry, options: SchemeOptions, model_id: str | None, events: EventSource
    ) -> None:
        self._registry = registry
        self._options = options
        self._model_id = model_id
        self._events = events

    def conclude(
        self,
        acks: PendingAcks,
        deadline: Deadline,
        *,
        waited: bool,
        nbytes: int = 0,
        seconds: dict[str, float] | None = None,
    ) -> SendReport:
        """The report of a call.

        Args:
            acks: the workers' answers.
            deadline: the call's.
            waited: whether the call waited for them: workers that have not answered missed the deadline then.
            nbytes: bytes of the weights.
            seconds: phase -> its duration.
        """
        reports = dict(acks.reports)
        for worker in acks.pending:
            version = self._registry.version_of(worker)
            if waited:
                error = self._timeout(worker, acks, deadline)
                reports[worker] = WorkerReport(worker, "timeout", version, error=error)
                connection = self._registry.connections.get(worker)
                if connection is not None:
                    connection.mark_unresponsive()
            else:
                reports[worker] = WorkerReport(worker, "published", version)
        if not waited:
            reports.update(self._unreported(reports))
        dropped = self._drop(reports.values()) if self._options.on_failure == "drop" else ()
        return SendReport(acks.version, nbytes, dict(sorted(reports.items())), seconds or {}, dropped)

    def _unreported(self, workers: Collection[int]) -> dict[int, WorkerReport]:
        """Refusals of updates that no call waited for."""
        return {
            worker: WorkerReport(worker, "failed", self._registry.version_of(worker), error=error)
            for worker, error in self._registry.records.take_all_unreported(workers).items()
        }

    def _timeout(self, worker: int, acks: PendingAcks, deadline: Deadline) -> SyncTimeoutError:
        connection = self._registry.connections.get(worker)
        staged = connection is not None and connection.staged
        return SyncTimeoutError(
            "commit" if staged else acks.phase,
            seconds=deadline.seconds,
            workers=[worker],
            version=acks.version,
            hint=self._hint(worker),
        )

    def _hint(self, worker: int) -> str:
        refused = self._registry.admission.refused
        if not refused or worker in self._registry.connections:
            return ""
        return f"connections were refused meanwhile: {'; '.join(dict.fromkeys(refused))}"

    def _drop(self, reports: Collection[WorkerReport]) -> tuple[int, ...]:
        late = {r.worker for r in reports if r.status == "timeout"}
        lost = {r.worker for r in reports if r.status == "lost"}
        # A lost worker may have come again meanwhile.
        gone = sorted(late | (lost - self._registry.connections.keys()))
        for worker in gone:
            self._registry.drop(worker, "dropped: it was lost or missed a deadline")
        return tuple(gone)

    def raise_failure(self, report: SendReport, deadline: Deadline) -> None:
        """Raise the one error for a report's failures, if there are any. The error has the report."""
        reports = list(report.workers.values())
        if self._options.on_failure == "drop":
            reports = [r for r in reports if r.status not in ("lost", "timeout")]
        error = first_failure(reports, deadline)
        if error is not None:
            error.report = report
            raise error

    def emit_sent(self, report: SendReport) -> None:
        """Emit the event of a send, and log it."""
        if self._events.hooks:
            self._events.emit(
                "sent", self._model_id, report.version, nbytes=report.nbytes, seconds=report.seconds
            )
        if logger.isEnabledFor(logging.INFO):
            applied = sum(r.status in ("applied", "published") for r in report.workers.values())
            logger.info(
                "sent version %d of %s: %.3g MB to %d of %d workers in %.3g ms",
                report.version,
                self._model_id,
                report.nbytes / 1e6,
                applied,
                len(report.workers),
                1e3 * report.seconds["total"],
            )


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
