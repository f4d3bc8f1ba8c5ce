"""The one error that a call raises for the answers of several workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from aiosync._deadline import Deadline
from aiosync.errors import AiosyncError, JointUpdateError, Phase, SyncTimeoutError, WorkerLostError
from aiosync.reports import SendReport, WorkerReport

E = TypeVar("E", bound=BaseException)


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
    return with_notes(found) if found else None


def not_dropped(report: SendReport, on_failure: str) -> list[WorkerReport]:
    """Return the workers' reports, with ``on_failure="drop"`` without those of lost and of late workers."""
    drops = on_failure == "drop"
    return [each for each in report.workers.values() if not drops or each.status not in ("lost", "timeout")]


def with_notes(errors: Sequence[E]) -> E:
    """Return the first error, with a note for each of the others."""
    first, *others = errors
    for other in others:
        first.add_note(f"also: {type(other).__name__}: {str(other).partition(chr(10))[0]}")
    return first


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
