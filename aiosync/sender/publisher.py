"""Publish versions: take slots, copy weights into them, and notify the workers.

What a cancellation leaves behind:

1. while *drafting*: slots were taken, nothing was written. The slots are given back.
2. while *writing*: the copy stops at its next piece and the slots are given back; unless a version that
   no worker had fetched yet is being overwritten: then it is finished and published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, NotConnectedError
from aiosync.sender.fair_lock import FairLock
from aiosync.sender.pending_acks import Round
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.sharded.gather import ShardGather
from aiosync.sender.sharded.ranks import ShardRequest
from aiosync.sender.worker_group import SlotWrite, WeightGroup
from aiosync.transfer.slots import JointRound, SlotVersion
from aiosync.transports._offload import uninterrupted
from aiosync.transports._tasks import BackgroundTasks
from aiosync.weights.fit import Fit, fit

__all__ = ["Prepared", "Publisher", "Sources", "publish_together"]

Sources = Mapping[int, Mapping[str, Tensor]]
"""Number of the group -> entry name -> tensor."""


class Prepared(msgspec.Struct, eq=False):
    """A version on its way.

    Attributes:
        sharded: whether any of it is spread over ranks.
        before: for each draft, what was the newest until this version was published.
        round: set when it has been published.
    """

    drafts: list[SlotWrite]
    targets: set[int]
    joint: JointRound | None
    deadline: Deadline
    nbytes: int = 0
    sharded: bool = False
    seconds: dict[str, float] = {}
    before: list[SlotVersion | None] = []
    round: Round | None = None
    started: float = msgspec.field(default_factory=time.perf_counter)


class Publisher:
    """Publishes one sender's versions.

    Args:
        groups: the copies of the weights; filled by the sender when it opens.
        registry: the workers.
        host: runs what goes on in the background.
        first_version: the number of the first version.

    Attributes:
        version: the version last published, -1 before the first.
        lock: held by the one ``send`` that may draft and publish.
        stopped: whether nothing more may be published.
    """

    def __init__(
        self,
        groups: Sequence[WeightGroup],
        registry: WorkerRegistry,
        host: BackgroundTasks,
        first_version: int = 0,
    ) -> None:
        self.version = -1
        self._first = first_version
        self._groups = groups
        self._registry = registry
        self._host = host
        self._round = -1
        self.stopped = False
        self._stopping: asyncio.Future[None] | None = None
        self.lock = FairLock()

    async def stop(self) -> None:
        """Publish nothing more, and wait until no copy is running.

        A running copy stops after its current piece. Calls that wait for a slot or for the lock raise
        NotConnectedError.
        """
        self.stopped = True
        if self._stopping is not None and not self._stopping.done():
            self._stopping.set_result(None)
        for group in self._groups:
            group.stop()
        async with self.lock.hold():
            return

    def check_open(self) -> None:
        """Raise NotConnectedError after :meth:`stop`."""
        if self.stopped:
            raise NotConnectedError("the sender was closed before this version was published")

    async def prepare(
        self,
        sources: Sources,
        targets: set[int],
        *,
        strict: bool,
        joint: JointRound | None,
        deadline: Deadline,
        may_spill: bool = False,
    ) -> Prepared:
        """Check the sources and take slots. What it returns is to be published or discarded.

        ``may_spill``: no call waits for the answers, so the version may wait for a free slot.
        """
        if self.stopped:
            self.check_open()
        prepared = Prepared([], targets, joint, deadline)
        fitted: list[tuple[WeightGroup, Fit]] = []
        for n, group in enumerate(self._groups):
            if not targets or group.workers & targets:
                fitted.append((group, fit(group.arena.layout, sources[n], strict=strict)))
        try:
            for group, given in fitted:
                if not given.whole:
                    self._check_base(group, targets)
                self._registry.make_room(group)
                parked = partial(self._registry.parked, group)
                draft = await group.draft(given, targets, parked, deadline, may_spill=may_spill)
                prepared.drafts.append(draft)
                prepared.nbytes += given.nbytes
                prepared.sharded |= given.sharded
                if draft.reclaimed and not draft.spilled and group.latest is not None:
                    for connection in self._registry.members(group):
                        connection.revoke(group.latest)
        except BaseException:
            self.discard(prepared)
            raise
        return prepared

    def _check_base(self, group: WeightGroup, targets: set[int]) -> None:
        """A part builds on the version before, so that has to be there, and to have been for the same
        workers."""
        if group.latest is None:
            raise InvalidArgumentError(
                "strict=False builds on the version before, and that one was lost: send all entries once"
            )
        newest = group.spill or group.latest
        left_out = sorted(w for w in targets & group.workers if group.addressed.get(w) != newest.version)
        if left_out:
            raise InvalidArgumentError(
                f"strict=False builds on version {newest.version}, which was not for workers {left_out}: "
                "send those all entries once, or use per_worker_weights=True: they share no copy then"
            )

    async def fill(self, prepared: Prepared, gathering: ShardGather | None) -> None:
        """Bring what is spread over ranks into the slots; if that fails, the version is given up.

        Raises:
            InvalidArgumentError: ``init_on_sender`` did not hear of the ranks.
            GatherError, SyncTimeoutError: see :class:`ShardGather`.
        """
        drafts = [draft for draft in prepared.drafts if draft.sharded]
        if gathering is None and not drafts:
            return
        await self._gather(prepared, drafts, gathering)

    async def _gather(
        self, prepared: Prepared, drafts: Sequence[SlotWrite], gathering: ShardGather | None
    ) -> None:
        try:
            if gathering is None:
                raise InvalidArgumentError(
                    "these weights are spread over ranks (DTensors): give init_on_sender() the model, on "
                    "all of those ranks"
                )
            wanted = [
                ShardRequest(self._groups.index(draft.group), draft.group.names_of(name), destination, source)
                for draft in drafts
                for name, destination, source in draft.sharded
            ]
            self._stopping = asyncio.get_running_loop().create_future()
            await gathering.gather(wanted, lambda: _begin(drafts), self._stopping)
        except BaseException:
            if gathering is not None and gathering.work is not None:
                for draft in drafts:
                    draft.group.reserve_until(gathering.work, draft.slot)
            self.discard(prepared)
            raise

    def discard(self, prepared: Prepared) -> None:
        """Give up a version that was not published."""
        for draft in prepared.drafts:
            draft.group.discard(draft)
            latest = draft.group.latest
            for connection in self._registry.members(draft.group):
                connection.forget_revoked(overwritten=draft.begun)
                if draft.reclaimed and latest is not None and connection.reaches < latest.version:
                    connection.announce(latest)
                connection.serve()

    def announce(self, prepared: Prepared, *, fallback: bool) -> Round:
        """What has been written is the next version: tell the workers."""
        self.version = self._first if self.version < 0 else self.version + 1
        round_ = Round(self._round + 1, self.version, prepared.targets, prepared.joint)
        self._registry.rounds.append(round_)
        prepared.round = round_
        for draft in prepared.drafts:
            prepared.before.append(draft.group.latest)
            self._announce(draft, round_, fallback=fallback)
        prepared.seconds["stage"] = time.perf_counter() - prepared.started
        return round_

    def _announce(self, draft: SlotWrite, round_: Round, *, fallback: bool) -> None:
        """Make a written draft the newest of its group and tell the round's workers there."""
        group = draft.group
        self._round = max(self._round, round_.number)
        # Workers waiting for the superseded version receive this one.
        targets = (set(round_.phases) & group.workers) | group.spill_targets
        group.publish(draft, round_.number, round_.version, fallback=fallback, joint=round_.joint)
        group.addressed.update(dict.fromkeys(targets, round_.version))
        if draft.reclaimed:
            for connection in self._registry.members(group):
                connection.forget_revoked(overwritten=True)
        if draft.spilled:
            group.spill_targets = targets
            self._registry.note_absent(round_, group)
            if not group.unspilling:
                group.unspilling = True
                self._host.spawn(self._unspill, group)
            return
        group.spill_targets = set()
        self._registry.tell(round_, targets)
        group.wake()
        if self._registry.connections.keys() - targets:
            self.serve(group)  # workers that connected while the slot was being written

    def serve(self, group: WeightGroup) -> None:
        """Give the workers of a group what they have come for."""
        for connection in self._registry.members(group):
            connection.serve()

    def overlaps(self, draft: SlotWrite) -> bool:
        """Whether the draft can be sent while it is being copied: not to those who map the slots."""
        group = draft.group
        return group.overlaps(draft) and not any(
            connection.maps for connection in self._registry.members(group)
        )

    async def _unspill(self, group: WeightGroup) -> None:
        """Bring the spilled version into a slot as soon as there is one."""
        try:
            await self._until_unspilled(group)
        finally:
            group.unspilling = False

    async def _until_unspilled(self, group: WeightGroup) -> None:
        while group.spill is not None:
            async with self.lock.hold():
                draft = await group.draft_unspilled(partial(self._registry.parked, group))
                spill = group.spill
                if draft is not None and spill is not None:
                    await group.write(draft, lambda: False)
                    self._announce(draft, Round(self._round + 1, spill.version, ()), fallback=False)
                    return
            # Nothing is awaited between finding no slot and this, so no slot is freed unnoticed.
            await group.freed()

    def settle(self, prepared: Prepared, *, may_withdraw: bool = True) -> None:
        """No call waits for answers any more, so what was replaced may go; or is the newest again, if every
        worker refused. Nothing happens if it was not published, or has been settled.

        Args:
            may_withdraw: False: others count on this version, although every worker refused it.
        """
        round_, prepared.round = prepared.round, None
        if round_ is None:
            return
        self._registry.rounds.remove(round_)
        withdrawn = (
            may_withdraw
            and round_.withdrawn
            and round_.version == self.version
            # A worker that joined meanwhile may have it, or be about to. What it was written over is gone.
            and all(connection.reaches < round_.version for connection in self._registry.connections.values())
            and not any(d.reclaimed or d.spilled or d.replaces_spill for d in prepared.drafts)
        )
        if withdrawn:
            self.version -= 1
        for draft, before in zip(prepared.drafts, prepared.before):  # noqa: B905 - strict= takes 2 us
            draft.group.settle(round_.number, round_.version, before, withdrawn=withdrawn)
            if withdrawn:
                draft.slot.version = -1  # the number will be another's
            if withdrawn and before is not None:
                draft.group.addressed.update(dict.fromkeys(round_.phases, before.version))


