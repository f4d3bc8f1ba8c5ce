"""The sender's slots: the pool that they come from, the leases on them, and the versions in them.

A slot may be written when it has no lease. Each reader and each writer has a lease of its own and releases it
itself, so no code has to know who else uses a slot.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from aiosync.protocol.frames import Joint, Update
from aiosync.transports._offload import call_when_done
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.block_copy import Filling
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment


class LeaseKind(enum.Enum):
    """Why a slot must not be written."""

    WRITING = "writing"
    """The sender writes it."""
    NEWEST = "newest"
    """It holds the newest version: a worker that joins gets it, a partial update builds on it."""
    FALLBACK = "fallback"
    """It holds the version that the newest replaced. All workers may still refuse the newest."""
    NOTIFIED = "notified"
    """A worker was notified of its version and has not fetched it."""
    READING = "reading"
    """A worker fetches its version, or its model views the slot."""
    UNSTOPPABLE = "unstoppable"
    """An operation that cannot be cancelled reads or writes it."""
    DETACHED = "detached"
    """A process that has lost its connection may still read it."""


class SlotReader(Protocol):
    """A worker's connection, as far as leases need it."""

    worker: int

    @property
    def stalled(self) -> bool:
        """Whether the worker is not expected to release its leases soon."""


class Lease(msgspec.Struct, eq=False):
    """One reason for which a slot must not be written; ``reader``: the worker's, for NOTIFIED and READING."""

    pool: SlotPool
    slot: Slot
    kind: LeaseKind
    reader: SlotReader | None = None

    @property
    def stalled(self) -> bool:
        """Whether the lease is not expected to end soon."""
        if self.reader is not None:
            return self.reader.stalled
        return self.kind is LeaseKind.UNSTOPPABLE or self.kind is LeaseKind.DETACHED

    def detach(self) -> None:
        """The reader's connection was lost, and its process may still read the slot."""
        self.kind, self.reader = LeaseKind.DETACHED, None

    def release(self) -> None:
        """End the lease; idempotent. The slot may be reused or freed at once if this was its last lease."""
        leases = self.slot.leases
        if self in leases:
            leases.remove(self)
            self.pool.changed()


def release_all(leases: Iterable[Lease]) -> None:
    """End these leases."""
    for lease in leases:
        lease.release()


class SlotPool(Arena):
    """An arena whose slots are leased. All methods but :meth:`grow` are called on the sender's event loop.

    Args:
        layout: what a slot holds.
        allocate: takes a number of bytes and returns a segment of at least that many.
        max_slots: how many slots there may be at a time. Slots that only stalled leases keep do not count.
    """

    def __init__(self, layout: Layout, allocate: Callable[[int], Segment], max_slots: int = 3) -> None:
        super().__init__(layout, allocate, max_slots)
        # Slots being added that have no lease yet: meanwhile no surplus slot is released.
        self.growing = 0
        # Changes whenever a slot is added or removed.
        self.revision = 0
        self._freed = asyncio.Event()

    def grow(self) -> Slot:
        slot = super().grow()
        self.revision += 1
        return slot

    def remove(self, slot: Slot) -> None:
        super().remove(slot)
        self.revision += 1

    def lease(self, slot: Slot, kind: LeaseKind, reader: SlotReader | None = None) -> Lease:
        """Keep a slot from being written until the lease is released."""
        lease = Lease(self, slot, kind, reader)
        slot.leases.add(lease)
        return lease

    def keep_until(
        self, work: Future[Any], slot: Slot, then: Callable[[Future[Any]], object] | None = None
    ) -> None:
        """Keep a slot until an operation that cannot be cancelled has ended, and then call ``then``."""
        lease = self.lease(slot, LeaseKind.UNSTOPPABLE)

        def ended(work: Future[Any]) -> None:
            lease.release()
            if then is not None:
                then(work)

        call_when_done(work, ended)

    def free_slot(self) -> Slot | None:
        """A slot without a lease, or None."""
        for slot in self.slots:
            if not slot.leases:
                return slot
        return None

    def may_grow(self) -> bool:
        """Whether a slot may be added.

        A slot that only stalled leases keep (of a worker that hangs, or that later updates are not addressed
        to) does not count: it would starve the other workers.
        """
        busy = sum(1 for slot in self.slots if not slot.leases or not all(x.stalled for x in slot.leases))
        return busy < self.max_slots

    def changed(self) -> None:
        """A lease has ended or is stalled: release surplus slots, and wake the calls that wait for one."""
        if len(self.slots) > self.max_slots and not self.growing:
            self._trim()
        self._freed.set()

    def _trim(self) -> None:
        surplus = len(self.slots) - self.max_slots
        for slot in [slot for slot in self.slots if not slot.leases][:surplus]:
            self.remove(slot)

    async def freed(self) -> None:
        """Wait until a slot may have become free."""
        self._freed.clear()
        await self._freed.wait()

    def readers(self) -> set[int]:
        """The workers that read a slot."""
        return {
            lease.reader.worker
            for slot in self.slots
            for lease in slot.leases
            if lease.kind is LeaseKind.READING and lease.reader is not None
        }


