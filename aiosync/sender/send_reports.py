"""What a call of the sender returns and raises, once its workers have answered or its deadline has passed."""

from __future__ import annotations

import logging
from collections.abc import Collection

from aiosync._deadline import Deadline
from aiosync._options import SchemeOptions
from aiosync.errors import SyncTimeoutError
from aiosync.events import EventSource, logger
from aiosync.reports import SendReport, WorkerReport
from aiosync.sender.pending_acks import PendingAcks, first_failure
from aiosync.sender.registry import WorkerRegistry

__all__ = ["SendReports"]


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
