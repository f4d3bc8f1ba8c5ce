"""The answers that a call of the sender waits for, and what the call then returns or raises."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiosync._deadline import Deadline, DeadlineTimer
from aiosync._options import SchemeOptions
from aiosync.errors import (
    NotConnectedError,
    Phase,
    SyncTimeoutError,
)
from aiosync.events import EventKind, EventSource, logger
from aiosync.protocol.frames import Ack
from aiosync.reports import SendReport, WorkerReport
from aiosync.sender.early_answers import EarlyAnswers
from aiosync.sender.failures import first_failure, not_dropped

if TYPE_CHECKING:
    from aiosync.sender.registry import WorkerRegistry

_TURN_EVERY = 0.001
"""Most seconds for which calls that find all answers there keep the event loop to themselves."""

_ITERATIONS = 4
"""Iterations of the event loop that such a call then leaves to others, whose work takes several."""


class PendingAcks:
    """Waits until some workers have answered for the version that they have to reach."""

    def __init__(
        self,
        version: int,
        workers: Iterable[int],
        *,
        phase: Phase = "stage",
        versions: Mapping[int, int] | None = None,
    ) -> None:
        self.version = version
        # The phase that an error names for a worker that has not answered and has not staged.
        self.phase: Phase = phase
        # Worker -> the version that it has to reach, where that is another one.
        self._versions = versions or {}
        # Worker -> its answer; and the workers that have not answered.
        self.reports: dict[int, WorkerReport] = {}
        self.pending = set(workers)
        # Whether a worker has answered anything but that it has the version.
        self.troubled = False
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

    def settle(self, report: WorkerReport, version: int | None = None) -> bool:
        """Note a worker's first answer. Return whether the call waited for it.

        Args:
            report: the answer.
            version: the version that it is for; an answer for an older version does not count. None: any.
        """
        worker = report.worker
        if worker not in self.pending:
            return False
        if version is not None and version < self.wanted(worker):
            return False
        self.pending.discard(worker)
        self.reports[worker] = report
        if report.status != "applied":
            self.troubled = True
            self._refused += report.status == "failed"
        if not self.pending:
            self.give_up()
        return True

    def wanted(self, worker: int) -> int:
        """The version that this worker has to reach."""
        return self._versions.get(worker, self.version)

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


@dataclass(eq=False, repr=False)
class AwaitedAcks:
    """The answers that calls wait for at the moment, one :class:`PendingAcks` for each call."""

    _model_id: str | None
    _events: EventSource
    tracked: list[PendingAcks] = field(default_factory=list, init=False)
    # Set when a worker has answered for its first version.
    joined: asyncio.Event = field(default_factory=asyncio.Event, init=False)

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

    def acknowledged(self, worker: int, ack: Ack, *, first: bool) -> None:
        """A worker runs on a version; ``first``: its first over this connection."""
        if first:
            self.joined.set()
        report = WorkerReport(worker, "applied", ack.version, ack.seconds)
        for acks in self.tracked:
            acks.settle(report, ack.version)
        if self._events.hooks:
            kind: EventKind = "joined" if first else "applied"
            self._events.emit(kind, self._model_id, ack.version, worker, seconds=ack.seconds)

    def answered(self, report: WorkerReport, version: int) -> bool:
        """A worker's answer for a version. Return whether a call waited for it."""
        awaited = False
        for acks in self.tracked:
            awaited |= acks.settle(report, version)
        return awaited

    def missed(self, report: WorkerReport, version: int) -> None:
        """A worker gets no newer version than this one: the report is its answer for those.

        A call that waits for its first version goes on, since the next one will do.
        """
        for acks in self.tracked:
            if acks.wanted(report.worker) > version and acks.phase != "connect":
                acks.settle(report)

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


