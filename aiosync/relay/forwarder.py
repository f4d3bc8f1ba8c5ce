"""A relay's upstream half: applies an update by forwarding it to the relay's workers.

States of one update: ROOM (a slot is reserved, the Fetch may be sent) → ARRIVING (blocks arrive, workers are
notified) → WHOLE (workers answer) → answered. If the connection or the sender cancels an update that is
ARRIVING, the relay cuts its transfers to the workers, and the version before is the newest again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from aiosync._deadline import LATE_AFTER, Deadline
from aiosync.errors import ArenaAllocationError, NotConnectedError, RelayRingError, SyncTimeoutError
from aiosync.events import logger
from aiosync.protocol.frames import Chunk, End, Update
from aiosync.protocol.nack import DownstreamError
from aiosync.receiver.updates import Applier, Overtaken, PendingUpdate
from aiosync.schemes.tcp import RelayParts
from aiosync.sender.failures import first_failure
from aiosync.sender.lost_workers import AwayWorkers
from aiosync.sender.pending_acks import PendingAcks
from aiosync.sender.publisher import Publication, Publisher
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.slot_write import SlotWrite
from aiosync.sender.worker_group import WorkerGroup
from aiosync.sender.worker_plan import CPU
from aiosync.transfer.slots import JointParts, SlotPool
from aiosync.transfer.stream import StreamInbound
from aiosync.transports._offload import Offloader
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import FramedTransport
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.weights.arena import Slot
from aiosync.weights.binding import Staged
from aiosync.weights.block_copy import Filling
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

_RETRY_AFTER = 1.0
"""Seconds after which an allocation that has failed is tried again, if no slot is released before."""


class _Arriving(Filling):
    """The progress of an arriving update."""

    def __init__(self, checksums: Mapping[int, int]) -> None:
        # Of the blocks that have arrived; verified.
        self._checksums = checksums
        self._count = 0
        self._over = False
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def ready(self, block: int) -> bool:
        return block < self._count

    @property
    def whole(self) -> bool:
        return self._over

    def checksum(self, block: int) -> int:
        return self._checksums[block]

    def on_more(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._over:
                self._waiting.append(callback)
                return
        callback()

    def advance(self, count: int, *, over: bool = False) -> None:
        """Record that the first ``count`` blocks have arrived; ``over``: these are all."""
        with self._lock:
            self._count, self._over = count, over
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class _RelayLanding(StreamInbound):
    """Receives updates into slots of the downstream side. Called in the connection's thread."""

    def __init__(self, layout: Layout, owner: RelayForwarder) -> None:
        super().__init__(layout)
        # Notified, on the event loop, when an update begins and when it is cancelled.
        self._owner = owner
        self._arriving = _Arriving({})
        # The slots of the next update, and of the one before it.
        self.next: Slot | None = None
        self.front: Slot | None = None
        self._lock = threading.Lock()

    def attach(self, transport: FramedTransport) -> None:
        assert isinstance(transport, TCPConnection)
        self._post = transport.post
        super().attach(transport)

    def prepare(self) -> None:
        return  # the downstream side allocates the slots

    reserve = prepare

    def _slots(self) -> tuple[Slot | None, Slot | None]:
        with self._lock:
            slot, self.next = self.next, None
        return slot, self.front

    def take_back(self) -> bool:
        """Take the slot of the next update back. Return False if an update has it already."""
        with self._lock:
            slot, self.next = self.next, None
        return slot is not None

    def begin(self, update: Update) -> None:
        slot = self.next
        try:
            super().begin(update)
        except BaseException:
            with self._lock:
                self.next = slot  # no update has it
            raise
        self._arriving = _Arriving(self._sums)
        self._post(self._owner.started, update, self._arriving)

    def placed(self, chunk: Chunk) -> None:
        self._fill_up_to(chunk.block)
        super().placed(chunk)
        if self._damage is None:
            # Withhold the last block until the digest is verified.
            self._arriving.advance(min(chunk.block + 1, self._blocks - 1))

    def finish(self, end: End) -> None:
        super().finish(end)
        if self._damage is None:
            self._arriving.advance(self._blocks, over=True)
        else:
            self._post(self._owner.aborted)

    def abandon(self) -> None:
        super().abandon()
        self._post(self._owner.aborted)

    def make_room(self, names: Collection[str]) -> Collection[str]:
        return ()  # the downstream side has reserved a slot

    def committed(self, names: Collection[str] | None) -> None:
        self.front = self._slot  # the base of the next update


