"""A relay's upstream half: takes updates in by handing them to its workers.

States of one update: ROOM (a slot was taken, the fetch may go out) → ARRIVING (blocks come in, workers are
told) → WHOLE (workers answer) → answered. If the connection or the sender gives it up while it is ARRIVING,
what workers have of it is cut, and the version before is the newest again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from aiosync._deadline import Deadline
from aiosync.errors import NotConnectedError, RelayRingError
from aiosync.events import SchemeStats
from aiosync.protocol.frames import Chunk, End, Update
from aiosync.protocol.nack import DownstreamError
from aiosync.receiver.applier import PendingUpdate, WeightApplier
from aiosync.receiver.listeners import UpdateListener
from aiosync.schemes.tcp import TCPWeightSyncScheme
from aiosync.sender.connection import LATE_AFTER
from aiosync.sender.pending_acks import Round, first_failure
from aiosync.sender.publisher import Prepared, Publisher
from aiosync.sender.registry import AwayWorkers, WorkerRegistry
from aiosync.sender.worker_group import SlotWrite, WeightGroup
from aiosync.sender.worker_plan import CPU
from aiosync.transfer.slots import JointRound, SlotVersion
from aiosync.transfer.stream_inbound import StreamInbound
from aiosync.transports._offload import Offloader
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import Transport
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.block_copy import Filling
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["RelayForwarder"]


class _Arriving(Filling):
    """How far an update has come.

    Args:
        checksums: of the blocks that have come.
    """

    def __init__(self, checksums: Mapping[int, int]) -> None:
        self._checksums = checksums
        self._count = 0
        self._over = False
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def ready(self, block: int) -> bool:
        """Whether the block is there."""
        return block < self._count

    @property
    def whole(self) -> bool:
        """Whether nothing more will come."""
        return self._over

    def checksum(self, block: int) -> int:
        """What was said of the block, and found to be so."""
        return self._checksums[block]

    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when more has come."""
        with self._lock:
            if not self._over:
                self._waiting.append(callback)
                return
        callback()

    def advance(self, count: int, *, over: bool = False) -> None:
        """So many blocks are there; ``over``: there will be no more."""
        with self._lock:
            self._count, self._over = count, over
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class _RelayLanding(StreamInbound):
    """Lands updates in slots that the downstream side has taken for them. Called in the connection's thread.

    Args:
        layout: what a slot holds.
        owner: told, on the event loop, when an update begins and when it is given up.
    """

    def __init__(self, layout: Layout, owner: RelayForwarder) -> None:
        super().__init__(layout)
        self._owner = owner
        self._arriving = _Arriving({})
        self.next: Slot | None = None
        self.front: Slot | None = None

    def prepare(self) -> None:
        """Nothing: the slots are the downstream side's."""

    def reserve(self) -> None:
        """Nothing."""

    def _slots(self) -> tuple[Slot | None, Slot | None]:
        return self.next, self.front

    def begin(self, update: Update) -> None:
        super().begin(update)
        self.next = None
        self._arriving = _Arriving(self._sums)
        self._owner.post(self._owner.started, update, self._arriving)

    def placed(self, chunk: Chunk) -> None:
        self._fill_up_to(chunk.block)
        super().placed(chunk)
        if self._damage is None:
            # Not the last one: workers must not have all of it before it is known to be right.
            self._arriving.advance(min(chunk.block + 1, self._blocks - 1))

    def finish(self, end: End) -> None:
        super().finish(end)
        if self._damage is None:
            self._arriving.advance(self._blocks, over=True)
        else:
            self._owner.post(self._owner.aborted)

    def abandon(self) -> None:
        super().abandon()
        self._owner.post(self._owner.aborted)

    def make_room(self, names: Collection[str]) -> Collection[str]:
        """Nothing: the downstream side has taken a slot."""
        return ()

    def committed(self, names: Collection[str] | None) -> None:
        """The newest is what the next may build on."""
        self.front = self._slot


