"""The sender: one model's weights, out to its workers.

States: NEW → LIVE → CLOSED. Everything happens on the loop that ``connect`` ran on, except copies and
allocations, which one thread does. ``send`` drafts, writes and publishes a version (see
:mod:`aiosync.sender.publisher` for what a cancellation does there) and then awaits the answers; cancelled
in that, the version stays published and the answers are taken as they come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress

import torch
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._home_loop import HomeLoop
from aiosync._open_calls import OpenCalls
from aiosync._options import SchemeOptions
from aiosync.errors import NotConnectedError, SyncTimeoutError
from aiosync.events import EventSource, SchemeStats, logger
from aiosync.reports import SendReport, WorkerReport
from aiosync.sender.pending_acks import Round, first_failure
from aiosync.sender.publisher import Prepared, Publisher, Sources, publish_together
from aiosync.sender.registry import Deliver, WorkerRegistry
from aiosync.sender.sharded.gather import ShardGather
from aiosync.sender.worker_group import Streams, WeightGroup
from aiosync.sender.worker_plan import SenderPlan
from aiosync.transports._offload import Offloader, uninterrupted
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import Listener
from aiosync.weights.arena import Arena
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["WeightSender"]


class WeightSender:
    """The live sending endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        spec: the scheme's options.
        plan: whom to send to.
        model_id: which model this is about.
        listener: where workers connect.
        token: the secret that workers must know.
        allocate: makes a segment of so many bytes on a device.
        streams: whether versions are sent block after block.
        deliver: says how versions of a group get over a connection.

    Attributes:
        home: the event loop that this lives on.
        registry: the workers.
        publisher: drafts and publishes.
    """

    def __init__(
        self,
        spec: SchemeOptions,
        plan: SenderPlan,
        model_id: str | None,
        listener: Listener,
        token: bytes,
        *,
        allocate: Callable[[int, torch.device], Segment],
        streams: Streams,
        deliver: Deliver,
        events: EventSource,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.model_id = model_id
        self.registry = WorkerRegistry(
            plan.workers,
            model_id,
            listener,
            token,
            elastic=plan.elastic,
            deliver=deliver,
            events=events,
            stats=SchemeStats(),
        )
        self._streams = streams
        self._events = events
        self._listener = listener
        self._allocate = allocate
        self._host = BackgroundTasks("aiosync-sender")
        self._offloader = Offloader("aiosync-sender")
        self._groups: list[WeightGroup] = []
        self.publisher = Publisher(self._groups, self.registry, self._host, spec.first_version)
        self._live = False
        self._closed = False
        self._calls = OpenCalls()
        self.home = HomeLoop("this sender")

    @property
    def version(self) -> int:
        """The version last published, -1 before ``connect``."""
        return self.publisher.version

    @property
    def stats(self) -> SchemeStats:
        """Figures so far."""
        stats = self.registry.stats
        stats.lag = {w: self.version - self.registry.version_of(w) for w in sorted(self.registry.workers)}
        stats.wire_nbytes = self.registry.wire_nbytes
        stats.memory = sum(group.arena.nbytes for group in self._groups)
        return stats

    def published(self) -> Mapping[str, Tensor] | None:
        """The newest version's tensors, in the memory that workers read; of the first group. They are new
        tensors: a caller that shares one with another process has torch move that one alone."""
        latest = self._groups[0].latest if self._groups else None
        return latest.slot.fresh_views() if latest is not None else None

    # -- connect ----------------------------------------------------------------------------------

    async def connect(
        self,
        sources: Sources,
        deadline: Deadline,
        *,
        min_workers: int | None = None,
        optional: Collection[str] = (),
        gathering: ShardGather | None = None,
    ) -> None:
        """Publish version 0 and wait until every worker runs on it; or ``min_workers`` of them, whichever.

        Args:
            sources: what version 0 is; its names, shapes and dtypes are those of all that follow.
            optional: further names that a later source may have, and that are not sent.
            gathering: brings together what is spread over ranks.

        Raises:
            SyncTimeoutError: some did not come in time; it names them. Call again to go on waiting.
            RemoteApplyError, LayoutMismatchError: a worker refused; it may connect again.
            NotConnectedError: this sender was closed meanwhile.
        """
        self.home.enter()
        async with self._calls.call():
            if not self._live:
                await self._open(sources, deadline, optional, gathering)
            if min_workers is not None:
                await self.registry.gather(min_workers, deadline)
            else:
                await self._await_all(self.registry.workers, deadline)
        self._events.emit("connected", self.model_id, self.version)

    async def await_workers(self, deadline: Deadline) -> None:
        """Wait until every worker is there, also those that were lost.

        Raises:
            SyncTimeoutError: some did not come in time; it names them.
            NotConnectedError: this was closed.
        """
        self.check_open()
        await self._await_all(self.registry.workers, deadline)

    async def add_worker(
        self, worker: int | None, join: Callable[[int], Awaitable[object]], deadline: Deadline
    ) -> int:
        """Let a further worker in, or one in the place of a lost one, and wait until it runs on the newest
        version.

        Args:
            worker: its index; None: the next.
            join: has it connect; given its index.

        Raises:
            InvalidArgumentError: it is there already.
            SyncTimeoutError: it did not come in time.
            RemoteApplyError, LayoutMismatchError: it refused.
            Exception: what ``join`` raises.
        """
        self.check_open()
        number = self.registry.expect(worker, may_be_new=not self.plan.per_worker)
        try:
            await self._await_all({number}, deadline, lambda: join(number))
        finally:
            self.registry.expect_no_more(number)
        return number

    async def _await_all(
        self,
        workers: Collection[int],
        deadline: Deadline,
        join: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Wait until these run on some version; ``join`` has them come."""
        registry = self.registry
        round_ = Round(-1, 0, workers, phase="connect")
        for worker in list(round_.pending):
            if registry.version_of(worker) >= 0:
                round_.settle(WorkerReport(worker, "applied", registry.version_of(worker)))
        registry.rounds.append(round_)
        try:
            if join is not None:
                await join()
            await round_.wait(deadline, self.registry.timer)
        finally:
            registry.rounds.remove(round_)
        report = self._conclude(round_, Prepared([], set(), None, deadline), waited=True)
        self._raise_failure(report, deadline)

    async def _open(
        self,
        sources: Sources,
        deadline: Deadline,
        optional: Collection[str],
        gathering: ShardGather | None,
    ) -> None:
        self.check_open()
        await self._host.start()
        try:
            for number, plan in enumerate(self.plan.groups):
                layout = Layout.of(sources[number], cast=self.spec.cast, optional=optional)
                arena = Arena(layout, self._allocator(plan.device), self.spec.max_slots)
                group = WeightGroup(plan.workers, plan.device, arena, self._offloader, streams=self._streams)
                self._groups.append(group)
                # Two at once: the first send after this one then runs into warm pages too.
                await group.reserve(2)
            async with self.publisher.lock.hold(deadline):
                prepared = await self.publisher.prepare(
                    sources, set(), strict=True, joint=None, deadline=deadline
                )
                await self.publisher.fill(prepared, gathering)
                await publish_together([(self.publisher, prepared)], fallback=False)
            self.registry.rounds.clear()
            await self.registry.open(self._host, self._groups)
        except BaseException:
            await self._abandon()
            raise
        self._live = True
        if gathering is not None:
            gathering.published(self.version)

    async def _abandon(self) -> None:
        await self._host.aclose()
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._host = BackgroundTasks("aiosync-sender")
        self.publisher = Publisher(self._groups, self.registry, self._host, self.spec.first_version)

    def _allocator(self, device: torch.device) -> Callable[[int], Segment]:
        return lambda nbytes: self._allocate(nbytes, device)

    # -- send -------------------------------------------------------------------------------------

    async def send(
        self,
        sources: Sources,
        targets: set[int],
        *,
        wait: bool,
        strict: bool,
        deadline: Deadline,
        gathering: ShardGather | None = None,
    ) -> SendReport:
        """Publish the next version to ``targets``; wait for their answers if told to.

        Raises:
            LayoutMismatchError: the source does not fit; nothing was sent.
            WorkerLostError, RemoteApplyError, SyncTimeoutError: see :func:`first_failure`; the healthy
                workers have been updated.
        """
        self.check_open()
        publisher = self.publisher
        if not publisher.lock.acquire_nowait():
            await publisher.lock.acquire(deadline)
        try:
            prepared = await publisher.prepare(
                sources,
                targets,
                strict=strict,
                joint=None,
                deadline=deadline,
                may_spill=not wait and gathering is None,
            )
            if gathering is not None or prepared.sharded:
                await publisher.fill(prepared, gathering)
            try:
                (round_,) = await publish_together([(publisher, prepared)], fallback=wait)
            finally:
                if gathering is not None and prepared.round is not None:  # also if this was cancelled since
                    gathering.published(self.version)
        finally:
            publisher.lock.release()
        report = await self.finish(prepared, round_, wait=wait)
        if not wait or round_.troubled or round_.pending:
            self._raise_failure(report, deadline)
        return report

    async def finish(self, prepared: Prepared, round_: Round, *, wait: bool) -> SendReport:
        """Wait for the answers if told to, and report; raises nothing but a cancellation."""
        begun = time.perf_counter()
        try:
            if wait:
                await round_.wait(prepared.deadline, self.registry.timer)
        finally:
            self.publisher.settle(prepared)
        prepared.seconds["ack"] = time.perf_counter() - begun
        report = self._conclude(round_, prepared, waited=wait)
        stats = self.registry.stats
        stats.updates += 1
        stats.nbytes += report.nbytes
        stats.add_phases(report.seconds)
        self._tell_world(report)
        return report

    async def wait_ack(self, targets: set[int], deadline: Deadline) -> SendReport:
        """Wait until ``targets`` run on what was last published to them."""
        self.check_open()
        prepared = Prepared([], targets, None, deadline)
        round_ = self.registry.await_all(targets)
        try:
            await round_.wait(deadline, self.registry.timer)
        finally:
            self.registry.rounds.remove(round_)
        report = self._conclude(round_, prepared, waited=True)
        self._raise_failure(report, deadline)
        return report

    # -- reports ------------------------------------------------------------------------------------

    def _conclude(self, round_: Round, prepared: Prepared, *, waited: bool) -> SendReport:
        reports = dict(round_.reports)
        for worker in round_.pending:
            version = self.registry.version_of(worker)
            if not waited:
                reports[worker] = WorkerReport(worker, "published", version)
                continue
            error = SyncTimeoutError(
                round_.phases[worker],
                seconds=prepared.deadline.seconds,
                workers=[worker],
                version=round_.version,
                hint=self._hint(worker),
            )
            reports[worker] = WorkerReport(worker, "timeout", version, error=error)
            self.registry.mark_late(worker)
        if not waited:
            earlier = self.registry.take_unreported(prepared.targets)
            reports.update({report.worker: report for report in earlier})
        dropped = self._drop(reports.values()) if self.spec.on_failure == "drop" else ()
        prepared.seconds["total"] = time.perf_counter() - prepared.started
        return SendReport(
            round_.version,
            prepared.nbytes,
            dict(sorted(reports.items())),
            prepared.seconds,
            dropped,
        )

    def _hint(self, worker: int) -> str:
        refused = self.registry.reception.refused
        if not refused or worker in self.registry.connections:
            return ""
        return f"connections were refused meanwhile: {'; '.join(dict.fromkeys(refused))}"

    def _drop(self, reports: Collection[WorkerReport]) -> tuple[int, ...]:
        late = {r.worker for r in reports if r.status == "timeout"}
        lost = {r.worker for r in reports if r.status == "lost"}
        # A lost worker may have come again meanwhile.
        gone = sorted(late | (lost - self.registry.connections.keys()))
        for worker in gone:
            self.registry.drop(worker, "dropped: it was lost or missed a deadline")
        return tuple(gone)

    def _raise_failure(self, report: SendReport, deadline: Deadline) -> None:
        reports = list(report.workers.values())
        if self.spec.on_failure == "drop":
            reports = [r for r in reports if r.status not in ("lost", "timeout")]
        error = first_failure(reports, deadline)
        if error is not None:
            error.report = report
            raise error

    def _tell_world(self, report: SendReport) -> None:
        if self._events.hooks:
            self._events.emit(
                "sent", self.model_id, report.version, nbytes=report.nbytes, seconds=report.seconds
            )
        if logger.isEnabledFor(logging.INFO):
            applied = sum(r.status in ("applied", "published") for r in report.workers.values())
            logger.info(
                "sent version %d of %s: %.3g MB to %d of %d workers in %.3g ms",
                report.version,
                self.model_id,
                report.nbytes / 1e6,
                applied,
                len(report.workers),
                1e3 * report.seconds["total"],
            )

    # -- close --------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Say goodbye to the workers and let go of everything; idempotent. Workers keep the version
        that they have."""
        if self._closed:
            return
        if self.home.closed:
            self._closed = True
            self._abandon_loop()
        self.home.check()
        self._closed = True
        await uninterrupted(lambda _: self._close())

    def _abandon_loop(self) -> None:
        """Release what can be released without the loop that this endpoint lived on."""
        with ExitStack() as last:
            last.callback(self._offloader.close)
            for group in self._groups:
                last.callback(group.close)
            with suppress(RuntimeError):  # parts of it lived on that loop
                self._listener.close()

    async def _close(self) -> None:
        await self._calls.stop()
        async with AsyncExitStack() as last:  # the last first, whatever raises
            last.callback(self._events.emit, "closed", self.model_id, self.version)
            last.callback(self._offloader.close)
            for group in self._groups:
                last.callback(group.close)
            last.callback(self._listener.close)
            last.push_async_callback(self._host.aclose)
            self._listener.stop()
            await self.publisher.stop()
            await self.registry.close("the sender has closed")

    def check_open(self) -> None:
        """Check that this endpoint can be used here.

        Raises:
            NotConnectedError: it has been closed.
            WrongEventLoopError: it lives on another event loop.
        """
        if self._closed:
            raise NotConnectedError("this sender is closed; make a new scheme to send again")
        self.home.check()
