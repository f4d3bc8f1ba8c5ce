"""One connected worker, on the sender: its session, its transfer, and its leases on slots.

A version goes through three stages for a worker: *notified* (the worker was notified, or will be), *in
flight* (the worker got the Update frame and has not answered), and *current* (the worker acknowledged it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from aiosync._deadline import ProgressWatch
from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Ack, Bye, Fetch, Frame, Joint, Nack, Staged, Update, Welcome
from aiosync.protocol.sender_session import SenderSession, SenderState
from aiosync.sender.worker_group import WorkerGroup
from aiosync.transfer.base import MemoryAccess, OutboundTransfer
from aiosync.transfer.slots import JointParts, Lease, LeaseKind, SlotVersion, release_all
from aiosync.transports.base import FramedTransport
from aiosync.transports.process_watch import ProcessWatch

if TYPE_CHECKING:
    from aiosync.sender.registry import WorkerRegistry

PATIENCE = 1.0
"""Seconds without a byte moved, after which an update that is being sent may be taken back."""


@dataclass(eq=False, repr=False)
class WorkerConnection:
    """A connected worker. The registry gets three outcomes: acknowledged, refused, lost."""

    worker: int
    pid: int  # its process, for noticing its end; 0 if unknown
    transport: FramedTransport
    session: SenderSession  # after the handshake
    group: WorkerGroup  # the workers that share its copy of the weights
    outbound: OutboundTransfer  # how versions get there
    _welcome: Callable[[], Welcome]  # makes its Welcome frame, once its group has a version
    _registry: WorkerRegistry
    # The version that the worker was notified of and has not fetched.
    notified: SlotVersion | None = field(default=None, init=False)
    _notified_lease: Lease | None = field(default=None, init=False)
    # The version that was notified and whose slot is being overwritten, until the copy has ended.
    _revoked: SlotVersion | None = field(default=None, init=False)
    # The version that the worker was sent and has not answered for.
    _in_flight: SlotVersion | None = field(default=None, init=False)
    # The slots that the worker may read for that; empty once it has copied the version.
    _reading: list[Lease] = field(default_factory=list, init=False)
    # Whether the worker has staged the version in flight and waits to commit it.
    staged: bool = field(default=False, init=False)
    # The version that the worker acknowledged last; its slot is leased if the worker's model views it.
    _current: SlotVersion | None = field(default=None, init=False)
    _current_lease: Lease | None = field(default=None, init=False)
    # The worker's last Fetch: the version whose bytes it has, and whether it can read our memory.
    _fetched: Fetch = field(default_factory=Fetch, init=False)
    # The worker has not answered for a while, or missed a deadline.
    unresponsive: bool = field(default=False, init=False)
    # Its process has ended.
    died: bool = field(default=False, init=False)
    # The worker is gone: nothing is sent or leased any more.
    _detached: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        outbound = self.outbound
        moved = (lambda: outbound.moved) if outbound.carries else None
        # Finds out whether the worker hangs while a version is in flight.
        self._progress = ProgressWatch(self._registry.stalls, moved, self.mark_unresponsive)
        self.watch = ProcessWatch(self.pid, self._process_ended)
        outbound.attach(self)

    @property
    def has_pending(self) -> bool:
        """Whether a version is on its way to the worker that it has not answered for."""
        waits = self.session.state is SenderState.WELCOMING or self.group.overflow_for(self.worker)
        return bool(waits or self.notified or self._revoked or self._in_flight)

    @property
    def misses_version(self) -> bool:
        """Whether the version that the worker was to get is lost: it gets the next one that is sent."""
        waits = self.session.state is SenderState.WELCOMING and self.group.newest is None
        return waits or self.group.lost.get(self.worker, -1) > self.target_version

    @property
    def target_version(self) -> int:
        """The version that the worker will run on once it has answered for all versions; -1: none."""
        overflow, group = self.group.overflow_for(self.worker), self.group
        welcomed = group.newest if self.session.state is SenderState.WELCOMING else None
        newest = overflow or self.notified or self._revoked or self._in_flight or self._current or welcomed
        return newest.version if newest else -1

    @property
    def ready(self) -> bool:
        """Whether the worker has sent a Fetch, and the version that it was notified of can be offered."""
        return self.session.state is SenderState.READY and self.group.offerable(self.notified)

    @property
    def stalled(self) -> bool:
        """Whether the worker is not expected to release its slots: it hangs, or was notified of nothing."""
        waiting = self.session.state in (SenderState.IDLE, SenderState.READY)
        return self.unresponsive or (waiting and self.notified is None)

    # -- the transport's sink ----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Handle a frame from the worker."""
        if self._detached:
            return
        try:
            events = self.session.receive(frame)
        except ProtocolError as exc:
            self.session.close(str(exc), dropped=True)
            self.transport.flush(self.session)
            raise
        for event in events:
            self._handle(event)
        if self.session.outgoing:
            self.transport.flush(self.session)

    def connection_lost(self, reason: str) -> None:
        """Handle the loss of the connection."""
        self._registry.lost(self, reason)

    def _process_ended(self) -> None:
        self.died = True
        self.connection_lost(f"its process {self.pid} has ended")

    def _handle(self, event: Frame) -> None:
        match event:
            case Ack():
                first = self._current is None
                if self.notified is not None:
                    self._clear_notified()
                if self._revoked is self._in_flight:
                    self._revoked = None
                self._answered(accepted=True)
                self._registry.awaited.acknowledged(self.worker, event, first=first)
            case Fetch():
                self._fetched = event
                if self._in_flight is not None:  # the worker gives back what it has not answered for
                    given_back = self._in_flight
                    self._keep_notified(given_back)
                    self._answered(accepted=False)
                    if self.notified is None and self._revoked is not given_back:
                        self.miss(given_back.version)
                self.offer_next()
            case Staged(copied=copied):
                self.staged = True
                if copied:
                    self._copied()
            case Nack(kind=kind):
                below = kind == "below"  # a relay has the version, a worker below it refused
                if not below:
                    self._cancel_joint(self._in_flight)
                self._clear_notified()
                self._answered(accepted=below)
                self._registry.refused(self, event)
            case Bye(reason=reason, dropped=dropped):
                self._registry.lost(self, reason or "it closed its side", orderly=not dropped, reads=dropped)
            case _:
                pass

    def holds_part_of(self, joint: Joint) -> bool:
        """Whether the worker was sent its part of this joint update, and has not answered."""
        part = self._in_flight.joint if self._in_flight is not None else None
        return part is not None and part.mark.id == joint.id

    # -- from the sender to the worker -------------------------------------------------------------

    def notify(self, published: SlotVersion) -> None:
        """Make ``published`` the version that the worker is to fetch; :meth:`offer_next` sends it."""
        if self._detached:
            return
        if self._revoked is not published:
            self._cancel_joint(self._revoked)
        self._revoked = None
        if self.notified is not published:
            if self.notified is not None:
                self._drop_notified(self.notified)
            self.notified = published
            self._notified_lease = self.group.pool.lease(published.slot, LeaseKind.NOTIFIED, self)
        self.session.publish(published.round)

    def revoke(self, published: SlotVersion) -> None:
        """``published`` is about to be overwritten: do not offer it. If that fails, call :meth:`restore` or
        :meth:`lose_revoked`."""
        if self.notified is published:
            self._revoked = published
            self._release_notified()

    def restore(self, published: SlotVersion) -> None:
        """``published`` was not overwritten: notify the worker again, if that was revoked."""
        if self._revoked is published:
            self.notify(published)

    def lose_revoked(self) -> None:
        """The version that was revoked was overwritten, and not by a newer one."""
        revoked, self._revoked = self._revoked, None
        self._cancel_joint(revoked)
        if revoked is not None:
            self.miss(revoked.version)

    def miss(self, version: int) -> None:
        """The worker will not get this version, which it was to get."""
        self.group.lost[self.worker] = version
        self._registry.missed(self)

    def offer_next(self) -> None:
        """Send the worker the Update or the Welcome that it waits for, if it waits and there is one."""
        if self._detached:
            return
        group, state, notified = self.group, self.session.state, self.notified
        if state is SenderState.READY:
            if notified is not None and group.offerable(notified) and self.outbound.can_start(notified):
                self._offer(notified)
        elif state is SenderState.WELCOMING and group.offerable(group.newest):
            self.session.welcome(self._welcome())
            self.notify(group.welcomed(self.worker))
            self.transport.flush(self.session)
        elif self.session.outgoing:
            self.transport.flush(self.session)

    def interrupt(self, round_: int) -> None:
        """Tell the worker that the bytes of this round's update will not arrive, if it has not answered."""
        if not self._detached:
            self.session.interrupt(round_)
            self.transport.flush(self.session)

    def _offer(self, notified: SlotVersion) -> None:
        published = self.outbound.substitute(notified) if self.outbound.carries else notified
        joint = published.joint_for(self.worker)
        if joint is not None and self._current is None:
            # A worker applies its first version alone: the receivers of its other models may not run yet.
            joint.cancel_for(self.worker)
            joint = None
        if joint is not None and joint.is_cancelled_for(self.worker):
            self.session.abort(joint.mark.id)  # the worker refuses the part as soon as it arrives
        self.session.offer(self._start(published, joint))
        self.transport.flush(self.session, more=self.outbound.sends_update)
        if self.outbound.carries:
            self.outbound.start(published, partial(self._sent, published))

    def _start(self, published: SlotVersion, joint: JointParts | None) -> Update:
        pool, outbound = self.group.pool, self.outbound
        self._in_flight = published
        lease = self._notified_lease
        if self.notified is published and lease is not None:
            lease.kind, self._notified_lease, self.notified = LeaseKind.READING, None, None
        else:
            lease = pool.lease(published.slot, LeaseKind.READING, self)
        self._reading.append(lease)
        payload = outbound.payload(published, self._fetched)
        if outbound.carries:
            base = outbound.base_slot()
            if base is not None:
                self._reading.append(pool.lease(base, LeaseKind.READING, self))
        self._progress.start()
        have, mark, offered = self.session.acked_version, joint.mark if joint else None, published.offered
        if offered is None or (offered.base, offered.joint, offered.payload) != (have, mark, payload):
            offered = published.offered = Update(
                round=published.round,
                version=published.version,
                base=have,
                names=self.group.changes.since(have),
                joint=mark,
                payload=payload,
            )
        return offered  # the same object for most workers, so that it is encoded once

    # -- from the worker ---------------------------------------------------------------------------

    def _answered(self, *, accepted: bool) -> None:
        """The worker has answered for the version in flight: release what it read for that."""
        self.unresponsive = self.staged = False
        reading, self._reading = self._reading, []
        if accepted:
            self._current = self._in_flight
            if self.outbound.access is MemoryAccess.VIEWED:
                before, self._current_lease = self._current_lease, reading.pop(0) if reading else None
                if before is not None:
                    reading.append(before)
        self._in_flight = None
        self._progress.stop()
        if self.outbound.carries:
            self.outbound.answered()
        release_all(reading)

    def _clear_notified(self) -> None:
        """The worker need not fetch the version in flight again."""
        if self.notified is not None and self.notified is self._in_flight:
            self._release_notified()

    def _keep_notified(self, in_flight: SlotVersion) -> None:
        """The worker still has to fetch the version in flight, or a newer one.

        Call this before the slot is released: a slot without leases may be reused or freed at once.
        """
        if self.notified is in_flight:
            return
        if self.notified is not None or not self.group.offerable(in_flight):
            self._cancel_joint(in_flight)  # the worker will never get that one
        else:
            self.notified = in_flight
            self._notified_lease = self.group.pool.lease(in_flight.slot, LeaseKind.NOTIFIED, self)

    def _sent(self, published: SlotVersion) -> None:
        """All bytes of ``published`` have been handed to the kernel."""
        if self._in_flight is not published or self.outbound.access is MemoryAccess.VIEWED:
            return
        if self.outbound.access is MemoryAccess.CHECKED:
            # None if :meth:`cancel_if_stuck` came first.
            further, self._reading = self._reading[1:], self._reading[:1]
            release_all(further)
        else:
            self._copied()

    def _copied(self) -> None:
        """The worker has copied the version in flight into memory of its own."""
        reading, self._reading = self._reading, []
        release_all(reading)

    # -- taking back -------------------------------------------------------------------------------

    def cancel_if_stuck(self) -> None:
        """Take back an update that is being sent to a worker that does not read, to free the slot.

        A worker that is merely slow keeps its update: otherwise it would never get a whole version.
        """
        if self._in_flight is None or self._progress.idle_seconds() <= PATIENCE:
            return
        if self.outbound.cancel():
            self._keep_notified(self._in_flight)
            self._recall(again=True)
        elif self.outbound.access is MemoryAccess.CHECKED:
            # If a newer version overwrites the slot, the worker notices by the checksums.
            self._keep_notified(self._in_flight)
            self._copied()

    def cancel(self, published: SlotVersion) -> None:
        """``published`` will never be whole: do not send it, and take it back if it is being sent."""
        if self.notified is published:
            self._drop_notified(published)
        if self._in_flight is not published:
            return
        if self.outbound.cancel():
            self._recall(again=self.notified is not None)
        else:
            self._copied()

    def _recall(self, *, again: bool) -> None:
        self._answered(accepted=False)
        self.session.recall(again=again)
        self.transport.flush(self.session)

    def detach(self) -> list[Lease]:
        """End this connection's bookkeeping.

        Returns:
            Leases on the slots that the worker's process may still read.
        """
        self._detached = True
        self.watch.close()
        self._progress.stop()
        viewed = [] if self._current_lease is None else [self._current_lease]
        leases = self._reading + viewed
        self._reading, self._current_lease = [], None
        self.outbound.cancel()
        self.outbound.detach()
        self._cancel_joint(self._in_flight)
        self._cancel_joint(self._revoked)
        if self.notified is not None:
            self._drop_notified(self.notified)
        if self.outbound.access.lent:
            for lease in leases:
                lease.detach()
            return leases
        release_all(leases)
        return []

    def _drop_notified(self, notified: SlotVersion) -> None:
        """The worker will never fetch the version that it was notified of."""
        self._release_notified()
        self._cancel_joint(notified)

    def _release_notified(self) -> None:
        lease, self._notified_lease, self.notified = self._notified_lease, None, None
        if lease is not None:
            lease.release()

    def _cancel_joint(self, published: SlotVersion | None) -> None:
        if published is not None and published.joint is not None:
            published.joint.cancel_for(self.worker)

    def mark_unresponsive(self) -> None:
        """The worker hangs or missed a deadline: until it answers, its slots do not count."""
        self.unresponsive = True
        self.group.pool.changed()
