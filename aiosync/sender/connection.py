"""One connected worker, on the sender: its session, its transfer, and the slots that it reads.

A version goes through three stages for a worker: *due* (the worker was notified, or will be), *leased* (the
worker got the Update frame and has not answered), and *in service* (the worker acknowledged it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from aiosync.errors import ProtocolError, WorkerLostError
from aiosync.protocol.events import Fetched, SenderEvent
from aiosync.protocol.frames import Bye, Frame, Joint, Nack, Update, Welcome
from aiosync.protocol.sender_session import SenderSession, SenderState
from aiosync.sender.worker_group import WeightGroup
from aiosync.transfer.base import OutboundTransfer
from aiosync.transfer.slots import JointRound, SlotVersion
from aiosync.transports.base import Transport
from aiosync.transports.process_watch import ProcessWatch

__all__ = ["DroppedConnection", "Introduction", "WorkerConnection"]

EAGER_LIMIT = 1 << 20
"""Bytes up to which a worker gets an update without a Notify before it. This saves a round trip. It costs a
slot if the worker hangs at that moment."""

LATE_AFTER = 2.0
"""Seconds without an answer and without a byte moved, after which a worker counts as late: the slots that it
holds then do not count towards ``max_slots``."""

SAMPLE = 0.5
"""Seconds between two checks of whether bytes move."""

PATIENCE = 1.0
"""Seconds without a byte moved, after which an update that is being sent may be taken back."""


class Introduction(NamedTuple):
    """What a Welcome frame says of the sender.

    Attributes:
        instance: an id of this sender, different from the next sender's at the same address.
        ticket: the secret with which the worker proves that the index is its own.
        via: the ids of the senders that an update passes on its way.
    """

    instance: str
    ticket: bytes
    via: Sequence[str]


class WorkerConnection:
    """A connected worker.

    Args:
        worker: its index.
        pid: its process, for noticing its end; 0 if unknown.
        outbound: how versions get there.
        introduction: what its welcome says of the sender.
        on_event: called with this connection and each event of its session.
        on_lost: called with this connection and the reason when it is lost.

    Attributes:
        due: the version that the worker was notified of and has not fetched.
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
        outbound: OutboundTransfer,
        introduction: Introduction,
        *,
        on_event: Callable[[WorkerConnection, SenderEvent], None],
        on_lost: Callable[[WorkerConnection, str], None],
    ) -> None:
        self.worker = worker
        self.pid = pid
        self.transport = transport
        self.session = session
        self.group = group
        self.due: SlotVersion | None = None
        # The version that was due and whose slot is being overwritten, until the copy has ended.
        self._revoked: SlotVersion | None = None
        self.late = False
        self.died = False
        # The version that the worker was sent and has not answered for.
        self._leased: SlotVersion | None = None
        # The version that the worker acknowledged last.
        self._in_service: SlotVersion | None = None
        self._outbound = outbound
        self._introduction = introduction
        # The worker's last Fetch: the version whose bytes it has, and whether it can read our memory.
        self._fetched = Fetched()
        # (progress of the transfer, when it last changed): decides whether a silent worker counts as late.
        self._moved: tuple[Hashable, float] = (None, 0.0)
        self._loop = asyncio.get_running_loop()
        # Runs while a version is leased, to find a worker that hangs.
        self._timer: asyncio.TimerHandle | None = None
        # Whether the worker has copied the leased version, so that it reads the slot no more.
        self._copied = False
        self._on_event = on_event
        self._on_lost = on_lost
        self._watch = ProcessWatch(pid, self._process_ended)
        outbound.enter(self)

    @property
    def behind(self) -> bool:
        """Whether a version is on its way to the worker that it has not answered for."""
        return self._to_spill or self.due is not None or self._leased is not None

    @property
    def reaches(self) -> int:
        """The version that the worker will run on once it has answered for all versions; -1: none."""
        spill = self.group.spill if self._to_spill else None
        newest = spill or self.due or self._leased or self._in_service
        return newest.version if newest else -1

    @property
    def _to_spill(self) -> bool:
        return self.group.spill is not None and self.worker in self.group.spill_targets

    @property
    def ready(self) -> bool:
        """Whether the worker has sent a Fetch, and the version that is due can be offered."""
        return self.session.state is SenderState.READY and self.group.offerable(self.due)

    @property
    def parked(self) -> bool:
        """Whether the worker is not expected to release its slot: it is late, or nothing is due."""
        waiting = self.session.state in (SenderState.IDLE, SenderState.READY)
        return self.late or (waiting and self.due is None)

    @property
    def wire_nbytes(self) -> int:
        """Bytes that were sent over the connection, where that carries the weights."""
        return self._outbound.progress

    @property
    def maps(self) -> bool:
        """Whether the worker's process maps the slots."""
        return self._outbound.maps

    @property
    def reading(self) -> bool:
        """Whether the worker's process may be reading a slot now."""
        unfinished = self._leased is not None and not self._copied
        return self._outbound.maps and (self._outbound.holds or unfinished)

    # -- the transport's sink ----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Handle a frame from the worker."""
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
        """Handle the loss of the connection."""
        self._on_lost(self, reason)

    def _process_ended(self) -> None:
        self.died = True
        self.connection_lost(f"its process {self.pid} has ended")

    def holds_part_of(self, joint: Joint) -> bool:
        """Whether the worker was sent its part of this joint update, and has not answered."""
        part = self._leased.joint if self._leased is not None else None
        return part is not None and part.mark.id == joint.id

    # -- what the sender tells it ------------------------------------------------------------------

    def announce(self, published: SlotVersion) -> None:
        """Make ``published`` the version that is due. Call :meth:`serve` after it."""
        if self.due is not None and self.due is not published:
            self._forgo(self.due)
        self.due = published
        published.slot.holders.add(("due", self.worker))
        self.session.publish(published.round)

    def revoke(self, published: SlotVersion) -> None:
        """``published`` is about to be overwritten, so it is not due any more.

        Call :meth:`forget_revoked` once the copy has ended.
        """
        if self.due is published:
            published.slot.holders.discard(("due", self.worker))
            self.due = None
            self._revoked = published

    def forget_revoked(self, *, overwritten: bool) -> None:
        """The copy has ended: the revoked version was overwritten, or may be announced again."""
        revoked, self._revoked = self._revoked, None
        if overwritten:
            self._call_off(revoked)

    def serve(self) -> None:
        """Send the worker the Update or the Welcome that it waits for, if it waits and there is one."""
        group, state, due = self.group, self.session.state, self.due
        if state is SenderState.READY:
            if due is not None and group.offerable(due) and self._outbound.may_begin(due):
                self._offer(self._outbound.instead(due))
        elif state is SenderState.WELCOMING and group.offerable(group.latest):
            assert group.latest is not None
            self.session.welcome(self._welcome(group.latest))
            group.addressed[self.worker] = group.latest.version
            self.announce(group.latest)
            self.transport.flush(self.session)
        else:
            self.transport.flush(self.session)

    def _offer(self, published: SlotVersion) -> None:
        joint = published.joint
        if joint is not None and self._in_service is None:
            # A worker applies its first version alone: the receivers of its other models may not run yet.
            joint.call_off(self.worker)
            joint = None
        if joint is not None and joint.is_called_off(self.worker):
            self.session.abort(joint.mark.id)  # the worker refuses the part as soon as it arrives
        self.session.offer(self._lease(published, joint))
        self.transport.write(*self.session.frames_to_send())
        if self._outbound.carries:
            self._outbound.begin(published, lambda: self._sent(published))

    def _welcome(self, latest: SlotVersion) -> Welcome:
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
        """The worker acknowledged the leased version. Return whether it is the worker's first."""
        first = self._in_service is None
        self._in_service = self._leased
        if self.due is not None:
            self._clear_due()
        self._answered()
        return first

    def rejected(self, nack: Nack) -> None:
        """The worker refused the leased version. A relay: it has the version, a worker below it refused."""
        if nack.kind == "below":
            self._in_service = self._leased
        else:
            self._call_off(self._leased)
        self._clear_due()
        self._answered()

    def _clear_due(self) -> None:
        """The worker need not fetch the leased version again."""
        if self.due is not None and self.due is self._leased:
            self.due.slot.holders.discard(("due", self.worker))
            self.due = None

    def fetched(self, event: Fetched) -> None:
        """The worker sent a Fetch. If it had not answered for a leased version, it gives that back."""
        self._fetched = event
        if self._leased is not None:
            self._keep_due(self._leased)
            self._answered()

    def _keep_due(self, leased: SlotVersion) -> None:
        """The worker still has to fetch the leased version, or a newer one.

        Call this before the slot is released: a slot without holders may be reused or freed at once.
        """
        if self.due is not leased:
            if self.due is not None or leased.slot.version != leased.version:
                self._call_off(leased)  # the worker will never get that one
                return
            self.due = leased
        self.due.slot.holders.add(("due", self.worker))

    def _sent(self, published: SlotVersion) -> None:
        """All bytes of ``published`` have been handed to the kernel."""
        if self._leased is not published or self._outbound.holds:
            return
        if self._outbound.reads_on:
            self.group.release(self.worker, keep=published.slot)
        else:
            self.copied()

    def cut(self) -> None:
        """Take back an update that is being sent to a worker that does not read, to free the slot.

        A worker that is merely slow keeps its update: otherwise it would never get a whole version.
        """
        if self._leased is None or self._still() <= PATIENCE:
            return
        if self._outbound.cut():
            self._keep_due(self._leased)
            self._answered()
            self.session.recall(again=True)
            self.transport.flush(self.session)
        elif self._outbound.reads_on:
            # If a newer version overwrites the slot, the worker notices by the checksums.
            self._keep_due(self._leased)
            self.copied()

    def withdraw(self, published: SlotVersion) -> None:
        """``published`` will never be complete: cancel it for this worker."""
        if self.due is published:
            self._forgo(published)
        if self._leased is published and self._outbound.cut():
            self._answered()
            self.session.recall(again=self.due is not None)
            self.transport.flush(self.session)

    def copied(self) -> None:
        """The worker has copied the leased version into memory of its own."""
        self._copied = True
        self.group.release(self.worker)

    def leave(self, reason: str, *, orphan: Hashable | None = None) -> WorkerLostError:
        """End this connection's bookkeeping.

        Args:
            orphan: the holder that keeps the slots which the worker's process may still read; None: none.

        Returns:
            The error for calls that wait for this worker.
        """
        self._watch.close()
        self._stop_timer()
        self._outbound.cut()
        self._outbound.leave()
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

    def _forgo(self, due: SlotVersion) -> None:
        """The worker will not fetch ``due`` any more."""
        due.slot.holders.discard(("due", self.worker))
        self.due = None
        self._call_off(due)

    def _call_off(self, published: SlotVersion | None) -> None:
        if published is not None and published.joint is not None:
            published.joint.call_off(self.worker)

    def _answered(self) -> None:
        self.late = False
        self._leased = None
        if self._outbound.carries:
            self._outbound.answered()
        keep = self._in_service.slot if self._outbound.holds and self._in_service else None
        self.group.release(self.worker, keep=keep)

    def _lease(self, published: SlotVersion, joint: JointRound | None) -> Update:
        if self.due is published:
            published.slot.holders.discard(("due", self.worker))
            self.due = None
        published.slot.holders.add(self.worker)
        self._leased = published
        self._copied = False
        outbound = self._outbound
        payload = outbound.payload(published, self._fetched)
        moved: Hashable = None
        if outbound.carries:
            moved, base = outbound.moved, outbound.base()
            if base is not None:
                base.holders.add(self.worker)
        self._moved = moved, self._loop.time()
        if (
            self._timer is None
        ):  # one timer serves many leases, since making one costs as much as a tenth of a small send
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
        """Check whether the worker hangs. The slot of a worker that hangs must not hold up the others."""
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
        """Seconds for which no byte of the leased version has moved, as far as was checked."""
        moved, now = self._outbound.moved, self._loop.time()
        if moved != self._moved[0]:
            self._moved = moved, now
        return now - self._moved[1]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class DroppedConnection:
    """The sink of a dropped worker's connection. Only the worker's goodbye, or its end, counts.

    Args:
        on_end: called once; with True if the worker said that it reads no slot any more.
    """

    def __init__(self, on_end: Callable[[bool], None]) -> None:
        self._on_end: Callable[[bool], None] | None = on_end

    def frame_received(self, frame: Frame) -> None:
        """Handle the worker's Bye; ignore all other frames."""
        if isinstance(frame, Bye):
            self._end(said_so=not frame.dropped)

    def connection_lost(self, reason: str) -> None:
        """Handle the end of the connection."""
        self._end(said_so=False)

    def _end(self, *, said_so: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(said_so)
