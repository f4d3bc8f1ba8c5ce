"""The workers that share one copy of the weights, and the versions of that copy.

A version is written into a free slot and becomes the newest. The slot stays leased until no worker reads it
(see :class:`~aiosync.transfer.slots.LeaseKind`). Where every slot is leased, a sender that must not wait
writes into *overflow* memory of its own process, over the version that is there. The overflow version moves
into a slot as soon as one is free. So such a sender never waits, and no queue grows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from aiosync._deadline import Deadline
from aiosync.errors import ArenaAllocationError, NotConnectedError, SyncTimeoutError
from aiosync.sender.extraction import Fit
from aiosync.sender.partial_write import check_base, rebase
from aiosync.sender.slot_write import SlotWrite
from aiosync.transfer.base import Streams
from aiosync.transfer.slots import ChangeLog, JointParts, Lease, LeaseKind, SlotPool, SlotVersion
from aiosync.transfer.yield_request import YieldRequest
from aiosync.transports._offload import Offloader
from aiosync.weights.arena import Slot
from aiosync.weights.copying import QUICK_COPY
from aiosync.weights.segment import Segment
from aiosync.weights.sharded import is_sharded

if TYPE_CHECKING:
    from aiosync.sender.connection import WorkerConnection


@dataclass(eq=False, repr=False)
class WorkerGroup:
    """Workers that share one copy of the weights."""

    workers: set[int]
    device: torch.device  # where the copy lies
    pool: SlotPool
    offloader: Offloader  # the threads that copy
    streams: Streams  # whether versions are sent block after block, and with checksums
    sources: Collection[torch.device] = ()  # CUDA devices from which the weights come
    # Worker -> its connection; the registry adds and removes them.
    connections: dict[int, WorkerConnection] = field(default_factory=dict, init=False)
    # The newest version in a slot.
    newest: SlotVersion | None = field(default=None, init=False)
    _newest_lease: Lease | None = field(default=None, init=False)
    # A newer version that waits for a slot, and the workers that it is for.
    overflow: SlotVersion | None = field(default=None, init=False)
    _overflow_targets: set[int] = field(default_factory=set, init=False)
    _overflow_slot: Slot | None = field(default=None, init=False)
    # Whether a task is copying the overflow version into a slot.
    draining: bool = field(default=False, init=False)
    # Worker -> the newest version that was for it.
    addressed: dict[int, int] = field(default_factory=dict, init=False)
    # Worker -> the newest version that was for it and was overwritten before the worker got it.
    lost: dict[int, int] = field(default_factory=dict, init=False)
    # The entries that each version is about.
    changes: ChangeLog = field(default_factory=ChangeLog, init=False)
    # Whether the sender is being closed.
    stopped: bool = field(default=False, init=False)
    # What is asked of workers that map the slots, while a send is in progress; None: nothing.
    yield_request: YieldRequest | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Whether a version is so small that no thread is needed to write it from this process's memory.
        self.writes_inline = self.device.type == "cpu" and self.pool.layout.nbytes <= QUICK_COPY

    async def reserve(self, count: int) -> None:
        """Allocate this many slots."""
        while len(self.pool.slots) < count:
            await self._grow()

    # -- before a version is published ----------------------------------------------------------

    async def begin_write(
        self, given: Fit, targets: set[int], deadline: Deadline, *, may_overflow: bool
    ) -> SlotWrite:
        """Lease a slot and pair its tensors with the ``given`` ones.

        Entries that are not given keep the newest version's values.

        Raises:
            InvalidArgumentError: some entries are missing, and there is no version to take their values from.
            SyncTimeoutError: every slot was in use until the deadline; names the workers that read them.
            NotConnectedError: the sender is being closed.
            ArenaAllocationError: there is no memory for another slot.
        """
        if not given.whole:
            check_base(self, targets)
        slot = self.pool.free_slot()
        if slot is not None and not self.stopped:
            write = self._write_of(slot)
        else:
            write = await self._lease_slot(targets, deadline, may_overflow=may_overflow)
        # A copy from a device would block the event loop until all that was queued there is done.
        write.is_quick = self.writes_inline and given.on_cpu
        if write.is_quick and given.whole and not given.sharded:
            write.tensors = given.tensors
            return write
        views, dense = write.slot.views, given.pairs
        if given.sharded:
            dense = [(name, tensor) for name, tensor in given.pairs if not is_sharded(tensor)]
            write.sharded = [
                (name, views[name], tensor) for name, tensor in given.pairs if is_sharded(tensor)
            ]
        pairs = write.pairs
        for name, tensor in dense:
            pairs.append((views[name], tensor))
        if not given.whole:
            write.names = tuple(name for name, _ in given.pairs)
            try:
                rebase(write, targets)
            except BaseException:
                self.discard(write)
                raise
        return write

    async def begin_fill(self, targets: set[int], deadline: Deadline) -> SlotWrite:
        """Lease a slot for a version that the caller writes. Raises as :meth:`begin_write`."""
        return await self._lease_slot(targets, deadline, may_overflow=False)

    async def begin_drain(self) -> SlotWrite | None:
        """Lease a slot for the overflow version; None if there is no such version or no free slot."""
        try:
            slot = self.pool.free_slot() or (await self._grow() if self.pool.may_grow() else None)
        except ArenaAllocationError:
            slot = None  # a slot that a worker releases will do as well
        overflow = self.overflow
        if slot is None or overflow is None:
            return None
        write = self._write_of(slot)
        entries = self.pool.layout.entries
        write.pairs = [(slot.views[e.name], overflow.slot.views[e.name]) for e in entries]
        return write

    async def _lease_slot(self, targets: set[int], deadline: Deadline, *, may_overflow: bool) -> SlotWrite:
        if self.pool.free_slot() is None:
            for connection in self._members():
                connection.cancel_if_stuck()
        while True:
            if self.stopped:
                raise NotConnectedError("the sender was closed before this version could be written")
            slot, failure = self.pool.free_slot(), None
            if slot is None and self.pool.may_grow():
                try:
                    slot = await self._grow()
                except ArenaAllocationError as exc:
                    failure, slot = exc, self.pool.free_slot()
            if slot is not None:
                return self._write_of(slot)
            newest = self.newest
            if newest is not None and self._may_reclaim(newest.slot, targets):
                for connection in self._members():
                    connection.revoke(newest)
                return self._write_of(newest.slot, reclaimed=True)
            if may_overflow:
                overflow_slot = await self._overflow_memory()
                return self._write_of(overflow_slot, reclaimed=self.overflow is not None, overflow=True)
            if failure is not None:
                raise failure
            await self._until_freed(deadline)

    def _write_of(self, slot: Slot, *, reclaimed: bool = False, overflow: bool = False) -> SlotWrite:
        slot.version = -1
        lease = self.pool.lease(slot, LeaseKind.WRITING)
        return SlotWrite(self, slot, lease, [], self.writes_inline, None, reclaimed, overflow)

    def _may_reclaim(self, slot: Slot, targets: set[int]) -> bool:
        """Whether no worker has fetched the newest version, and all that were notified get the next one."""
        return bool(targets) and all(
            lease.kind is LeaseKind.NEWEST
            or (
                lease.kind is LeaseKind.NOTIFIED
                and lease.reader is not None
                and lease.reader.worker in targets
            )
            for lease in slot.leases
        )

    async def _overflow_memory(self) -> Slot:
        if self._overflow_slot is None:
            layout = self.pool.layout
            self._overflow_slot = await self.offloader.run(
                lambda _: Slot(-1, Segment.private(layout.nbytes, self.device), layout)
            )
        return self._overflow_slot

    async def _grow(self) -> Slot:
        if self.writes_inline and not self.sources:  # otherwise the slot's memory is pinned, which may wait
            return self.pool.grow()
        self.pool.growing += 1
        try:
            return await self.offloader.run(lambda _: self.pool.grow())
        finally:
            self.pool.growing -= 1

    async def _until_freed(self, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.pool.freed()
        except TimeoutError:
            raise SyncTimeoutError(
                "stage",
                seconds=deadline.seconds,
                workers=self.pool.readers(),
                hint="every slot is in use by these workers; raise max_slots, or send less often",
            ) from None

    # -- versions -------------------------------------------------------------------------------

    def publish(
        self,
        write: SlotWrite,
        round_: int,
        version: int,
        targets: set[int],
        *,
        fallback: bool,
        joint: JointParts | None = None,
        seconds: float = math.inf,
    ) -> None:
        """Make a written version the newest, and notify the connected workers among ``targets``.

        With ``fallback`` the version that it replaces is kept until :meth:`settle`. ``seconds``: for how long
        the call waits for the answers. The other arguments are those of :class:`Publication`.
        """
        slot, overflow = write.slot, self.overflow
        slot.version = version
        targets = (targets & self.workers) | self._overflow_targets
        write.addressed = {worker: self.addressed.get(worker, -1) for worker in targets}
        self.addressed.update(dict.fromkeys(targets, version))
        if overflow is None or overflow.version != version:
            self.changes.add(version, write.names)
            write.replaced_overflow = overflow is not None and not write.overflow
        if write.overflow:
            self.overflow, self._overflow_targets = SlotVersion(slot, round_, version), targets
            write.lease.release()
            return
        newest = SlotVersion(slot, round_, version, joint, write.copying, seconds)
        self._replace_newest(write, newest, fallback=fallback)
        for worker in targets:
            member = self.connections.get(worker)
            if member is not None:
                member.notify(newest)
        self.reconcile()
        for member in self.connections.values():
            member.transport.hand_over()

    def _replace_newest(self, write: SlotWrite, newest: SlotVersion, *, fallback: bool) -> None:
        write.superseded, lease = self.newest, self._newest_lease
        # The writer's lease becomes the newest version's, and the former newest version's the fallback's.
        write.lease.kind = LeaseKind.NEWEST
        self.newest, self._newest_lease = newest, write.lease
        self.overflow = None
        if self._overflow_targets:
            self._overflow_targets = set()
        if lease is not None and fallback and lease.slot is not write.slot:
            lease.kind, write.fallback = LeaseKind.FALLBACK, lease
        elif lease is not None:
            lease.release()

    def discard(self, write: SlotWrite) -> None:
        """Release a slot whose version was not published."""
        write.lease.release()
        newest = self.newest
        if write.begun and write.overflow:
            lost, self.overflow = self.overflow, None
            for connection in self._members():
                if lost is not None and connection.worker in self._overflow_targets:
                    connection.miss(lost.version)
        elif write.begun and write.reclaimed and newest is not None and newest.slot is write.slot:
            # The copy failed half way, and the version that the slot held is gone: no worker may read it.
            self._make_newest(None)
            for connection in self._members():
                if connection.misses_version:  # it was to be welcomed with it
                    connection.miss(newest.version)
            newest = None
        elif write.reclaimed and newest is not None and newest.slot is write.slot:
            newest.slot.version = newest.version  # the slot still holds that
        if write.reclaimed:
            for connection in self._members():
                if write.begun:
                    connection.lose_revoked()
                elif newest is not None:
                    connection.restore(newest)
        self.reconcile()

    def abandon(self, write: SlotWrite) -> None:
        """A version that was published while it was being written will never be whole: cancel it.

        The version that it replaced is the newest again, if its slot still holds it.
        """
        broken, before = self.newest, write.superseded
        assert broken is not None
        for connection in self._members():
            connection.cancel(broken)
            connection.lose_revoked()
        self.changes.withdraw(broken.version)
        broken.slot.version = -1
        newest = before if before is not None and before.slot.version == before.version else None
        self._make_newest(newest)
        if newest is not None:
            for connection in self._members():
                if connection.target_version < newest.version:
                    connection.notify(newest)
        self.reconcile()

    def settle(self, write: SlotWrite, round_: int, version: int, *, withdrawn: bool) -> None:
        """All workers have answered, or no call waits for their answers.

        ``withdrawn``: every worker refused the version, so the version that it replaced is the newest again.
        """
        if withdrawn:
            self.changes.withdraw(version)
            if write.superseded is not None and (self.newest is None or self.newest.round == round_):
                self._make_newest(write.superseded)
                self.reconcile()
            write.slot.version = -1  # the number will be another's
            for worker, before in write.addressed.items():
                if self.addressed.get(worker) == version:
                    self.addressed[worker] = before
            self.lost = {worker: lost for worker, lost in self.lost.items() if lost < version}
        else:
            self.changes.keep(version)
        if write.fallback is not None:
            write.fallback.release()

    def forget_newest(self) -> None:
        """Versions are counted anew, and no worker reads one of the old: there is no newest version."""
        newest, self.changes = self.newest, ChangeLog()
        if newest is not None:
            newest.slot.version = -1
        self._make_newest(None)

    def _members(self) -> tuple[WorkerConnection, ...]:
        """The connections, for a loop whose body may lose one of them: every write to a connection may."""
        return tuple(self.connections.values())

    def _make_newest(self, newest: SlotVersion | None) -> None:
        before, self.newest = self._newest_lease, newest
        self._newest_lease = None if newest is None else self.pool.lease(newest.slot, LeaseKind.NEWEST)
        if before is not None:
            before.release()

    def reconcile(self) -> None:
        """Bring slots and workers into step. Call this after any event that changed a slot or a version.

        Calls that wait for a slot are woken, surplus slots are released, and each worker that has sent a
        Fetch is sent the version that it was notified of.
        """
        self.pool.changed()
        for connection in self._members():
            connection.offer_next()

    def slot_of(self, version: int) -> Slot | None:
        """The slot that still holds this version, whole."""
        if version < 0:
            return None
        return next((slot for slot in self.pool.slots if slot.version == version), None)

    def offerable(self, published: SlotVersion | None) -> bool:
        """Whether the slot still holds this version: not if it is being overwritten."""
        return published is not None and published.slot.version == published.version

    def welcomed(self, worker: int) -> SlotVersion:
        """A worker joins. Return its first version. One that waits for a slot is for it too."""
        assert self.newest is not None
        self.addressed[worker] = (self.overflow or self.newest).version
        if self.overflow is not None:
            self._overflow_targets.add(worker)
        return self.newest

    def forget(self, worker: int) -> None:
        """This worker has gone, and will not come back under its index."""
        self.workers.discard(worker)
        self.addressed.pop(worker, None)
        self.lost.pop(worker, None)

    def overflow_for(self, worker: int) -> SlotVersion | None:
        """The overflow version, if it is for this worker."""
        return self.overflow if worker in self._overflow_targets else None

    # -- the end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Lease no more slots. Calls that wait for one raise NotConnectedError."""
        self.stopped = True
        self.pool.changed()

    def close(self) -> None:
        """Release the memory."""
        if self.yield_request is not None:
            self.yield_request.close()
        self.pool.close()
        self.pool.changed()
