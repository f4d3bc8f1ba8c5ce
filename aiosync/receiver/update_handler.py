"""Handle one update at a time, from its arrival to the answer.

An update is *pending* from the arrival of its frame until it is acknowledged, refused or given back. A
cancellation leaves behind:

1. while it is staged: the thread ends first. The update stays pending, and the next call stages it again.
2. while it is committed: the commit was withdrawn, or has happened. The next call goes on from there.
"""

from __future__ import annotations

import asyncio

from aiosync.events import EventSource, SchemeStats
from aiosync.protocol.frames import Abort, Cut, Frame, Update
from aiosync.protocol.nack import nack_of
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.joint_commit import give_up
from aiosync.receiver.listeners import ReceiverReporter
from aiosync.receiver.updates import Applier, Overtaken, PendingUpdate
from aiosync.transfer.stream import BaseLostError
from aiosync.weights.binding import StaleConversion

__all__ = ["UpdateHandler"]


class UpdateHandler:
    """Stages and commits the pending update, and answers the sender.

    Args:
        applier: applies updates.
        connection: the way to the sender.
        reporter: emits events.
        events: whether a hook is registered.

    Attributes:
        pending: the update that has arrived and is not answered yet.
        served: the version of this sender that was committed last; -1: none.
        looping: whether the receiver loop runs, so that an answer asks for the next update.
        closed: whether nothing is answered any more.
        answered: set when an update was acknowledged or refused.
        stats: this endpoint's figures.
    """

    def __init__(
        self,
        applier: Applier,
        connection: SenderConnection,
        reporter: ReceiverReporter,
        events: EventSource,
    ) -> None:
        self.pending: PendingUpdate | None = None
        self.served = -1
        self.looping = False
        self.closed = False
        self.answered = asyncio.Event()
        self.stats = SchemeStats()
        self._applier = applier
        self._connection = connection
        self._reporter = reporter
        self._events = events

    def handle(self, event: Frame) -> None:
        """Handle an event of the session that concerns updates.

        Raises:
            ProtocolError: an Update frame does not say where the update lies.
        """
        match event:
            case Update():
                self._arrived(event)
            case Cut():
                self.tell_state()
            case Abort(joint=joint):
                give_up(joint, self._connection.worker, "the sender called it off")
            case _:
                pass

    def _arrived(self, update: Update) -> None:
        inbound = self._applier.inbound
        if inbound is not None:
            inbound.expect(update)
        self.pending = PendingUpdate(update)

    def take_at_once(self) -> bool:
        """Apply the pending update synchronously if no step needs to await. Return whether it is done.

        Called while the receiver loop waits, to save waking it.
        """
        pending = self.pending
        if pending is None or pending.update.version <= self._applier.version:
            return False
        try:
            if not self._applier.take_at_once(pending):
                return False
        except BaseLostError:
            self.skip(whole=True)
        except StaleConversion:
            pending.staged = None
            return False
        except Exception as exc:  # noqa: BLE001 - sent to the sender as a refusal
            self._refuse(exc)
        else:
            self.answer(pending)
        return True

    async def advance(self) -> Exception | None:
        """Stage and commit the pending update, and answer the sender. Return the error if it was refused."""
        pending, applier, connection = self.pending, self._applier, self._connection
        assert pending is not None
        if connection.down:
            # The sender may have written over the update's memory by now, so its values cannot be used.
            self.pending = None
            return None
        if pending.update.version <= applier.version:
            applier.forget()
            self.answer(pending)
            return None
        if pending.staged is None and pending.update.joint is None and connection.session.superseded:
            self.skip()
            return None
        try:
            if not applier.has_staged(pending):
                pending.staged = None
                await applier.stage(pending)
                if connection.down:
                    self.pending = None
                    return None
            await applier.commit(pending, self._held_up)
        except (Overtaken, BaseLostError) as exc:
            self.skip(whole=isinstance(exc, BaseLostError))
            return None
        except StaleConversion:
            pending.staged = None  # the bytes that it was staged from are still here
            return None
        except Exception as exc:  # noqa: BLE001 - sent to the sender as a refusal
            if self.closed or (pending.staged is None and connection.down):
                self.pending = None
                return None
            self._refuse(exc)
            return exc
        self.answer(pending)
        return None

    def skip(self, *, whole: bool = False) -> None:
        """Give the pending update back, to fetch a newer one; or all entries of the same one (``whole``)."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.staged is None:
            self._applier.forget()
        if not self.closed:
            self.tell_state()
            session = self._connection.session
            if whole:
                session.have = -1
            # Fetch at once: if the loop was not woken for this update, nothing wakes it for the next one.
            session.wanting = self.looping and self._applier.may_fetch
            session.skip()
            self._connection.flush()

    def tell_state(self) -> None:
        """Say in the next Fetch which version this process has, and what it can read."""
        session = self._connection.session
        session.have, session.maps = self._applier.have, self._applier.can_read_sender

    def _held_up(self) -> None:
        """Tell the sender that the staged update waits for readers."""
        session = self._connection.session
        session.staged(copied=not self._applier.needs_sender)
        self._connection.flush()
        if session.superseded:  # since it began to be staged
            self._applier.overtake()

    def answer(self, pending: PendingUpdate) -> None:
        """Acknowledge the pending update: it, or a newer version, is in service."""
        self.pending = None
        applier, connection = self._applier, self._connection
        if applier.inbound is None or not applier.inbound.access.lent:
            self.tell_state()
        wanting = self.looping and applier.may_fetch
        connection.session.applied(applier.version, pending.seconds, wanting=wanting)
        connection.transport.flush(connection.session)
        # The sender waits for the answer, and nothing below can fail.
        if pending.committed:
            self._count(pending)
        self.answered.set()
        if pending.committed and self._events.hooks:
            self._reporter.emit("committed", seconds=pending.seconds)

    def _count(self, pending: PendingUpdate) -> None:
        stats = self.stats
        stats.updates += 1
        stats.nbytes += self._applier.nbytes
        if self.served >= 0:
            stats.skipped += max(0, pending.update.version - self.served - 1)
        self.served = pending.update.version
        stats.add_phases(pending.seconds)

    def _refuse(self, error: Exception) -> None:
        """Refuse the pending update, with the error."""
        pending, self.pending = self.pending, None
        assert pending is not None
        self._give_up_joint(pending, f"the part of {self._reporter.model_id!r} failed: {error}")
        self.tell_state()
        self._connection.session.refused(nack_of(pending.update.version, error))
        self.failed(error)

    def failed(self, error: Exception) -> None:
        """This worker has refused an update or the layout: send the refusal, and report it."""
        self.stats.failures += 1
        self._connection.flush()
        self.answered.set()
        self._reporter.emit("failed", message=str(error))

    def give_up_joint(self, reason: str) -> None:
        """If the pending update is a part of a joint update, this worker does not commit the other parts."""
        if self.pending is not None:
            self._give_up_joint(self.pending, reason)

    def _give_up_joint(self, pending: PendingUpdate, reason: str) -> None:
        if pending.update.joint is not None:
            give_up(pending.update.joint.id, self._connection.worker, reason)

    async def close(self) -> None:
        """Close the applier. A version that is in service and not acknowledged yet is acknowledged."""
        pending = self.pending
        await self._applier.close()
        if pending is not None and pending.committed and self.pending is pending:
            self.answer(pending)  # cancelled between the commit and the answer, for which the sender waits
        elif pending is not None:
            self._give_up_joint(pending, "the receiver has closed")