@dataclass(eq=False, repr=False)
class AckWaiter:
    """Waits for the workers' answers, and makes the report or the one error of a call."""

    _registry: WorkerRegistry
    _options: SchemeOptions
    _model_id: str | None
    _events: EventSource

    _gave_turn: float = field(default=0.0, init=False)  # when a call left the event loop to others

    def __post_init__(self) -> None:
        self._early = EarlyAnswers(self._registry)

    # -- waits ------------------------------------------------------------------------------------

    async def until_answered(self, acks: PendingAcks, deadline: Deadline) -> None:
        """Wait until all workers have answered for a version that was just published, or the deadline.

        If all answer early, nothing is awaited; but the event loop gets a few iterations every millisecond.
        """
        self._early.take(acks, may_poll=deadline.seconds > 0)
        if acks.pending:
            await acks.wait(deadline, self._registry.timer)
        elif time.monotonic() - self._gave_turn > _TURN_EVERY:
            for _ in range(_ITERATIONS):
                await asyncio.sleep(0)
        else:
            return
        self._gave_turn = time.monotonic()

    async def wait_for(
        self,
        workers: Collection[int],
        deadline: Deadline,
        join: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Wait until these workers run on some version; ``join`` has them connect.

        Raises:
            SyncTimeoutError: some workers did not come in time; it names them.
            RemoteApplyError, LayoutMismatchError, WorkerLostError: a worker refused, or will not come.
        """
        registry = self._registry
        acks = PendingAcks(0, workers, phase="connect")
        for worker in list(acks.pending):
            if registry.version_of(worker) >= 0:
                acks.settle(WorkerReport(worker, "applied", registry.version_of(worker)))
        with registry.awaited.tracking(acks):
            if join is not None:
                await join()
            await acks.wait(deadline, registry.timer)
        self.raise_failure(self.conclude(acks, deadline, waited=True), deadline)

    async def add(
        self,
        worker: int | None,
        join: Callable[[int], Awaitable[object]],
        deadline: Deadline,
        *,
        may_be_new: bool,
    ) -> int:
        """Have a further worker connect, or a worker in the place of a lost one. Return its index.

        Raises:
            InvalidArgumentError: that worker is connected, or a new one would have no weights.
        """
        indices = self._registry.indices
        number = indices.expect(worker, self._registry.connections, may_be_new=may_be_new)
        try:
            await self.wait_for({number}, deadline, lambda: join(number))
        finally:
            indices.expect_no_more(number)
        return number

    async def wait_for_acks(self, targets: set[int], deadline: Deadline) -> SendReport:
        """Wait until these workers run on the version that was last published to them."""
        started = time.perf_counter()
        acks = self._registry.acks_for_current(targets)
        with self._registry.awaited.tracking(acks):
            await acks.wait(deadline, self._registry.timer)
        seconds = {"total": time.perf_counter() - started}
        report = self.conclude(acks, deadline, waited=True, seconds=seconds)
        self.raise_failure(report, deadline)
        return report

    async def wait_for_any(self, count: int, deadline: Deadline) -> None:
        """Wait until any ``count`` workers run on some version.

        Raises:
            SyncTimeoutError: there were fewer when the deadline passed.
        """
        joined = self._registry.awaited.joined
        try:
            async with asyncio.timeout(deadline.remaining()):
                while self._running() < count:
                    joined.clear()
                    await joined.wait()
        except TimeoutError:
            hint = "; ".join([f"{self._running()} of {count} workers have connected", *self._refusals()])
            raise deadline.error("connect", version=0, hint=hint) from None

    def _running(self) -> int:
        connections = self._registry.connections.values()
        return sum(connection.session.acked_version >= 0 for connection in connections)

    # -- the report -------------------------------------------------------------------------------

    def conclude(
        self,
        acks: PendingAcks,
        deadline: Deadline,
        *,
        waited: bool,
        nbytes: int = 0,
        seconds: dict[str, float] | None = None,
    ) -> SendReport:
        """The report of a call. If it ``waited``, workers that have not answered missed its deadline."""
        registry, reports = self._registry, dict(acks.reports)
        for worker in acks.pending:
            version, connection = registry.version_of(worker), registry.connections.get(worker)
            if not waited:
                reports[worker] = WorkerReport(worker, "published", version)
                continue
            staged = connection is not None and connection.staged
            error = SyncTimeoutError(
                "commit" if staged else acks.phase,
                seconds=deadline.seconds,
                workers=[worker],
                version=acks.version,
                hint="" if connection else "; ".join(self._refusals()),
            )
            reports[worker] = WorkerReport(worker, "timeout", version, error=error)
            if connection is not None:
                connection.mark_unresponsive()
        if not waited:  # refusals of updates that no call waited for
            for worker, refusal in registry.records.take_all_unreported(reports).items():
                reports[worker] = WorkerReport(worker, "failed", registry.version_of(worker), error=refusal)
        dropped = self._drop(reports.values()) if self._options.on_failure == "drop" else ()
        return SendReport(acks.version, nbytes, dict(sorted(reports.items())), seconds or {}, dropped)

    def _refusals(self) -> list[str]:
        reasons = dict.fromkeys(self._registry.admission.refused)
        return [f"connections were refused meanwhile: {'; '.join(reasons)}"] if reasons else []

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
        error = first_failure(not_dropped(report, self._options.on_failure), deadline)
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
            logger.info(
                "sent version %d of %s: %.3g MB to %d of %d workers in %.3g ms",
                report.version,
                self._model_id,
                report.nbytes / 1e6,
                len(report.workers) - len(report.failures),
                len(report.workers),
                1e3 * report.seconds["total"],
            )