class RelayForwarder(Applier):
    """The upstream side's applier: forwards updates to the relay's workers (:attr:`registry`)."""

    def __init__(self, parts: RelayParts, model_id: str | None) -> None:
        super().__init__(worker=-1)
        self.may_fetch = False  # until a slot is reserved for the next update
        self._options = parts.options
        self._home = asyncio.get_running_loop()
        self._host = BackgroundTasks("aiosync-relay")
        self._copier = Offloader("aiosync-relay")
        self._group: WorkerGroup | None = None
        self._publisher: Publisher | None = None
        # Receives updates; and the slot that is leased for the next one.
        self._landing: _RelayLanding | None = None
        self._write: SlotWrite | None = None
        # The scope of the wait for that slot. It expires only if the connection is lost.
        self._room_wait: asyncio.Timeout | None = None
        # The version that is arriving, or that workers have not answered yet.
        self._publication: Publication | None = None
        self._listener = parts.listener
        self._transfer = parts.transfer
        deliver = parts.transfer.outbound
        self.registry = WorkerRegistry(
            set(), model_id, parts.listener, parts.token, True, deliver, parts.events
        )
        self._id = self.registry.via[-1]
        self._away = self.registry.away = AwayWorkers(parts.reconnect_for)
        # The acknowledgements that commit() waits for, since when, and whether there is a newer version.
        self._acks: PendingAcks | None = None
        self._since, self._overtaken = 0.0, False

    # -- the connection -------------------------------------------------------------------------------

    def follow(self, via: Sequence[str]) -> None:
        if self._id in via:
            raise RelayRingError(
                "this relay was to follow a sender that follows this relay, over "
                f"{len(via) - list(via).index(self._id) - 1} others: give one of them the trainer's address"
            )
        self.registry.via = (*via, self._id)

    def follow_another(self) -> None:
        super().follow_another()
        self.aborted()
        # The new sender's version numbers start again, so the workers are notified.
        self.registry.begin_anew("the relay follows another sender")
        # A worker that reconnects waits for the new sender's first version and must not get an older one.
        if self._group is not None and self._landing is not None:
            self._group.forget_newest()
            self._landing.front = None

    def bind(self, layout: Layout, device: str) -> None:
        pool = SlotPool(layout, Segment.private, self._options.max_slots)
        self._group = WorkerGroup(set(), CPU, pool, self._copier, "checked")
        self._publisher = Publisher([self._group], self.registry, self._host)
        self._landing = _RelayLanding(layout, self)

    async def prepare(self, transport: FramedTransport) -> None:
        assert self._landing is not None
        self.inbound = self._landing
        self._landing.attach(transport)

    async def open_downstream(self) -> None:
        """Accept workers. Called when the layout is known."""
        assert self._group is not None
        await self._host.start()
        await self.registry.open(self._host, [self._group])

    # -- room -----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        # Without a free slot, the newest version is overwritten. Workers that join, or are behind, need it
        # until there is a newer one.
        return self._group is not None and self._group.pool.free_slot() is not None

    async def make_room(self) -> None:
        """Lease a slot for the next update. Wait for one as long as workers read all of them.

        Raises:
            ArenaAllocationError: there is no memory for the first slot.
        """
        group, landing = self._group, self._landing
        assert group is not None and landing is not None
        try:
            async with asyncio.timeout(None) as self._room_wait:
                write = await self._lease_slot(group)
        except TimeoutError:
            return  # the connection was lost
        finally:
            self._room_wait = None
        if write.slot is landing.front:
            landing.front = None  # no worker has fetched this version; the next one overwrites it
        self._write, landing.next, self.may_fetch = write, write.slot, True

    async def _lease_slot(self, group: WorkerGroup) -> SlotWrite:
        # No call of a user waits here, so a deadline that has passed is only a reason to warn.
        seconds = self._options.seconds(None)
        quiet = Deadline.after(0)
        while True:
            deadline = Deadline.after(seconds)
            try:
                return await group.begin_fill(set(self.registry.workers), deadline)
            except SyncTimeoutError as exc:
                logger.warning("this relay fetches no update until it has a slot: %s", exc)
            except ArenaAllocationError as exc:
                if not group.pool.slots:
                    raise
                if not quiet.remaining():
                    logger.warning("this relay fetches no update until it has a slot: %s", exc)
                    quiet = deadline
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_AFTER):
                        await group.pool.freed()

    @property
    def have(self) -> int:
        return self.version if self._landing is not None and self._landing.front is not None else -1

    # -- arriving: posted by the connection's thread ----------------------------------------------------

    def started(self, update: Update, arriving: _Arriving) -> None:
        """Notify the workers of an update whose first bytes are about to arrive."""
        write, publisher = self._write, self._publisher
        assert write is not None and publisher is not None
        self._settle()  # the update before, if the link broke just after it had arrived
        self._write, self.may_fetch, self._overtaken = None, False, False
        write.begun, write.copying = True, arriving
        # What has changed since an older version includes all that has changed since this relay's.
        if update.names is not None and 0 <= update.base <= self.version:
            write.names = tuple(update.names)
        workers, joint = frozenset(self.registry.workers), update.joint
        parts = None if joint is None else JointParts(joint, workers, lambda w: self.registry.abort(joint, w))
        deadline = Deadline.after(self._options.seconds(None))
        self._publication = Publication(publisher, set(workers), parts, deadline, [write])
        publisher.version = update.version - 1
        publisher.announce(self._publication, fallback=True)

    def forget(self) -> None:
        super().forget()
        self._settle()  # an update that the relay has already, and that was sent again

    def _settle(self) -> None:
        """End the publication, so that the slot of the version before can be written."""
        publication, self._publication = self._publication, None
        if publication is not None:
            # The trainer has the acknowledgement of this version, so it cannot be withdrawn.
            publication.publisher.settle(publication, may_withdraw=False)

    def abort(self, joint_id: str, worker: int) -> None:
        publication = self._publication
        parts = publication.joint if publication is not None else None
        if publication is not None and parts is not None and parts.mark.id == joint_id:
            for target in publication.targets:
                parts.cancel_for(target)

    def aborted(self) -> None:
        """Cancel the update that was arriving."""
        publication, self._publication = self._publication, None
        if publication is None:
            return
        (write,) = publication.writes
        if write.group.newest is not None:
            write.group.abandon(write)
        publication.publisher.settle(publication)

    # -- whole ----------------------------------------------------------------------------------------

    async def stage(self, pending: PendingUpdate) -> None:
        assert self._landing is not None
        _, views = self._landing.find(pending.update)  # its blocks are in the slot already
        pending.staged = Staged(views, frozenset(), frozenset())

    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        """Wait until the workers have answered.

        Raises:
            DownstreamError: workers refused, were lost or did not answer; the others have the version.
            Overtaken: workers did not answer, and there is a newer version; the others have this one.
        """
        publication = self._publication
        if publication is None or publication.acks is None or self._landing is None:
            raise NotConnectedError("this relay was closed, or lost the update, before its workers had it")
        self.version = self.in_service = pending.update.version
        self._landing.committed(None)
        # Not the publication's deadline: the bytes may have taken long to arrive.
        acks, deadline = publication.acks, Deadline.after(self._options.seconds(None))
        self._acks, self._since = acks, self._home.time()
        if self._overtaken:
            self._give_up_late()
        while await acks.wait(deadline, self.registry.timer):
            if not await self._away.one_returns(deadline):
                break
        failure = first_failure(acks.reports.values(), deadline)
        silent = sorted(acks.pending)
        self._acks = None
        self._settle()
        words = [str(failure)] if failure is not None else []
        away = self._away.now()
        if failure is None and silent:
            if self._overtaken and not away:
                raise Overtaken
            words.append(f"workers {silent} did not answer")
        if away:
            words.append(f"workers {away} have lost this relay and may still act on an older version")
        if words:
            raise DownstreamError(f"below this relay: {'; '.join(words)}")
        pending.committed = True

    def overtake(self) -> None:
        if not self._overtaken:
            self._overtaken = True
            self._give_up_late()

    def _give_up_late(self) -> None:
        """Wait for silent workers only for as long as a sender would."""
        if self._acks is not None:
            self._home.call_at(self._since + LATE_AFTER, self._acks.give_up)

    def disconnected(self) -> None:
        self._give_up_late()
        wait, self._room_wait = self._room_wait, None
        if wait is not None:
            wait.reschedule(self._home.time())

    async def detach(self, deadline: Deadline) -> bool:
        write, landing = self._write, self._landing
        if write is not None and landing is not None and landing.take_back():
            # No update has begun to arrive in the slot: the version that it holds is the newest again.
            self._write, self.may_fetch = None, False
            write.group.discard(write)
            if write.reclaimed and landing.front is None:
                landing.front = write.slot
        return True

    async def close(self) -> None:
        self._listener.stop()
        if self._publisher is not None:
            await self._publisher.stop()
        await self.registry.close("the relay has closed")
        await self._host.aclose()
        self._listener.close()
        if self._landing is not None:
            self._landing.close()
        if self._group is not None:
            self._group.close()
        self._transfer.close()
        self._copier.close()