class RelayForwarder(WeightApplier):
    """The upstream side's: hands updates on instead of applying them.

    Args:
        scheme: the downstream side's options.
        model_id: the model's name.
    """

    def __init__(self, scheme: TCPWeightSyncScheme, model_id: str | None) -> None:
        super().__init__(
            scheme._spec,
            scheme._strategy,
            None,
            model_id,
            UpdateListener(),
            -1,
            may_view=True,
            make_inbound=self._landing_for,
            bind=scheme._bind,
        )
        self._scheme = scheme
        self._home = asyncio.get_running_loop()
        self._host = BackgroundTasks("aiosync-relay")
        self._copier = Offloader("aiosync-relay")
        self._group: WeightGroup | None = None
        self._landing: _RelayLanding | None = None
        self._draft: SlotWrite | None = None
        self._prepared: Prepared | None = None
        assert scheme._listener is not None
        self._listener = scheme._listener
        self.registry = WorkerRegistry(
            (),
            model_id,
            self._listener,
            scheme._token,
            elastic=True,
            deliver=scheme._deliver,
            events=scheme._events,
            stats=SchemeStats(),
        )
        self._id = self.registry.via[-1]
        # What commit() waits for, and since when.
        self._round: Round | None = None
        self._since = 0.0
        self.registry.away = AwayWorkers(scheme._reconnect_for)
        self._publisher: Publisher | None = None

    def _landing_for(self, layout: Layout, transport: Transport, source: torch.device) -> StreamInbound:
        arena = Arena(layout, Segment.private, self._scheme._spec.max_slots)
        self._group = WeightGroup((), CPU, arena, self._copier, streams="checked")
        self._publisher = Publisher([self._group], self.registry, self._host)
        self._landing = _RelayLanding(layout, self)
        return self._landing

    async def open_downstream(self) -> None:
        """Let workers in; the layout is known."""
        assert self._group is not None
        await self._host.start()
        await self.registry.open(self._host, [self._group])

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Call back on the event loop."""
        try:
            self._home.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # it is closed

    # -- room -----------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """Whether a slot has been taken for the next update."""
        return self._draft is not None

    async def make_room(self) -> None:
        """Take a slot for the next update."""
        group, landing = self._group, self._landing
        assert group is not None and landing is not None
        self.registry.make_room(group)
        targets = set(self.registry.workers)
        deadline = Deadline.after(self._spec.seconds(None))
        draft = await group.draft_to_fill(targets, lambda: self.registry.parked(group), deadline)
        if draft.reclaimed and group.latest is not None:
            for connection in self.registry.members(group):
                connection.revoke(group.latest)
        if draft.slot is landing.front:
            landing.front = None  # no worker had fetched it, and now it is written over
        self._draft, landing.next = draft, draft.slot

    @property
    def have(self) -> int:
        """The version that the next may build on."""
        return self.version if self._landing is not None and self._landing.front is not None else -1

    # -- arriving: posted by the connection's thread ----------------------------------------------------

    def started(self, update: Update, arriving: _Arriving) -> None:
        """The first bytes of an update are about to come: tell the workers."""
        draft, publisher, group = self._draft, self._publisher, self._group
        assert draft is not None and publisher is not None and group is not None
        self._settle()  # the one before, which came whole just when the link broke
        self._draft = None
        draft.begun, draft.copying = True, arriving
        if update.names is not None and update.base == self.version:
            draft.names = tuple(update.names)
        joint = update.joint
        mark = None if joint is None else JointRound(joint, lambda w: self.registry.abort(joint, w))
        deadline = Deadline.after(self._spec.seconds(None))
        self._prepared = Prepared([draft], set(self.registry.workers), mark, deadline)
        publisher.version = update.version - 1
        publisher.announce(self._prepared, fallback=True)

    def forget(self) -> None:
        """See :meth:`WeightApplier.forget`: this version was here before, and has been sent again."""
        super().forget()
        self._settle()

    def _settle(self) -> None:
        """All workers have answered, or are not awaited: the slot of the version before can be written."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and self._publisher is not None:
            # The trainer has been told that this version is here.
            self._publisher.settle(prepared, may_withdraw=False)

    def aborted(self) -> None:
        """What was arriving will not come whole."""
        prepared, group = self._prepared, self._group
        if prepared is None or group is None or group.latest is None:
            return
        self._prepared = None
        broken, (before,) = group.latest, prepared.before
        for connection in self.registry.members(group):
            connection.withdraw(broken)
            connection.forget_revoked(overwritten=True)
        group.changes.withdraw(broken.version)
        broken.slot.holders.clear()
        broken.slot.version = -1
        group.latest = before if before is not None and before.slot.version == before.version else None
        self._tell_again(group.latest)
        if self._publisher is not None:
            self._publisher.settle(prepared)

    def _tell_again(self, latest: SlotVersion | None) -> None:
        assert self._group is not None
        if latest is not None:
            latest.slot.holders.add("latest")
            for connection in self.registry.members(self._group):
                if connection.reaches < latest.version:
                    connection.announce(latest)
                connection.serve()

    # -- whole ----------------------------------------------------------------------------------------

    def take_at_once(self, pending: PendingUpdate) -> bool:
        """Never: workers have to answer first."""
        return False

    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        """Wait for the workers.

        Raises:
            DownstreamError: some of them refused, were lost or did not answer; the others have it.
        """
        prepared, publisher = self._prepared, self._publisher
        if prepared is None or prepared.round is None or publisher is None or self._landing is None:
            raise NotConnectedError("this relay was closed, or lost the update, before its workers had it")
        self.version, self.weights = pending.update.version, pending.staged.views if pending.staged else {}
        self._landing.committed(None)
        round_ = self._round = prepared.round
        self._since = self._home.time()
        while await round_.wait(prepared.deadline, self.registry.timer):
            if self.registry.away is None or not await self.registry.away.one_returns(prepared.deadline):
                break
        failure = first_failure(round_.reports.values(), prepared.deadline)
        silent = sorted(round_.pending)
        self._round = None
        self._settle()
        words = [str(failure)] if failure is not None else []
        if failure is None and silent:
            words.append(f"workers {silent} did not answer")
        away = self.registry.away.now() if self.registry.away is not None else []
        if away:
            words.append(f"workers {away} have lost this relay and may still act on an older version")
        if words:
            raise DownstreamError(f"below this relay: {'; '.join(words)}")
        pending.committed = True

    def overtake(self) -> None:
        """The sender has a newer version: workers that do not answer hold the others up no longer than they
        would at the sender itself."""
        super().overtake()
        self._hurry()

    def disconnected(self) -> None:
        """See :meth:`WeightApplier.disconnected`.

        The relay connects again without waiting for workers that do not answer.
        """
        self._hurry()

    def _hurry(self) -> None:
        if self._round is not None:
            self._home.call_at(self._since + LATE_AFTER, self._round.give_up)

    def follow(self, via: Sequence[str]) -> None:
        """See :meth:`WeightApplier.follow`.

        Raises:
            RelayRingError: the sender follows this relay.
        """
        if self._id in via:
            raise RelayRingError(
                "this relay was to follow a sender that follows this relay, over "
                f"{len(via) - list(via).index(self._id) - 1} others: give one of them the trainer's address"
            )
        self.registry.via = (*via, self._id)

    def follow_another(self) -> None:
        """Another trainer: its versions begin anew, and workers must know that."""
        super().follow_another()
        self.aborted()
        self.registry.begin_anew("the relay follows another sender")
        # A worker that comes back waits for the new sender's first version, and must not get an older one.
        if self._group is not None and self._landing is not None:
            self._group.forget_latest()
            self._landing.front = None

    async def close(self) -> None:
        """Say goodbye downstream."""
        self._listener.stop()
        if self._publisher is not None:
            await self._publisher.stop()
        await self.registry.close("the relay has closed")
        await self._host.aclose()
        self._listener.close()
        await super().close()
        if self._group is not None:
            self._group.close()
        self._copier.close()
