"""The sender: one model's weights, out to its workers.

States: NEW → LIVE → CLOSED. Everything happens on the loop that ``connect`` ran on, except copies and
allocations, which one thread does. ``send`` has three parts; what a cancellation leaves behind in each:

1. *draft*: slots are taken, nothing is written. Cancelled: the slots are given back.
2. *write and publish*: cancelled, the copy stops at its next piece and the slots are given back; unless
   a version that nobody had fetched yet is being overwritten: then it is finished and published.
3. *await the answers*: cancelled, the version stays published and the answers are taken as they come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, NotConnectedError, SyncTimeoutError
from aiosync.protocol.frames import Joint
from aiosync.schemes._host import TaskHost
from aiosync.schemes.group import Draft, Published, WeightGroup
from aiosync.schemes.plan import SenderPlan
from aiosync.schemes.report import SendReport, WorkerReport
from aiosync.schemes.roster import Roster
from aiosync.schemes.rounds import Round, first_failure
from aiosync.schemes.spec import SchemeSpec
from aiosync.schemes.stats import EventSource, SchemeStats, SyncEvent, logger
from aiosync.transports._offload import Offloader, uninterrupted
from aiosync.transports.base import Listener
from aiosync.weights.arena import Arena
from aiosync.weights.copying import nbytes_of
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["Prepared", "WeightSender"]

Sources = Mapping[int, Mapping[str, Tensor]]
"""Worker -> entry name -> tensor. The workers of one group have the same."""


@dataclass(slots=True)
class Prepared:
    """A version on its way.

    Attributes:
        before: for each draft, what was the newest until this version was published.
    """

    drafts: list[Draft]
    targets: set[int]
    joint: Joint | None
    deadline: Deadline
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    before: list[Published | None] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


class WeightSender:
    """The live sending endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        spec: the scheme's options.
        plan: whom to send to.
        model_id: which model this is about.
        listener: where workers connect.
        token: the secret that workers must know.
        allocate: makes a segment of so many bytes on a device.
        holds: whether workers view the memory that they are given, instead of copying from it.

    Attributes:
        version: the version last published, -1 before ``connect``.
        roster: the workers.
    """

    def __init__(
        self,
        spec: SchemeSpec,
        plan: SenderPlan,
        model_id: str | None,
        listener: Listener,
        token: bytes,
        *,
        allocate: Callable[[int, torch.device], Segment],
        holds: bool,
        events: EventSource,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.model_id = model_id
        self.version = -1
        self.roster = Roster(
            plan.workers, model_id, listener, token, holds=holds, events=events, stats=SchemeStats()
        )
        self._events = events
        self._listener = listener
        self._allocate = allocate
        self._host = TaskHost("aiosync-sender")
        self._offloader = Offloader("aiosync-sender")
        self._groups: list[WeightGroup] = []
        self._round = -1
        self._lock = asyncio.Lock()
        self._live = False
        self._closed = False

    @property
    def stats(self) -> SchemeStats:
        """Figures so far."""
        stats = self.roster.stats
        stats.lag = {w: self.version - self.roster.version_of(w) for w in sorted(self.roster.workers)}
        stats.memory = sum(group.arena.nbytes for group in self._groups)
        return stats

    def published(self) -> Mapping[str, Tensor] | None:
        """The newest version's tensors, in the memory that workers read; of the first group."""
        latest = self._groups[0].latest if self._groups else None
        return latest.slot.views if latest is not None else None

    # -- connect ----------------------------------------------------------------------------------

    async def connect(self, sources: Sources, deadline: Deadline) -> None:
        """Publish version 0 and wait until every worker runs on it.

        Raises:
            SyncTimeoutError: some did not come in time; it names them. Call again to go on waiting.
            RemoteApplyError, LayoutMismatchError: a worker refused; it may connect again.
        """
        if not self._live:
            await self._open(sources, deadline)
        roster = self.roster
        round_ = Round(-1, 0, roster.workers, phase="connect")
        for worker in list(round_.pending):
            if roster.version_of(worker) >= 0:
                round_.settle(WorkerReport(worker, "applied", roster.version_of(worker)))
        roster.rounds.append(round_)
        try:
            await round_.wait(deadline)
        finally:
            roster.rounds.remove(round_)
        report = self._conclude(round_, Prepared([], set(), None, deadline), waited=True)
        self._events.emit(SyncEvent("connected", self.model_id, self.version))
        self._raise_failure(report, deadline)

    async def _open(self, sources: Sources, deadline: Deadline) -> None:
        self._check_open()
        await self._host.start()
        try:
            for plan in self.plan.groups:
                layout = Layout.of(sources[plan.workers[0]], cast=self.spec.cast)
                arena = Arena(layout, self._allocator(plan.device), self.spec.max_slots)
                group = WeightGroup(plan.workers, plan.device, arena, self._offloader)
                self._groups.append(group)
                # Two at once: the first send after this one then runs into warm pages too.
                await group.reserve(2)
            prepared = await self.prepare(sources, set(), strict=True, joint=None, deadline=deadline)
            await self.publish(prepared, fallback=False)
            self.roster.rounds.clear()
            await self.roster.open(self._host, self._groups)
        except BaseException:
            await self._abandon()
            raise
        self._live = True

    async def _abandon(self) -> None:
        await self._host.aclose()
        self._host = TaskHost("aiosync-sender")
        for group in self._groups:
            group.close()
        self._groups.clear()
        self.version = self._round = -1

    def _allocator(self, device: torch.device) -> Callable[[int], Segment]:
        return lambda nbytes: self._allocate(nbytes, device)

    # -- send -------------------------------------------------------------------------------------

    async def send(
        self, sources: Sources, targets: set[int], *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        """Publish the next version to ``targets``; wait for their answers if told to.

        Raises:
            LayoutMismatchError: the source does not fit; nothing was sent.
            WorkerLostError, RemoteApplyError, SyncTimeoutError: see :func:`first_failure`; the healthy
                workers have been updated.
        """
        async with self.exclusive(deadline):
            prepared = await self.prepare(
                sources, targets, strict=strict, joint=None, deadline=deadline, may_spill=not wait
            )
            round_ = await self.publish(prepared, fallback=wait)
        report = await self.finish(prepared, round_, wait=wait)
        self._raise_failure(report, deadline)
        return report

    @asynccontextmanager
    async def exclusive(self, deadline: Deadline) -> AsyncIterator[None]:
        """The right to draft and publish, which one ``send`` has at a time.

        Raises:
            SyncTimeoutError: another had it until the deadline.
        """
        if self._lock.locked():
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await self._lock.acquire()
            except TimeoutError:
                raise deadline.error("stage", hint="an earlier send was still copying") from None
        else:
            await self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    async def prepare(
        self,
        sources: Sources,
        targets: set[int],
        *,
        strict: bool,
        joint: Joint | None,
        deadline: Deadline,
        may_spill: bool = False,
    ) -> Prepared:
        """Check the sources and take slots. What it returns is to be published or discarded.

        ``may_spill``: nobody waits for it, so where no slot is free it need not be in one yet.
        """
        self._check_open()
        prepared = Prepared([], targets, joint, deadline)
        wanted = [group for group in self._groups if not targets or group.workers & targets]
        fitted = [g.arena.layout.fit(sources[min(g.workers)], strict=strict) for g in wanted]
        try:
            for group, pairs in zip(wanted, fitted, strict=True):
                if len(pairs) < len(group.arena.layout) and group.latest is None:
                    raise InvalidArgumentError(
                        "strict=False builds on the version before, and that one was lost: "
                        "send all entries once"
                    )
                parked = self.roster.parked(group)
                draft = await group.draft(pairs, targets, parked, deadline, may_spill=may_spill)
                prepared.drafts.append(draft)
                prepared.nbytes += nbytes_of(tensor for _, tensor in pairs)
                if draft.reclaimed and not draft.spilled and group.latest is not None:
                    for link in self.roster.members(group):
                        link.revoke(group.latest)
        except BaseException:
            self.discard(prepared, begun=False)
            raise
        return prepared

    def discard(self, prepared: Prepared, *, begun: bool) -> None:
        """Give up a version that was not published; ``begun``: it may have been written into."""
        for draft in prepared.drafts:
            draft.group.discard(draft, begun=begun)
            latest = draft.group.latest
            for link in self.roster.members(draft.group):
                if draft.reclaimed and latest is not None and link.reaches < latest.version:
                    link.announce(latest)
                link.serve(None)

    async def publish(self, prepared: Prepared, *, fallback: bool) -> Round:
        """Copy, and tell the workers. When it raises, nothing has been published; unless it is the
        caller that was cancelled and a version nobody had fetched was being overwritten.

        Args:
            fallback: keep what is replaced until the round is settled, in case all workers refuse.
        """
        return await uninterrupted(lambda gone: self._write_and_publish(prepared, gone, fallback))

    async def _write_and_publish(self, prepared: Prepared, gone: Callable[[], bool], fallback: bool) -> Round:
        no_way_back = any(draft.reclaimed for draft in prepared.drafts)

        def cancelled() -> bool:
            return gone() and not no_way_back

        try:
            for draft in prepared.drafts:
                if not await draft.group.write(draft, cancelled):
                    raise asyncio.CancelledError
        except BaseException:
            self.discard(prepared, begun=True)
            raise
        self.version += 1
        round_ = Round(self._round + 1, self.version, prepared.targets, prepared.joint)
        self.roster.rounds.append(round_)
        for draft in prepared.drafts:
            prepared.before.append(draft.group.latest)
            self._announce(draft, round_, fallback=fallback)
        prepared.seconds["stage"] = time.perf_counter() - prepared.started
        return round_

    def _announce(self, draft: Draft, round_: Round, *, fallback: bool) -> None:
        """Make a written draft the newest of its group and tell the round's workers there."""
        group = draft.group
        self._round = max(self._round, round_.number)
        # Whoever waited for a version that this one replaces gets this one.
        targets = (set(round_.phases) & group.workers) | group.spill_targets
        group.publish(draft, round_.number, round_.version, fallback=fallback)
        if draft.spilled:
            group.spill_targets = targets
            self.roster.note_absent(round_, group)
            self._host.spawn(self._unspill, group)
            return
        group.spill_targets = set()
        self.roster.tell(round_, targets)
        group.wake()
        for link in self.roster.members(group):
            link.serve(None)  # whoever was to be welcomed while the slot was being written

    async def _unspill(self, group: WeightGroup) -> None:
        """Bring the spilled version into a slot as soon as there is one."""
        while group.spill is not None:
            await group.freed()
            async with self._lock:
                draft = await group.draft_unspilled(self.roster.parked(group))
                spill = group.spill
                if draft is None or spill is None:
                    continue
                await group.write(draft, lambda: False)
                round_ = Round(self._round + 1, spill.version, ())
                self._announce(draft, round_, fallback=False)

    async def finish(self, prepared: Prepared, round_: Round, *, wait: bool) -> SendReport:
        """Wait for the answers if told to, and report; raises nothing but a cancellation."""
        begun = time.perf_counter()
        try:
            if wait:
                await round_.wait(prepared.deadline)
        finally:
            self.roster.rounds.remove(round_)
            self._settle(round_, prepared)
        prepared.seconds["ack"] = time.perf_counter() - begun
        report = self._conclude(round_, prepared, waited=wait)
        stats = self.roster.stats
        stats.updates += 1
        stats.nbytes += report.nbytes
        stats.add_phases(report.seconds)
        self._tell_world(report)
        return report

    async def wait_ack(self, targets: set[int], deadline: Deadline) -> SendReport:
        """Wait until ``targets`` run on what was last published to them."""
        self._check_open()
        prepared = Prepared([], targets, None, deadline)
        round_ = self.roster.await_all(targets)
        try:
            await round_.wait(deadline)
        finally:
            self.roster.rounds.remove(round_)
        report = self._conclude(round_, prepared, waited=True)
        self._raise_failure(report, deadline)
        return report

    def _settle(self, round_: Round, prepared: Prepared) -> None:
        withdrawn = round_.withdrawn and round_.version == self.version
        if withdrawn:
            self.version -= 1
        for draft, before in zip(prepared.drafts, prepared.before, strict=True):
            draft.group.settle(round_.number, before, withdrawn=withdrawn)

    # -- reports ------------------------------------------------------------------------------------

    def _conclude(self, round_: Round, prepared: Prepared, *, waited: bool) -> SendReport:
        reports = dict(round_.reports)
        for worker in round_.pending:
            version = self.roster.version_of(worker)
            if not waited:
                reports[worker] = WorkerReport(worker, "published", version)
                continue
            error = SyncTimeoutError(
                round_.phases[worker],
                seconds=prepared.deadline.seconds,
                workers=[worker],
                version=round_.version,
            )
            reports[worker] = WorkerReport(worker, "timeout", version, error=error)
            self.roster.mark_late(worker)
        if not waited:
            earlier = self.roster.take_unreported(prepared.targets)
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

    def _drop(self, reports: Iterable[WorkerReport]) -> tuple[int, ...]:
        gone = sorted(r.worker for r in reports if r.status in ("lost", "timeout"))
        for worker in gone:
            self.roster.drop(worker, "dropped: it was lost or missed a deadline")
        return tuple(gone)

    def _raise_failure(self, report: SendReport, deadline: Deadline) -> None:
        reports = (r for w, r in report.workers.items() if w not in report.dropped)
        error = first_failure(reports, deadline)
        if error is not None:
            error.report = report
            raise error

    def _tell_world(self, report: SendReport) -> None:
        if self._events.heard:
            self._events.emit(
                SyncEvent(
                    "sent",
                    self.model_id,
                    report.version,
                    nbytes=report.nbytes,
                    seconds=report.seconds,
                )
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
        if not self._closed:
            self._closed = True
            await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        self._listener.close()
        await self.roster.close("the sender has closed")
        await self._host.aclose()
        for group in self._groups:
            group.close()
        self._offloader.close()
        self._events.emit(SyncEvent("closed", self.model_id, self.version))

    def _check_open(self) -> None:
        if self._closed:
            raise NotConnectedError("this sender is closed; make a new scheme to send again")