class JointParts:
    """State that the parts of one joint update share on the sender.

    Every version of the joint update refers to this object as long as it can be fetched, also after the call
    has returned: a worker that fetches one part late still commits it with the others.

    Args:
        mark: goes to the workers with each part.
        workers: those that get all parts. Others that get one of the versions get it alone.
        abort: takes a worker, and aborts the parts that the worker has been offered.
    """

    def __init__(self, mark: Joint, workers: Collection[int], abort: Callable[[int], None]) -> None:
        self.mark = mark
        self.workers = workers
        self._abort = abort
        self._cancelled: set[int] = set()

    def cancel_for(self, worker: int) -> None:
        """This worker does not get all parts: abort those that it has, and those that it will be offered."""
        self._cancelled.add(worker)
        self._abort(worker)

    def is_cancelled_for(self, worker: int) -> bool:
        """Whether this worker is to abort its parts."""
        return worker in self._cancelled


class SlotVersion(msgspec.Struct, eq=False):
    """One version in its slot."""

    slot: Slot
    # The number of its publication, never used twice by one sender.
    round: int
    # Its version number, which is used again when every worker refused the version.
    version: int
    # The joint update that it is a part of.
    joint: JointParts | None = None
    # Set if it may not have been copied to its end yet.
    copying: Filling | None = None
    # For how long its call waits for the workers' answers.
    seconds: float = math.inf
    # The frame that a worker was last offered it with.
    offered: Update | None = None

    def joint_for(self, worker: int) -> JointParts | None:
        """Return the joint update that this is a part of, if this worker gets all parts."""
        return self.joint if self.joint is not None and worker in self.joint.workers else None


class ChangeLog:
    """Records the changed entries of each version, for workers that skip versions.

    A worker keeps its values of entries that are not sent. So an update for a worker that has skipped partial
    updates has the entries of all of them, and no others.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._whole = -1
        # For each version that may still be withdrawn: its number, and what _whole and _last had before.
        self._undo: list[tuple[int, int, dict[str, int]]] = []

    def add(self, version: int, names: tuple[str, ...] | None) -> None:
        """Record that ``version`` changes these entries; None: all."""
        if names is None:
            self._undo.append((version, self._whole, {}))
            self._whole = version
        else:
            self._undo.append((version, self._whole, {name: self._last.get(name, -1) for name in names}))
            self._last.update(dict.fromkeys(names, version))

    def withdraw(self, version: int) -> None:
        """Remove the newest version, which no worker has. Its number will be used again."""
        while self._undo and self._undo[-1][0] >= version:
            _, self._whole, before = self._undo.pop()
            self._last.update(before)

    def keep(self, version: int) -> None:
        """Forget how to withdraw this version and the ones before it."""
        while self._undo and self._undo[0][0] <= version:
            del self._undo[0]

    def since(self, have: int) -> list[str] | None:
        """Return the entries that have changed since the version ``have``; None: all, or unknown."""
        if have < 0 or self._whole > have:
            return None
        return sorted(name for name, version in self._last.items() if version > have) or None