def _begin(drafts: Sequence[SlotWrite]) -> None:
    for draft in drafts:
        draft.begun = True


async def publish_together(items: Sequence[tuple[Publisher, Prepared]], *, fallback: bool) -> list[Round]:
    """Copy all, then tell the workers of all, with nothing awaited in between: so either all have been
    published or none. When it raises it is none; unless the caller was cancelled while a version
    that no worker had fetched was being overwritten.

    Args:
        fallback: keep what is replaced until the round is settled, in case all workers refuse.
    """
    for _, prepared in items:
        for draft in prepared.drafts:
            if not draft.group.writes_inline:
                return await _publish_from_threads(items, fallback)
    return _publish_at_once(items, fallback)


def _publish_at_once(items: Sequence[tuple[Publisher, Prepared]], fallback: bool) -> list[Round]:
    """Nothing is awaited in here, so nothing can be cancelled."""
    try:
        for publisher, prepared in items:
            for draft in prepared.drafts:
                draft.group.write_inline(draft)
            if publisher.stopped:
                publisher.check_open()
    except BaseException:
        for publisher, prepared in items:
            publisher.discard(prepared)
        raise
    rounds = []
    for publisher, prepared in items:
        rounds.append(publisher.announce(prepared, fallback=fallback))
    return rounds


