"""One copy of the weights on the sender, and the workers that read it.

Who may still read a slot is written into its holders:

``worker``              has it in service, or is fetching it
``("due", worker)``     was notified of it and has not fetched it yet
``LATEST``              it is the newest: a worker that joins late gets it, a partial update builds on it
``("fallback", round)`` it is what the newest replaced, as long as all workers may yet refuse the newest
``WRITER``              it is being written
``("sending", ...)``    is read by what cannot be told to stop
``("orphan", ...)``     a process that lost its channel but still runs may be computing with it

Where every slot is held and the sender is not to wait, a version is *spilled*: written into memory of
this process alone, over the version spilled before it if that is still there. It moves into a slot as
soon as one is free. So a sender that does not wait never does, and nothing queues up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import ArenaAllocationError, NotConnectedError, SyncTimeoutError
from aiosync.protocol.stream import BLOCK
from aiosync.sender.change_log import ChangeLog
from aiosync.transfer.slots import JointRound, SlotVersion
from aiosync.transports._offload import Offloader, call_when_done
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.block_copy import BlockCopy, Filling
from aiosync.weights.copying import INLINE_LIMIT, copy_few
from aiosync.weights.fit import Fit
from aiosync.weights.segment import Segment
from aiosync.weights.sharded import is_sharded

__all__ = ["SlotWrite", "Streams", "WeightGroup"]

_WORTH_OVERLAPPING = 4 << 20
"""Bytes from which copying and sending are done at the same time."""

Streams: TypeAlias = Literal["", "plain", "checked"]
"""Whether versions are sent block after block, while the last are still being copied; and with checksums."""

Parked: TypeAlias = Callable[[], set[Hashable]]
"""Gives the holders of slots that are not expected to move on."""

LATEST = "latest"
WRITER = "writer"


class SlotWrite(msgspec.Struct, eq=False):
    """A slot about to be written, and what goes in.

    Attributes:
        pairs: (destination, source) tensors.
        sharded: (name, destination, source) where the source is spread over the ranks of the trainer.
        reclaimed: the slot holds a version that was published and not fetched: from the first byte
            written there is no way back, so this write goes through even if its caller is cancelled.
        spilled: the slot is not one that workers can read.
        begun: it may have been written into.
        copying: the copy, if it goes on beside the sending.
        replaces_spill: a version that waited for a slot was given up for it.
    """

    group: WeightGroup
    slot: Slot
    pairs: list[tuple[Tensor, Tensor]]
    names: tuple[str, ...] | None
    reclaimed: bool
    spilled: bool = False
    begun: bool = False
    copying: Filling | None = None
    sharded: Sequence[tuple[str, Tensor, Tensor]] = ()
    replaces_spill: bool = False


class WeightGroup:
    """Workers that share one copy of the weights.

    Args:
        workers: their indices.
        device: where the copy lies.
        arena: its slots.
        offloader: the threads that copy.
        streams: whether versions are sent block after block, and with checksums.

    Attributes:
        latest: the newest version in a slot.
        spill: a newer version that waits for a slot.
        spill_targets: the workers that it is for.
        unspilling: whether a task is copying it into a slot.
        addressed: worker -> the newest version that was for it.
        unstoppable: holders that read a slot until work elsewhere is done.
        writes_inline: whether a version is so small that no thread is needed to write it.
        changes: which entries each version is about.
    """

    def __init__(
        self,
        workers: Iterable[int],
        device: torch.device,
        arena: Arena,
        offloader: Offloader,
        *,
        streams: Streams = "",
    ) -> None:
        self.workers = set(workers)
        self.device = device
        self.arena = arena
        self.latest: SlotVersion | None = None
        self.spill: SlotVersion | None = None
        self.spill_targets: set[int] = set()
        self._spill_slot: Slot | None = None
        self.streams = streams
        self._offloader = offloader
        self.unspilling = False
        self.addressed: dict[int, int] = {}
        self.unstoppable: set[Hashable] = set()
        self.writes_inline = device.type == "cpu" and arena.layout.nbytes <= INLINE_LIMIT
        self.changes = ChangeLog()
        self._freed = asyncio.Event()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether the sender is being closed."""
        return self._stopped

    async def reserve(self, count: int) -> None:
        """Take memory for this many slots."""
        while len(self.arena.slots) < count:
            await self._grow()

    # -- writing --------------------------------------------------------------------------------

    async def draft(
        self,
        given: Fit,
        targets: set[int],
        parked: Parked,
        deadline: Deadline,
        *,
        may_spill: bool,
    ) -> SlotWrite:
        """Take a slot and pair its tensors with the ``given`` ones.

        Entries that are not given keep the newest version's values.

        Raises:
            SyncTimeoutError: every slot was in use until the deadline; names the workers that read them.
            NotConnectedError: the sender is being closed.
            ArenaAllocationError: there is no memory for another slot.
        """
        slot, reclaimed = await self._slot_for(targets, parked, deadline, may_spill=may_spill)
        spilled = slot is self._spill_slot
        views, dense, names = slot.views, given.pairs, None
        sharded: list[tuple[str, Tensor, Tensor]] = []
        if given.sharded:
            dense = [(name, tensor) for name, tensor in given.pairs if not is_sharded(tensor)]
            sharded = [(name, views[name], tensor) for name, tensor in given.pairs if is_sharded(tensor)]
        pairs = []
        for name, tensor in dense:
            pairs.append((views[name], tensor))
        if not given.whole:
            names = tuple(name for name, _ in given.pairs)
            pairs += self._rest(slot, {name for name, _ in given.pairs})
        return SlotWrite(self, slot, pairs, names, reclaimed, spilled, sharded=sharded)

    async def draft_to_fill(self, targets: set[int], parked: Parked, deadline: Deadline) -> SlotWrite:
        """A slot for a version that the caller writes."""
        slot, reclaimed = await self._slot_for(targets, parked, deadline, may_spill=False)
        return SlotWrite(self, slot, [], None, reclaimed)

    async def _slot_for(
        self,
        targets: set[int],
        parked: Parked,
        deadline: Deadline,
        *,
        may_spill: bool,
    ) -> tuple[Slot, bool]:
        """A slot that is the writer's from now on, and whether it is reclaimed."""
        while True:
            if self._stopped:
                raise NotConnectedError("the sender was closed before this version could be written")
            slot, reclaimed = self.arena.free_slot(), False
            if slot is None:
                slot, reclaimed = await self._another_slot(targets, parked)
            if slot is None and may_spill:
                slot, reclaimed = await self._spillable_slot(), self.spill is not None
            if slot is not None:
                slot.holders.add(WRITER)
                slot.version = -1
                return slot, reclaimed
            await self._until_freed(deadline)

    async def draft_unspilled(self, parked: Parked) -> SlotWrite | None:
        """A slot for the spilled version, if it is still waiting and a slot is free."""
        try:
            slot = self.arena.free_slot() or (await self._another_slot(set(), parked))[0]
        except ArenaAllocationError:
            slot = None  # one that is freed will do as well
        spill = self.spill
        if slot is None or spill is None:
            return None
        slot.holders.add(WRITER)
        slot.version = -1
        pairs = [(slot.views[e.name], spill.slot.views[e.name]) for e in self.arena.layout.entries]
        return SlotWrite(self, slot, pairs, None, reclaimed=False)

    async def write(self, draft: SlotWrite, cancelled: Callable[[], bool]) -> bool:
        """Copy; returns whether all was copied (not, if cancelled in between)."""
        if self.writes_inline:
            self.write_inline(draft)
            return True
        draft.begun = True
        return await self._offloader.copy(draft.pairs, cancelled)

    def write_inline(self, draft: SlotWrite) -> None:
        """Copy here and now."""
        draft.begun = True
        copy_few(draft.pairs)

    def overlaps(self, draft: SlotWrite) -> bool:
        """Whether the draft can be sent while it is being copied."""
        worth = draft.slot.segment.buffer.is_cpu and self.arena.layout.nbytes > _WORTH_OVERLAPPING
        return self.streams != "" and not draft.spilled and worth

    async def begin(self, draft: SlotWrite) -> None:
        """Begin a copy that goes on beside the sending."""
        draft.begun = True
        buffer, nbytes = draft.slot.segment.buffer, self.arena.layout.nbytes
        checked = self.streams == "checked"
        draft.copying = await self._offloader.run(
            lambda _: BlockCopy(buffer, nbytes, draft.pairs, BLOCK, checked=checked)
        )

    async def finish(self, draft: SlotWrite, *, paced: bool) -> None:
        """Finish the copy.

        Args:
            draft: a copy that :meth:`begin` began.
            paced: copy no faster than the version is sent, since the caller waits for that anyway.
        """
        copying = draft.copying
        assert isinstance(copying, BlockCopy)
        await self._offloader.run(lambda _: copying.complete(paced=paced))

    def publish(
        self, draft: SlotWrite, round_: int, version: int, *, fallback: bool, joint: JointRound | None = None
    ) -> SlotVersion:
        """Make what was drafted the newest."""
        draft.slot.version = version
        draft.slot.holders.discard(WRITER)
        unspilled = self.spill is not None and self.spill.version == version
        if not unspilled:
            self.changes.add(version, draft.names)
        if draft.spilled:
            self.spill = SlotVersion(draft.slot, round_, version)
            return self.spill
        draft.replaces_spill = self.spill is not None and not unspilled
        self.spill = None
        before = self.latest
        published = SlotVersion(draft.slot, round_, version, joint, draft.copying)
        if before is not None:
            before.slot.holders.discard(LATEST)
            if fallback and before.slot is not draft.slot:
                before.slot.holders.add(("fallback", round_))
        draft.slot.holders.add(LATEST)
        self.latest = published
        return published

    def discard(self, draft: SlotWrite) -> None:
        """Give a drafted slot back unpublished."""
        draft.slot.holders.discard(WRITER)
        if draft.begun and draft.spilled:
            self.spill = None
        elif draft.begun and draft.reclaimed:
            # Its copy failed half way and what it held before is gone: no worker may read it.
            draft.slot.holders &= self.unstoppable
            self.latest = None
        elif draft.reclaimed and self.latest is not None and self.latest.slot is draft.slot:
            draft.slot.version = self.latest.version  # it still has that
        self.wake()

    def forget_latest(self) -> None:
        """There is no newest version any more, and versions are counted anew; no worker reads it."""
        latest, self.latest = self.latest, None
        self.changes = ChangeLog()
        if latest is not None:
            latest.slot.holders &= {WRITER}  # it may be about to be written over
            latest.slot.version = -1
        self.wake()

    def slot_of(self, version: int) -> Slot | None:
        """The slot that still holds this version, whole."""
        return next((slot for slot in self.arena.slots if slot.version == version >= 0), None)

    def offerable(self, published: SlotVersion | None) -> bool:
        """Whether a worker may be given this version now."""
        return published is not None and WRITER not in published.slot.holders

    def names_of(self, name: str) -> tuple[str, ...]:
        """An entry's name, and those that are tied to it."""
        aliases = self.arena.layout.aliases
        return (name, *(alias for alias, entry in aliases.items() if entry == name))

    def reserve_until(self, work: Future[None], slot: Slot) -> None:
        """Reserve this slot until some work is done that cannot be cancelled."""
        holder = ("gathering", object())
        slot.holders.add(holder)
        self.unstoppable.add(holder)

        def over(_: Future[None]) -> None:
            self.unstoppable.discard(holder)
            self.release(holder)

        call_when_done(work, over)

    def settle(self, round_: int, version: int, before: SlotVersion | None, *, withdrawn: bool) -> None:
        """A round is over. ``withdrawn``: no worker took it, so what it replaced is the newest again."""
        latest = self.latest
        if withdrawn:
            self.changes.withdraw(version)
        else:
            self.changes.keep(version)
        if withdrawn and before is not None and latest is not None and latest.round == round_:
            latest.slot.holders.discard(LATEST)
            before.slot.holders.add(LATEST)
            self.latest = before
        self.release(("fallback", round_))

    # -- readers --------------------------------------------------------------------------------

    def release(self, holder: Hashable, *, keep: Slot | None = None) -> None:
        """``holder`` reads no slot any more but ``keep``."""
        self.arena.release(holder, keep=keep)
        self.wake()

    def wake(self) -> None:
        """A slot may have become free."""
        arena = self.arena
        if len(arena.slots) > arena.max_slots:
            arena.trim()
        self._freed.set()

    def stop(self) -> None:
        """Hand out no more slots. Calls that wait for one raise NotConnectedError."""
        self._stopped = True
        self._freed.set()

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()
        self._freed.set()

    def _rest(self, slot: Slot, given: set[str]) -> list[tuple[Tensor, Tensor]]:
        newest = self.spill or self.latest
        if newest is None or newest.slot is slot:
            return []
        return [
            (slot.views[entry.name], newest.slot.views[entry.name])
            for entry in self.arena.layout.entries
            if entry.name not in given
        ]

    async def _another_slot(self, targets: set[int], parked: Parked) -> tuple[Slot | None, bool]:
        """A slot to write where none is free, and whether it is reclaimed; None if every slot is in use."""
        if self.arena.may_grow(parked()):
            return await self._grow(), False
        slot = self._superseded(targets) if targets else None
        return slot, slot is not None

    async def _spillable_slot(self) -> Slot:
        if self._spill_slot is None:
            layout = self.arena.layout
            self._spill_slot = await self._offloader.run(
                lambda _: Slot(-1, Segment.private(layout.nbytes, self.device), layout)
            )
        return self._spill_slot

    async def freed(self) -> None:
        """Wait until a slot may have become free."""
        self._freed.clear()
        await self._freed.wait()

    async def _grow(self) -> Slot:
        if self.writes_inline:
            return self.arena.grow()
        return await self._offloader.run(lambda _: self.arena.grow())

    def _superseded(self, targets: set[int]) -> Slot | None:
        """The newest slot, if all that it waits for is workers that the next version goes to."""
        slot = self.latest.slot if self.latest else None
        allowed = {LATEST, *(("due", worker) for worker in targets)}
        return slot if slot is not None and slot.holders <= allowed else None

    async def _until_freed(self, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.freed()
        except TimeoutError:
            holders = {h for slot in self.arena.slots for h in slot.holders if isinstance(h, int)}
            raise SyncTimeoutError(
                "stage",
                seconds=deadline.seconds,
                workers=holders,
                hint="every slot is in use by these workers; raise max_slots, or send less often",
            ) from None
