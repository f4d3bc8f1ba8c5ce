"""Publish versions: lease slots, copy weights into them, and notify the workers.

States of a publication, and what a cancellation leaves behind in each:

1. PREPARING: slots are leased, nothing is written. Cancelled, the slots are released.
2. WRITING: cancelled, the copy stops at its next piece and the slots are released; unless a version that no
   worker has fetched yet is being overwritten: then the copy is finished and the version published.
3. PUBLISHED: workers were notified. Cancelled, the version stays published.
4. SETTLED: no call waits for answers any more.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from aiosync._deadline import Deadline, FairLock
from aiosync.errors import InvalidArgumentError, NotConnectedError
from aiosync.sender.extraction import Fit, Sources, fit
from aiosync.sender.partial_write import rebase
from aiosync.sender.pending_acks import PendingAcks
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.sharded.gather import ShardGather
from aiosync.sender.sharded.ranks import ShardRequest
from aiosync.sender.slot_write import SlotWrite
from aiosync.sender.worker_group import WorkerGroup
from aiosync.transfer.slots import JointParts
from aiosync.transfer.yield_request import YieldRequest
from aiosync.transports._tasks import BackgroundTasks
from aiosync.weights.devices import are_idle
from aiosync.weights.layout import Layout


class Publication(msgspec.Struct, eq=False):
    """One version on its way from a call of ``send`` to the workers."""

    publisher: Publisher
    # The workers whose answers the call waits for.
    targets: set[int]
    # The joint update that it is a part of.
    joint: JointParts | None
    # When the call ends.
    deadline: Deadline
    # Its slots, one in each group.
    writes: list[SlotWrite] = []
    # Bytes of the weights.
    nbytes: int = 0
    # Whether an entry is spread over ranks.
    sharded: bool = False
    # Whether it is for all workers, also those that have joined since the call began.
    to_all: bool = False
    # Set when it is published: its number, its version number, and the workers' answers.
    round: int = -1
    version: int = -1
    acks: PendingAcks | None = None
    # No call waits for answers.
    settled: bool = False
    # What workers were asked for until it is settled or discarded.
    yield_requests: list[YieldRequest] = []
    # Phase -> its duration, in seconds.
    seconds: dict[str, float] = {}
    started: float = msgspec.field(default_factory=time.perf_counter)

    def ask_to_yield(self, group: WorkerGroup) -> None:
        """Ask the group's workers to yield their processors from now on."""
        if group.yield_request is not None:
            group.yield_request.begin()
            self.yield_requests.append(group.yield_request)

    def rebase(self) -> list[SlotWrite]:
        """Return the writes that have to be copied (again). Raises as :func:`.rebase`."""
        return [write for write in self.writes if rebase(write, self.targets)]

    def end_requests(self) -> None:
        """No call waits any more; idempotent."""
        while self.yield_requests:
            self.yield_requests.pop().end()


