"""One worker, seen from the sender: its connection, its session, and the slots it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from aiosync.errors import ProtocolError, WorkerLostError
from aiosync.protocol.events import Fetched, SenderEvent
from aiosync.protocol.frames import Bye, Frame, Joint, Nack, Update, Welcome
from aiosync.protocol.session import SenderSession, SenderState
from aiosync.schemes.delivery import Delivery
from aiosync.schemes.group import Published, WeightGroup
from aiosync.schemes.rounds import JointRound
from aiosync.transports.base import Transport
from aiosync.transports.liveness import ProcessWatch

__all__ = ["Introduction", "Lingering", "WorkerLink"]

EAGER_LIMIT = 1 << 20
"""Bytes up to which a worker is handed an update without having been told of it first: saves a round trip,
and costs a slot if the worker hangs just then."""

LATE_AFTER = 2.0
"""Seconds without an answer, and without a byte moved, after which a worker is not waited for with a slot."""

SAMPLE = 0.5
"""Seconds between two looks at whether anything moves."""

PATIENCE = 1.0
"""Seconds without a byte moved after which a worker's memory may be taken from it."""


class Introduction(NamedTuple):
    """What the welcome tells a worker of its sender.

    Attributes:
        instance: tells the sender from the next one at the same address.
        ticket: proves that the worker's index is its own.
        via: the senders that an update passes on its way.
    """

    instance: str
    ticket: bytes
    via: Sequence[str]


