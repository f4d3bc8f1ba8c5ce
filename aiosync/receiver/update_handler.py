"""Handle one update at a time, from its arrival to the answer.

An update is *pending* from the arrival of its frame until it is acknowledged, refused or given back. A
cancellation leaves behind:

1. while it is staged: the thread ends first. The update stays pending, and the next call stages it again.
2. while it is committed: the commit was withdrawn, or has happened. The next call continues from there.
3. while devices finish what was queued before the commit: it is committed. The next call waits again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial

from aiosync.events import EventSource
from aiosync.protocol.frames import Update
from aiosync.protocol.nack import nack_of
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.joint_commit import give_up
from aiosync.receiver.listeners import ReceiverReporter
from aiosync.receiver.updates import Applier, Overtaken, PendingUpdate
from aiosync.stats import SchemeStats
from aiosync.transfer.stream import BaseLostError
from aiosync.weights.binding import StaleStaging

_STAGED_AFTER = 0.02
"""Seconds that a commit waits before the sender is informed. Most forward passes have ended by then. For each
frame the sender's thread needs a processor, which workers that act take from it."""


@dataclass(eq=False, repr=False)
class UpdateHandler:
    """Stages and commits the pending update, and answers the sender."""

    applier: Applier
    connection: SenderConnection
    reporter: ReceiverReporter
    events: EventSource
    # The update that has arrived and is not answered yet.
    pending: PendingUpdate | None = None
    # The version of this sender that was committed last; -1: none.
    served: int = -1
    # Whether the receiver loop runs, so that an answer asks for the next update.
    looping: bool = False
    # Whether nothing is answered any more.
    closed: bool = False
    # Whether the update before the pending one was given back, because there was a newer one.
    _skipped: bool = field(default=False, init=False)
    # The timer of _report_staged().
    _report: asyncio.TimerHandle | None = field(default=None, init=False)
    # Set when an update was acknowledged or refused.
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    stats: SchemeStats = field(default_factory=SchemeStats)

    def arrived(self, update: Update) -> None:
        """An Update frame has arrived.

        Raises:
            ProtocolError: the frame does not say where the update lies.
        """
        if self.applier.inbound is not None:
            self.applier.inbound.expect(update)
        self.pending = PendingUpdate(update)

    def interrupted(self, reason: str) -> None:
        """The rest of the pending update's bytes will not arrive."""
        if self.applier.inbound is not None:
            self.applier.inbound.interrupted(reason)

    def take_at_once(self) -> bool:
        """Apply the pending update synchronously if no step needs to await. Return whether it was answered or
        given back.

        Called while the receiver loop waits, to save waking it. Where other threads use the model, this may
        block for a millisecond.
        """
        pending = self.pending
        if pending is None or pending.update.version <= self.applier.version:
            return False
        try:
            applied = self.applier.take_at_once(pending)
        except Exception as exc:  # noqa: BLE001 - sent to the sender as a refusal
            self._not_applied(pending, exc)
        else:
            if applied:
                self.answer(pending)
        return self.pending is None

    async def advance(self) -> Exception | None:
        """Stage and commit the pending update, and answer the sender. Return the error if it was refused."""
        pending, applier, connection = self.pending, self.applier, self.connection
        assert pending is not None
        if connection.down:
            # The sender may have written over the update's memory by now, so its values cannot be used.
            self.pending = None
            return None
        if pending.update.version <= applier.version:
            await applier.settle()  # it may have been committed by a call that was cancelled then
            applier.forget()
            self.answer(pending)
            return None
        if pending.staged is None and pending.update.joint is None and connection.session.superseded:
            if not self._skipped:
                self._skipped = (
                    True  # not twice in a row: then none would be applied as long as they come fast
                )
                self._skip()
                return None
        if pending.released and not applier.has_staged(pending):
            # Staged for another model, and the memory that it arrived in may have a newer version by now.
            self._give_up_joint(pending, "its model was replaced while its part waited")
            self._skip()
            return None
        try:
            if not applier.has_staged(pending):
                pending.staged = None
                await applier.stage(pending)
                if connection.down:
                    self.pending = None
                    return None
            try:
                await applier.commit(pending, partial(self._held_up, pending))
            finally:
                if self._report is not None:
                    self._report.cancel()
        except Exception as exc:  # noqa: BLE001 - sent to the sender as a refusal
            return self._not_applied(pending, exc)
        # Not refused if this raises, since the version is in service: a device that fails ends the receiver.
        await applier.settle()
        self.answer(pending)
        return None

    def _not_applied(self, pending: PendingUpdate, error: Exception) -> Exception | None:
        """Give the update back, refuse it or keep it, by what its staging or its commit raised. Return the
        error if it was refused."""
        if self.closed or (pending.staged is None and self.connection.down):
            self.pending = None
        elif isinstance(error, Overtaken | BaseLostError):
            self._skip(whole=isinstance(error, BaseLostError))
        elif isinstance(error, StaleStaging):
            pending.staged = None  # the bytes that it was staged from are still here: it is staged again
        else:
            self.pending = None
            self._give_up_joint(pending, f"the part of {self.reporter.model_id!r} failed: {error}")
            self.refresh_fetch()
            self.connection.session.refused(nack_of(pending.update.version, error))
            self.failed(error)
            return error
        return None

    def _skip(self, *, whole: bool = False) -> None:
        """Give the pending update back, to fetch a newer one; or all entries of the same one (``whole``)."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.staged is None:
            self.applier.forget()
        if not self.closed:
            self.refresh_fetch()
            session = self.connection.session
            if whole:
                session.have = -1
            # Fetch at once: if the loop was not woken for this update, nothing wakes it for the next one.
            session.wanting = self.looping and self.applier.may_fetch
            session.skip()
            self.connection.flush()

    def refresh_fetch(self) -> None:
        """Set the fields of the next Fetch: which version this process has, and what it can read."""
        session, inbound = self.connection.session, self.applier.inbound
        session.have, session.maps = self.applier.have, inbound is not None and inbound.can_read_sender

    def _held_up(self, pending: PendingUpdate) -> None:
        """The staged update waits for readers."""
        loop = asyncio.get_running_loop()
        now = time.perf_counter()
        if pending.held_up_since is None:
            pending.held_up_since = now
        left = pending.held_up_since + _STAGED_AFTER - now
        if left > 0:
            self._report = loop.call_later(left, self._report_staged, pending)
        else:
            self._report_staged(pending)
        if self.connection.session.superseded:  # since it began to be staged
            self.applier.overtake()

    def _report_staged(self, pending: PendingUpdate) -> None:
        """Tell the sender that the update waits."""
        if self.pending is pending:  # and was not given back when the connection was lost
            copied, inbound = not self.applier.needs_sender, self.applier.inbound
            pending.released = copied and inbound is not None and inbound.access.lent
            self.connection.session.staged(copied=copied)
            self.connection.flush()

    def answer(self, pending: PendingUpdate) -> None:
        """Acknowledge the pending update: it, or a newer version, is in service."""
        self.pending, self._skipped = None, False
        applier, connection, stats = self.applier, self.connection, self.stats
        if applier.inbound is None or not applier.inbound.access.lent:
            self.refresh_fetch()
        wanting = self.looping and applier.may_fetch
        connection.session.applied(applier.version, pending.seconds, wanting=wanting)
        connection.transport.flush(connection.session)
        # The sender waits for the answer, and nothing below can fail.
        if pending.committed:
            stats.updates += 1
            stats.nbytes += applier.layout.nbytes if applier.layout is not None else 0
            if self.served >= 0:
                stats.skipped += max(0, pending.update.version - self.served - 1)
            self.served = pending.update.version
            stats.add_phases(pending.seconds)
        self.answered.set()
        if pending.committed and self.events.hooks:
            self.reporter.emit("committed", seconds=pending.seconds)

    def failed(self, error: Exception) -> None:
        """This worker has refused an update or the layout: send the refusal, and report it."""
        self.stats.failures += 1
        self.connection.flush()
        self.answered.set()
        self.reporter.emit("failed", message=str(error))

    def give_up_joint(self, reason: str) -> None:
        """If the pending update is a part of a joint update, this worker does not commit the other parts."""
        if self.pending is not None:
            self._give_up_joint(self.pending, reason)

    def _give_up_joint(self, pending: PendingUpdate, reason: str) -> None:
        if pending.update.joint is not None:
            give_up(pending.update.joint.id, self.connection.worker, reason)

    async def close(self) -> None:
        """Close the applier, and then the connection.

        A version that is in service and not acknowledged yet is acknowledged.
        """
        pending = self.pending
        self.interrupted("this receiver was closed")  # what the applier waits for may take long
        try:
            await self.applier.close()
        finally:
            if pending is not None and pending.committed and self.pending is pending:
                # Cancelled between the commit and the answer, for which the sender waits.
                self.answer(pending)
            elif pending is not None:
                self._give_up_joint(pending, "the receiver has closed")
            await self.connection.aclose("the worker has closed", released=not self.applier.views_sender)

    def abandon_loop(self) -> None:
        """Do what :meth:`close` does, as far as that is possible after the event loop has been closed."""
        try:
            self.applier.abandon_loop()
        finally:
            self.connection.abandon_loop(released=not self.applier.views_sender)