@dataclass(eq=False, repr=False)
class Publisher:
    """Publishes one sender's versions."""

    groups: Sequence[WorkerGroup]  # the copies of the weights; filled by the sender when it opens
    _registry: WorkerRegistry
    _host: BackgroundTasks
    _first: int = 0  # the number of the first version
    # The version last published, -1 before the first.
    version: int = field(default=-1, init=False)
    # The number of the last publication; it is never used twice.
    _round: int = field(default=-1, init=False)
    # Whether nothing more may be published.
    stopped: bool = field(default=False, init=False)
    # The wait for devices, during prepare().
    _settling: asyncio.Future[None] | None = field(default=None, init=False)
    # Held by the one ``send`` that may prepare and publish.
    lock: FairLock = field(default_factory=FairLock, init=False)

    async def stop(self) -> None:
        """Publish nothing more, and wait until no copy is running.

        A running copy stops after its current piece. Calls that wait for a slot or for the lock raise
        NotConnectedError.
        """
        self.stopped = True
        if self._settling is not None:
            self._settling.cancel()
        for group in self.groups:
            group.stop()
        async with self.lock.hold():
            return

    def check_open(self) -> None:
        """Raise NotConnectedError after :meth:`stop`."""
        if self.stopped:
            raise NotConnectedError("the sender was closed before this version was published")

    # -- preparing --------------------------------------------------------------------------------

    async def prepare(
        self,
        sources: Sources,
        targets: set[int],
        *,
        strict: bool,
        joint: JointParts | None,
        deadline: Deadline,
        may_overflow: bool = False,
    ) -> Publication:
        """Check the sources and lease slots. The caller publishes or discards the publication.

        Args:
            sources: the weights.
            targets: the workers that they are for.
            strict: whether every entry must be given.
            joint: the joint update that this is a part of.
            deadline: when to stop waiting for a slot.
            may_overflow: no call waits for the answers, so the version may wait for a free slot.

        Raises:
            LayoutMismatchError, InvalidArgumentError: the sources do not fit.
            SyncTimeoutError, NotConnectedError, ArenaAllocationError: see :meth:`WorkerGroup.begin_write`.
        """
        if self.stopped:
            self.check_open()
        publication = Publication(self, targets, joint, deadline)
        fitted: list[tuple[WorkerGroup, Fit]] = []
        for n, group in enumerate(self.groups):
            if not targets or group.workers & targets:
                fitted.append((group, fit(group.pool.layout, sources[n], strict=strict)))
        if not fitted:  # all targets have gone since the call began: the version is for workers to come
            groups = {n: self.groups[n] for n in sources}
            fitted = [
                (group, fit(group.pool.layout, sources[n], strict=strict)) for n, group in groups.items()
            ]
        try:
            for group, given in fitted:
                publication.ask_to_yield(group)
                write = await group.begin_write(given, targets, deadline, may_overflow=may_overflow)
                publication.writes.append(write)
                publication.nbytes += given.nbytes
                publication.sharded |= given.sharded
                if not write.is_quick and not are_idle(write.devices):
                    await self._settle(write, deadline)
        except BaseException:
            self.discard(publication)
            raise
        return publication

    async def _settle(self, write: SlotWrite, deadline: Deadline) -> None:
        """Wait until devices have computed the weights; stop() ends the wait.

        Raises:
            SyncTimeoutError: the deadline has passed before.
            NotConnectedError: the sender is being closed.
        """
        self._settling = asyncio.ensure_future(write.settle(deadline))
        try:
            await asyncio.wait([self._settling])
        finally:
            self._settling.cancel()  # does nothing to one that is done
        self.check_open()
        self._settling.result()

    async def fill(self, publication: Publication, gathering: ShardGather | None) -> None:
        """Bring entries that are spread over ranks into the slots; if that fails, discard the publication.

        Raises:
            InvalidArgumentError: ``init_on_sender`` did not get the sharded model.
            GatherError, SyncTimeoutError: see :class:`ShardGather`.
        """
        writes = [write for write in publication.writes if write.sharded]
        if gathering is None and not writes:
            return

        def begin() -> None:
            for write in writes:
                write.begun = True

        try:
            if gathering is None:
                raise InvalidArgumentError(
                    "these weights are spread over ranks (DTensors): give init_on_sender() the model, on "
                    "all of those ranks"
                )
            requests = [
                ShardRequest(self.groups.index(w.group), _names_of(w.group.pool.layout, name), *tensors)
                for w in writes
                for name, *tensors in w.sharded
            ]
            await gathering.gather(requests, begin)
        except BaseException:
            if gathering is not None and gathering.work is not None:
                for write in writes:
                    write.group.pool.keep_until(gathering.work, write.slot)
                    # The thread may be about to write, and cannot be stopped.
                    write.begun = not gathering.work.done() or write.begun
            self.discard(publication)
            raise

    def discard(self, publication: Publication) -> None:
        """Release the slots of a version that was not published."""
        publication.end_requests()
        for write in publication.writes:
            write.group.discard(write)

    # -- publishing -------------------------------------------------------------------------------

    def announce(self, publication: Publication, *, fallback: bool) -> PendingAcks:
        """Make a written version the next one, and notify the workers. Nothing is awaited.

        With ``fallback`` the version that it replaces is kept until :meth:`settle`, since all workers may
        refuse the new one.
        """
        self.version = self._first if self.version < 0 else self.version + 1
        self._round += 1
        publication.round, publication.version = self._round, self.version
        acks = publication.acks = PendingAcks(self.version, publication.targets)
        self._registry.awaited.track(acks)
        # Without ``fallback`` no call waits for the answers; with a timeout of zero neither.
        seconds = publication.deadline.seconds if fallback and publication.deadline.seconds else math.inf
        for write in publication.writes:
            group, joint, workers = write.group, publication.joint, publication.targets
            if publication.to_all:
                workers = workers | group.connections.keys()
            group.publish(
                write,
                self._round,
                self.version,
                workers,
                fallback=fallback,
                joint=joint,
                seconds=seconds,
            )
            if write.overflow and not group.draining:
                group.draining = True
                self._host.spawn(self._drain, group)
        # Workers that come and go as they like may have gone since the call began.
        for worker in publication.targets - self._registry.connections.keys():
            if publication.joint is not None:
                publication.joint.cancel_for(worker)
            acks.settle(self._registry.records.absence(worker))
        publication.seconds["stage"] = time.perf_counter() - publication.started
        return acks

    async def announce_and_write(self, publication: Publication, *, fallback: bool) -> PendingAcks:
        """Copy while the first blocks are already being sent.

        After the announcement the version cannot be taken back, and nothing can fail: only bytes are moved.
        """
        try:
            due = publication.writes
            while due:
                for write in due:
                    await write.begin_copy()
                due = publication.rebase()
            self.check_open()
        except BaseException:
            self.discard(publication)
            raise
        acks = self.announce(publication, fallback=fallback)
        for write in publication.writes:
            await write.finish_copy(paced=fallback)
            write.group.reconcile()  # workers that view the slots have waited for the whole version
        publication.seconds["stage"] = time.perf_counter() - publication.started
        return acks

    async def _drain(self, group: WorkerGroup) -> None:
        """Copy the overflow version into a slot as soon as one is free."""
        try:
            await self._until_drained(group)
        finally:
            group.draining = False

    async def _until_drained(self, group: WorkerGroup) -> None:
        while group.overflow is not None:
            async with self.lock.hold():
                write, overflow = await group.begin_drain(), group.overflow
                if write is not None and overflow is not None:
                    await write.copy(lambda: False)
                    self._round += 1
                    group.publish(write, self._round, overflow.version, set(), fallback=False)
                    return
            # Nothing is awaited between finding no slot and this, so no slot is freed unnoticed.
            await group.pool.freed()

    def settle(self, publication: Publication, *, may_withdraw: bool = True) -> None:
        """No call waits for answers any more: release the version that was replaced.

        If every worker refused, that version is the newest again instead. Does nothing if the publication was
        not published, or is settled. Without ``may_withdraw`` the version stays in any case.
        """
        acks, version = publication.acks, publication.version
        if acks is None or publication.settled:
            return
        withdrawn = may_withdraw and self.may_withdraw(publication)
        publication.settled = True
        publication.end_requests()
        self._registry.awaited.untrack(acks)
        if withdrawn:
            self.version -= 1
        for write in publication.writes:
            write.group.settle(write, publication.round, version, withdrawn=withdrawn)

    def may_withdraw(self, publication: Publication) -> bool:
        """Return whether every worker refused the version, so that the one before can be the newest again."""
        acks, version = publication.acks, publication.version
        return (
            acks is not None
            and acks.all_refused
            and version == self.version
            # A worker that joined meanwhile may have it, or be about to, or have gone with it. A version that
            # it overwrote is lost.
            and self._registry.last_gone < version
            and all(c.target_version < version for c in self._registry.connections.values())
            and not any(w.reclaimed or w.overflow or w.replaced_overflow for w in publication.writes)
        )


def _names_of(layout: Layout, name: str) -> tuple[str, ...]:
    """An entry's name, and those that are tied to it."""
    return (name, *(alias for alias, entry in layout.aliases.items() if entry == name))