class WorkerLink:
    """A connected worker.

    Args:
        worker: its index.
        pid: its process, for noticing its end; 0 if unknown.
        delivery: how versions get there.
        introduction: what its welcome says of the sender.
        on_event, on_lost: called when something happens.

    Attributes:
        due: the version that it was told of and has not fetched.
        late: it has not answered for a while, or missed a deadline.
        died: its process has ended.
    """

    def __init__(
        self,
        worker: int,
        pid: int,
        transport: Transport,
        session: SenderSession,
        group: WeightGroup,
        delivery: Delivery,
        introduction: Introduction,
        *,
        on_event: Callable[[WorkerLink, SenderEvent], None],
        on_lost: Callable[[WorkerLink, str], None],
    ) -> None:
        self.worker = worker
        self.pid = pid
        self.transport = transport
        self.session = session
        self.group = group
        self.due: Published | None = None
        # What was due and is about to be overwritten, until that has happened or is given up.
        self._revoked: Published | None = None
        self.late = False
        self.died = False
        self._leased: Published | None = None
        self._in_service: Published | None = None
        self._delivery = delivery
        self._introduction = introduction
        self._fetched = Fetched()
        self._moved: tuple[Hashable, float] = (None, 0.0)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._copied = False
        self._on_event = on_event
        self._on_lost = on_lost
        self._watch = ProcessWatch(pid, self._process_ended)
        delivery.enter(self)

    @property
    def behind(self) -> bool:
        """Whether a version is on its way to it that it has not answered for."""
        return self._to_spill or self.due is not None or self._leased is not None

    @property
    def reaches(self) -> int:
        """The version that it will run on when it has answered for all that is on its way."""
        spill = self.group.spill if self._to_spill else None
        newest = spill or self.due or self._leased or self._in_service
        return newest.version if newest else -1

    @property
    def _to_spill(self) -> bool:
        return self.group.spill is not None and self.worker in self.group.spill_targets

    @property
    def ready(self) -> bool:
        """Whether it has come for what is due, and that is there."""
        return self.session.state is SenderState.READY and self.group.offerable(self.due)

    @property
    def parked(self) -> bool:
        """Whether it is not expected to move on from what it reads by itself."""
        waiting = self.session.state in (SenderState.IDLE, SenderState.READY)
        return self.late or (waiting and self.due is None)

    @property
    def wire_nbytes(self) -> int:
        """Bytes that went to it over the connection, where that carries the weights."""
        return self._delivery.progress

    @property
    def maps(self) -> bool:
        """Whether its process maps the slots."""
        return self._delivery.maps

    @property
    def reading(self) -> bool:
        """Whether its process may be looking at a slot now."""
        unfinished = self._leased is not None and not self._copied
        return self._delivery.maps and (self._delivery.holds or unfinished)

    # -- the transport's sink ----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """A frame from the worker."""
        try:
            events = self.session.receive(frame)
        except ProtocolError as exc:
            self.session.close(str(exc), dropped=True)
            self.transport.flush(self.session)
            raise
        for event in events:
            self._on_event(self, event)
        if self.session.outgoing:
            self.transport.flush(self.session)

    def connection_lost(self, reason: str) -> None:
        """The worker is gone."""
        self._on_lost(self, reason)

    def _process_ended(self) -> None:
        self.died = True
        self.connection_lost(f"its process {self.pid} has ended")

    def holds_part_of(self, joint: Joint) -> bool:
        """Whether it has been offered a part of this update, and has not answered."""
        part = self._leased.joint if self._leased is not None else None
        return part is not None and part.mark.id == joint.id

    # -- what the sender tells it ------------------------------------------------------------------

    def announce(self, published: Published) -> None:
        """There is a newer version for this worker; :meth:`serve` tells it."""
        if self.due is not None and self.due is not published:
            self._forgo(self.due)
        self.due = published
        published.slot.holders.add(("due", self.worker))
        self.session.publish(published.round)

    def revoke(self, published: Published) -> None:
        """``published`` is about to be overwritten: it is not due any more. Call :meth:`forget_revoked`
        after it."""
        if self.due is published:
            published.slot.holders.discard(("due", self.worker))
            self.due = None
            self._revoked = published

    def forget_revoked(self, *, overwritten: bool) -> None:
        """What was revoked has been overwritten, or is whole and may be announced again."""
        revoked, self._revoked = self._revoked, None
        if overwritten:
            self._call_off(revoked)

    def serve(self) -> None:
        """Give the worker what it is waiting for, if it is waiting and there is something to give."""
        group, state, due = self.group, self.session.state, self.due
        if state is SenderState.READY:
            if due is not None and group.offerable(due) and self._delivery.may_begin(due):
                self._offer(self._delivery.instead(due))
        elif state is SenderState.WELCOMING and group.offerable(group.latest):
            assert group.latest is not None
            self.session.welcome(self._welcome(group.latest))
            group.addressed[self.worker] = group.latest.version
            self.announce(group.latest)
            self.transport.flush(self.session)
        else:
            self.transport.flush(self.session)

    def _offer(self, published: Published) -> None:
        joint = published.joint
        if joint is not None and self._in_service is None:
            # A worker takes its first by itself: its other models' receivers may not run yet.
            joint.call_off(self.worker)
            joint = None
        if joint is not None and joint.is_called_off(self.worker):
            self.session.abort(joint.mark.id)  # the part is refused as soon as it has come
        self.session.offer(self._lease(published, joint))
        self.transport.write(*self.session.frames_to_send())
        if self._delivery.carries:
            self._delivery.begin(published, lambda: self._sent(published))

    def _welcome(self, latest: Published) -> Welcome:
        layout, hello = self.group.arena.layout, self.session.hello
        known = hello is not None and hello.signature == layout.identity
        return Welcome(
            layout=None if known else layout.to_wire(),
            signature=layout.identity,
            version=latest.version,
            worker=self.worker,
            instance=self._introduction.instance,
            device=str(latest.slot.segment.buffer.device),
            eager=layout.nbytes <= EAGER_LIMIT,
            ticket=self._introduction.ticket,
            via=list(self._introduction.via),
        )

    def applied(self) -> bool:
        """It runs on the leased version now; returns whether that is its first."""
        first = self._in_service is None
        self._in_service = self._leased
        if self.due is not None:
            self._clear_due()
        self._answered()
        return first

    def rejected(self, nack: Nack) -> None:
        """It refused the leased version; or has it, and somebody below it refused."""
        if nack.kind == "below":
            self._in_service = self._leased
        else:
            self._call_off(self._leased)
        self._clear_due()
        self._answered()

    def _clear_due(self) -> None:
        """It has answered for what it is not to come for again."""
        if self.due is not None and self.due is self._leased:
            self.due.slot.holders.discard(("due", self.worker))
            self.due = None

    def fetched(self, event: Fetched) -> None:
        """It is ready for the newest; what it had leased and not used, it gives back."""
        self._fetched = event
        if self._leased is not None:
            self._keep_due(self._leased)
            self._answered()

    def _keep_due(self, leased: Published) -> None:
        """It still has to come for what it was leased, or for a newer version. To be said before the slot is
        let go of: one that nobody holds may be gone at once."""
        if self.due is not leased:
            if self.due is not None or leased.slot.version != leased.version:
                self._call_off(leased)  # it will never have that one
                return
            self.due = leased
        self.due.slot.holders.add(("due", self.worker))

    def _sent(self, published: Published) -> None:
        """All its bytes are on their way."""
        if self._leased is not published or self._delivery.holds:
            return
        if self._delivery.reads_on:
            self.group.release(self.worker, keep=published.slot)
        else:
            self.copied()

    def cut(self) -> None:
        """Take back what is being sent to a worker that does not take it: its memory is needed. A worker that
        is merely slow is left to it, or it would never get a whole version."""
        if self._leased is None or self._still() <= PATIENCE:
            return
        if self._delivery.cut():
            self._keep_due(self._leased)
            self._answered()
            self.session.recall(again=True)
            self.transport.flush(self.session)
        elif self._delivery.reads_on:
            # If a newer version takes its place, the worker finds out by the checksums.
            self._keep_due(self._leased)
            self.copied()

    def withdraw(self, published: Published) -> None:
        """This version will never be whole: nobody is to have it."""
        if self.due is published:
            self._forgo(published)
        if self._leased is published and self._delivery.cut():
            self._answered()
            self.session.recall(again=self.due is not None)
            self.transport.flush(self.session)

    def copied(self) -> None:
        """It has the leased version in memory of its own."""
        self._copied = True
        self.group.release(self.worker)

    def leave(self, reason: str, *, orphan: Hashable | None = None) -> WorkerLostError:
        """Forget it; what it reads stays held in the name of ``orphan``, if that is given.

        Returns the error for whoever waits for it.
        """
        self._watch.close()
        self._stop_timer()
        self._delivery.cut()
        self._delivery.leave()
        self._call_off(self._leased)
        self.forget_revoked(overwritten=True)
        if self.due is not None:
            self._forgo(self.due)
        if orphan is not None:
            for slot in self.group.arena.slots:
                if self.worker in slot.holders:
                    slot.holders.add(orphan)
        self.group.release(self.worker)
        return WorkerLostError([self.worker], reason)

    def _forgo(self, due: Published) -> None:
        """It will not come for this one any more."""
        due.slot.holders.discard(("due", self.worker))
        self.due = None
        self._call_off(due)

    def _call_off(self, published: Published | None) -> None:
        if published is not None and published.joint is not None:
            published.joint.call_off(self.worker)

    def _answered(self) -> None:
        self.late = False
        self._leased = None
        if self._delivery.carries:
            self._delivery.answered()
        keep = self._in_service.slot if self._delivery.holds and self._in_service else None
        self.group.release(self.worker, keep=keep)

    def _lease(self, published: Published, joint: JointRound | None) -> Update:
        if self.due is published:
            published.slot.holders.discard(("due", self.worker))
            self.due = None
        published.slot.holders.add(self.worker)
        self._leased = published
        self._copied = False
        delivery = self._delivery
        payload = delivery.payload(published, self._fetched)
        moved: Hashable = None
        if delivery.carries:
            moved, base = delivery.moved, delivery.base()
            if base is not None:
                base.holders.add(self.worker)
        self._moved = moved, self._loop.time()
        if self._timer is None:  # one goes on for many leases: making one takes longer than a small send may
            self._timer = self._loop.call_later(min(SAMPLE, LATE_AFTER), self._look)
        have = self.session.acked_version
        update = Update(
            round=published.round,
            version=published.version,
            base=have,
            names=self.group.changes.since(have),
            joint=joint.mark if joint else None,
            payload=payload,
        )
        if update != published.offered:
            published.offered = update
        return published.offered  # the same object for most workers, so that it is encoded once

    def _look(self) -> None:
        """It may hang: what it holds must not be what the others wait for."""
        self._timer = None
        if self._leased is None:
            return
        left = LATE_AFTER - self._still()
        if left > 0:
            self._timer = self._loop.call_later(min(SAMPLE, left), self._look)
        else:
            self.late = True
            self.group.wake()

    def _still(self) -> float:
        """Seconds for which nothing of what it was leased has moved, as far as was looked."""
        moved, now = self._delivery.moved, self._loop.time()
        if moved != self._moved[0]:
            self._moved = moved, now
        return now - self._moved[1]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Lingering:
    """What hears a worker that was dropped: only its end counts.

    Args:
        on_end: called once; with true if it has said that it reads nothing any more.
    """

    def __init__(self, on_end: Callable[[bool], None]) -> None:
        self._on_end: Callable[[bool], None] | None = on_end

    def frame_received(self, frame: Frame) -> None:
        """Its goodbye is its end, whatever else it says is too late."""
        if isinstance(frame, Bye):
            self._end(said_so=not frame.dropped)

    def connection_lost(self, reason: str) -> None:
        """Its channel is gone."""
        self._end(said_so=False)

    def _end(self, *, said_so: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(said_so)