async def _publish_from_threads(items: Sequence[tuple[Publisher, Prepared]], fallback: bool) -> list[Round]:
    try:
        return await uninterrupted(lambda gone: _write_and_announce(items, gone, fallback))
    except asyncio.CancelledError:
        for publisher, prepared in items:
            publisher.settle(prepared)
        raise


async def _announce_and_write(publisher: Publisher, prepared: Prepared, fallback: bool) -> Round:
    """Copy while the first blocks are already on their way. From the announcement on there is no way back,
    and nothing that could fail: what is left is moving bytes."""
    try:
        for draft in prepared.drafts:
            await draft.group.begin(draft)
        publisher.check_open()
    except BaseException:
        publisher.discard(prepared)
        raise
    round_ = publisher.announce(prepared, fallback=fallback)
    for draft in prepared.drafts:
        await draft.group.finish(draft, paced=fallback)
        publisher.serve(draft.group)  # who came meanwhile, and views what is whole
    prepared.seconds["stage"] = time.perf_counter() - prepared.started
    return round_


async def _write_and_announce(
    items: Sequence[tuple[Publisher, Prepared]], gone: Callable[[], bool], fallback: bool
) -> list[Round]:
    drafts = [draft for _, prepared in items for draft in prepared.drafts]
    publishers = [publisher for publisher, _ in items]
    if len(items) == 1 and drafts and all(publishers[0].overlaps(draft) for draft in drafts):
        return [await _announce_and_write(*items[0], fallback)]
    no_way_back = any(draft.reclaimed for draft in drafts)

    def cut_off() -> bool:
        return (gone() and not no_way_back) or any(publisher.stopped for publisher in publishers)

    try:
        for draft in drafts:
            whole = await draft.group.write(draft, cut_off)
            for publisher in publishers:
                publisher.check_open()
            if not whole:
                raise asyncio.CancelledError
    except BaseException:
        for publisher, prepared in items:
            publisher.discard(prepared)
        raise
    return [publisher.announce(prepared, fallback=fallback) for publisher, prepared in items]
