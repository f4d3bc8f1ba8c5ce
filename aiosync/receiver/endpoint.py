"""The receiver: applies the sender's updates. All schemes have this one receiver loop.

Frames are handled as they arrive, on the event loop that ``connect`` ran on. They only change which update
is *pending*. The receiver loop takes the pending update through three steps. A cancellation leaves behind:

1. *await* an update: nothing.
2. *stage* it: the thread ends first. The update stays pending, and the next call stages it again.
3. *commit* it: the commit was withdrawn, or has happened. The next call goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain

from torch import Tensor

from aiosync._deadline import Deadline, pauses
from aiosync._home_loop import HomeLoop
from aiosync._open_calls import OpenCalls
from aiosync._options import OnSenderClose
from aiosync.errors import (
    AiosyncError,
    HandshakeError,
    LayoutMismatchError,
    NotConnectedError,
    ProtocolError,
    SenderFullError,
    WorkerLostError,
)
from aiosync.events import EventKind, EventSource, SchemeStats, logger
from aiosync.protocol.events import Aborted, Left, Recalled, UpdateArrived
from aiosync.protocol.frames import Frame, Welcome
from aiosync.protocol.nack import nack_of
from aiosync.receiver.applier import Overtaken, PendingUpdate, WeightApplier
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.joint_commit import give_up
from aiosync.transfer.stream_inbound import BaseLostError
from aiosync.transports._offload import uninterrupted
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import Transport
from aiosync.weights.binding import StaleConversion

__all__ = ["WeightReceiver"]


_ATTEMPT = 1.0
"""Seconds that each attempt to reconnect has at least."""

_LONGEST_ATTEMPT = 15.0
"""Seconds that each attempt has at most, so that an attempt at a dead address is not the last one."""


class WeightReceiver:
    """The live receiving endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        applier: takes updates in; this endpoint's own from now on.
        model_id: what the sender calls the model.
        worker_idx: which worker this is; -1: the sender says.
        make_transport: makes a way to the sender, not open yet.
        token: the secret that the sender must know.
        reconnect_for: seconds for which to try, when the connection is lost, to make another.
        on_sender_close: ``"wait"``: when the sender closes in order, look for one as when the connection is
            lost. ``"stop"``: end, with a WARNING. None: end.

    Attributes:
        home: the event loop that this lives on.
        ended: why nothing more will come, or None.
        lost: whether the sender ended without a goodbye, or let this worker go.
    """

    def __init__(
        self,
        applier: WeightApplier,
        model_id: str | None,
        worker_idx: int,
        make_transport: Callable[[], Transport],
        token: bytes,
        *,
        reconnect_for: float = 0.0,
        on_sender_close: OnSenderClose | None = None,
        events: EventSource,
    ) -> None:
        self.model_id = model_id
        self._stats = SchemeStats()
        self.applier = applier
        self.ended: str | None = None
        self.lost = False
        self._events = events
        self._reconnect_for = reconnect_for
        self._on_sender_close = on_sender_close
        self._connection = SenderConnection(make_transport, token, model_id, worker_idx)
        self._pending: PendingUpdate | None = None
        self._served = -1  # the version of this sender that was committed last
        # Reconnects after the connection was lost. A task of its own, so that the timeout of a receive()
        # does not cut an attempt short.
        self._search: asyncio.Task[bool] | None = None
        self._returned = 0  # the number of updates when receive() returned last
        self._changed = asyncio.Event()
        self._committed = asyncio.Event()
        self._looping = False
        self._idle = False
        self._taker = asyncio.Lock()  # held by the task that applies updates: the receiver loop, or receive()
        self._body: asyncio.Timeout | None = None
        self._closed = False
        self._calls = OpenCalls()
        self._settled = False
        self.home = HomeLoop("this receiver")

    @property
    def version(self) -> int:
        """The version in service, -1 before ``connect``."""
        return self.applier.version

    @property
    def stats(self) -> SchemeStats:
        """This endpoint's figures."""
        self._stats.memory = self.applier.memory
        return self._stats

    @property
    def worker_idx(self) -> int:
        """This worker's index; -1: the sender has not assigned one yet."""
        return self._connection.worker

    @property
    def transport(self) -> Transport:
        """The connection to the sender."""
        return self._connection.transport

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors in service, name -> tensor; read only."""
        return self.applier.weights

    # -- connect ----------------------------------------------------------------------------------

    async def connect(self, deadline: Deadline) -> None:
        """Connect to the sender and apply its newest version.

        Raises:
            WorkerLostError: there is no sender.
            NotConnectedError: this receiver was closed meanwhile.
            HandshakeError: it refused this worker.
            LayoutMismatchError: its weights do not fit the model. The sender gets the same error.
            SyncTimeoutError: it did not answer in time.
        """
        self.home.enter()
        try:
            async with self._calls.call(deadline.remaining()):
                welcome = await self._join(deadline)
                self.applier.worker = welcome.worker
                await self._settle_in(welcome)
            self._returned = self._stats.updates
        except TimeoutError as exc:
            await self.aclose()
            hint = self.transport.trouble or "the sender did not answer"
            raise deadline.error("connect", hint=hint) from exc
        except BaseException:
            await self.aclose()
            raise

    async def _join(self, deadline: Deadline) -> Welcome:
        """Connect until the sender welcomes this worker. Retry while the sender is full.

        Raises:
            TimeoutError: it had none until the deadline.
        """
        for pause in pauses(deadline):
            try:
                welcome = await self._connection.meet(deadline)
            except SenderFullError as exc:
                trouble = str(exc)
            except WorkerLostError as exc:
                # The sender accepted and then closed the connection: it may be restarting.
                if self._closed or not (self._reconnect_for and self._connection.transport.reached):
                    raise
                trouble = exc.reason
            else:
                return welcome
            await asyncio.sleep(pause)
            await self._connection.renew("")
            self._connection.transport.trouble = trouble
        raise TimeoutError

    async def _settle_in(self, welcome: Welcome) -> None:
        connection = self._connection
        self.applier.follow(welcome.via)
        connection.adopt(welcome)
        try:
            self.applier.open(welcome.layout, welcome.device)
        except (LayoutMismatchError, ProtocolError, TypeError) as exc:
            connection.session.declined(nack_of(welcome.version, exc))
            self._tell_failure(exc)
            raise
        await self.applier.prepare(connection.transport)
        self._say_what_is_here()
        self._settled = True  # from now on a lost connection is replaced
        connection.start(self, self._sender_ended)
        while self.version < 0:
            if await self._await_held():
                error = await self._advance()
                if error is not None:
                    raise error
            elif not await self._come_back():
                raise WorkerLostError((), self.ended or "unknown")
        await self.applier.reserve()
        self._emit("connected")

    async def _come_back(self) -> bool:
        """Reconnect if the connection was lost. Return whether there is a connection again."""
        search = self._search
        if search is None or search.done():
            if not self._connection.down or self._closed or self.ended is not None:
                return False
            search = self._search = asyncio.create_task(self._find_sender(), name="aiosync-reconnecting")
        await asyncio.wait([search])
        return not search.cancelled() and search.result()

    async def _find_sender(self) -> bool:
        """Reconnect within ``reconnect_for`` seconds. Return whether that succeeded."""
        connection = self._connection
        # The sender does not reuse the slot that this process views until this process has reconnected or
        # ended; or, if the sender dropped this worker, until this side has closed the connection.
        await self.applier.detach()
        connection.let_go()
        reason, last = connection.down, ""
        deadline = Deadline.after(self._reconnect_for)
        # One more attempt after the deadline: the event loop may have been blocked until then.
        for pause in chain(pauses(deadline), [0.0]):
            await asyncio.sleep(pause)
            try:
                seconds = max(_ATTEMPT, min(_LONGEST_ATTEMPT, deadline.remaining()))
                await self._meet_again(Deadline.after(seconds))
            except SenderFullError as exc:
                last = f"; tried to connect again for {self._reconnect_for:g} s: {exc}"
            except (HandshakeError, LayoutMismatchError) as exc:
                reason = str(exc)
                break
            except (AiosyncError, OSError) as exc:
                last = f"; tried to connect again for {self._reconnect_for:g} s: {exc}"
            else:
                logger.info("worker %d is connected again", connection.worker)
                self._emit("connected", message="again")
                return True
        logger.warning("worker %d gives the sender up: %s%s", connection.worker, reason, last)
        self._end(reason + last, lost=True)
        return False

    async def _meet_again(self, deadline: Deadline) -> None:
        connection = self._connection
        # A sender that gets the signature assumes that this worker acts on some version.
        await connection.renew(self.applier.signature if self.version >= 0 else "")
        try:
            await self._settle_in_again(deadline)
        except BaseException:
            # Without this the sender would wait for a worker that has left.
            await connection.aclose("the worker has given up connecting again")
            raise

    async def _settle_in_again(self, deadline: Deadline) -> None:
        connection = self._connection
        welcome = await connection.meet(deadline)
        self.applier.worker = welcome.worker
        self.applier.follow(welcome.via)
        try:
            self.applier.check_layout(welcome)
        except LayoutMismatchError as exc:
            connection.session.declined(nack_of(welcome.version, exc))
            raise
        # Versions count per sender. Another sender at the same address begins anew; follow that one.
        if connection.adopt(welcome):
            self._follow_another(welcome.version)
        await self.applier.prepare(connection.transport)
        self._say_what_is_here()
        connection.start(self, self._sender_ended)

    def _follow_another(self, version: int) -> None:
        before = self.version
        self._served = -1
        # Also if no version is in service here: a relay's workers may have one already.
        self.applier.follow_another()
        if before < 0:
            return
        words = f"followed another sender: {before} → {version}"
        logger.warning("worker %d %s", self.worker_idx, words)
        self._events.emit("followed", self.model_id, version, self.worker_idx, message=words, previous=before)

    # -- the transport's sink -----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Handle a frame from the sender."""
        if self._closed:
            return  # nothing is applied any more; the Bye says so
        session = self._connection.session
        try:
            events = session.receive(frame)
        except ProtocolError as exc:
            self._connection.tell_breach(exc)
            raise
        for event in events:
            match event:
                case UpdateArrived(update=update):
                    self.applier.expect(update)
                    self._pending = PendingUpdate(update)
                case Recalled():
                    self._say_what_is_here()
                case Aborted(joint=joint):
                    give_up(joint, self.worker_idx, "the sender called it off")
                case Left(reason=reason, replaced=True):
                    self._end(reason, lost=True)
                case Left(reason=reason, dropped=True):
                    self._lose(reason)
                case Left(reason=reason):
                    self._sender_closed(reason or "the sender has closed")
                case _:
                    pass
        if session.outgoing:
            self._connection.flush()
        if session.superseded:
            self.applier.overtake()
        if not (self._idle and self._take_at_once()):
            self._changed.set()

    def connection_lost(self, reason: str) -> None:
        """Handle the loss of the connection."""
        self._lose(reason)

    def _sender_ended(self) -> None:
        self._lose("its process has ended")

    def _sender_closed(self, reason: str) -> None:
        if self._on_sender_close == "wait":
            self._lose(reason)
            return
        if self._looping and self.ended is None:
            logger.log(
                logging.WARNING if self._on_sender_close == "stop" else logging.INFO,
                "the sender of worker %d has closed (%s): version %d stays in service",
                self.worker_idx,
                reason,
                self.version,
            )
        self._end(reason, lost=False)

    def _lose(self, reason: str) -> None:
        """The connection is lost. The receiver loop finds out whether the sender is gone, too."""
        if self._reconnect_for <= 0 or not self._settled:
            self._end(reason, lost=True)
        elif self.ended is None and not self._connection.down:
            self._connection.down = reason
            self._give_up_joint(reason)
            self.applier.disconnected()
            self._changed.set()
            logger.warning(
                "worker %d has lost the sender (%s); it goes on with version %d and tries to connect again",
                self.worker_idx,
                reason,
                self.version,
            )
            self._emit("lost", message=reason)

    def _give_up_joint(self, reason: str) -> None:
        pending = self._pending
        if pending is not None and pending.update.joint is not None:
            give_up(pending.update.joint.id, self.worker_idx, f"the connection ended: {reason}")

    def _end(self, reason: str, *, lost: bool) -> None:
        if self.ended is None:
            self.ended, self.lost = reason, lost
            self._give_up_joint(reason)
            self._changed.set()
            self._committed.set()
            if lost:
                self._cut_body_short()
                self._emit("lost", message=reason)

    # -- the receiver loop --------------------------------------------------------------------------

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Run the receiver loop beside the body.

        When the sender says goodbye the loop ends, the body goes on and the model keeps its version.

        Raises:
            NotConnectedError: not connected, or the loop runs already.
            WorkerLostError: the sender went without a goodbye, or let this worker go; the body is cancelled
                then.
        """
        self._claim_loop()
        # Not a task group around the body: an exception of the body would come out in an exception group.
        host = BackgroundTasks("aiosync-receiving")
        try:
            await host.start()
            host.spawn(self._loop)
            # A timeout that expires only if the sender is lost, so that a body does not wait for ever for a
            # version that will never come.
            async with asyncio.timeout(None) as self._body:
                if self.lost:
                    self._cut_body_short()
                yield
        except TimeoutError:
            if self._body is None or not self._body.expired():
                raise
        finally:
            self._body = None
            await host.aclose()
            self._looping = False
        if self.lost:
            raise WorkerLostError((), self.ended or "unknown")

    def _cut_body_short(self) -> None:
        if self._body is not None:
            self._body.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Run the receiver loop in this task until the sender has gone."""
        self._claim_loop()
        try:
            await self._loop()
        finally:
            self._looping = False

    def check_open(self) -> None:
        """Check that this endpoint can be used here.

        Raises:
            NotConnectedError: it is not connected, or has been closed.
            WrongEventLoopError: it lives on another event loop.
        """
        if self._closed or not self.applier.ready:
            raise NotConnectedError("connect() first: this receiver is not connected")
        self.home.check()

    def _claim_loop(self) -> None:
        self.check_open()
        if self._looping:
            raise NotConnectedError("the receiver loop runs already; one is enough")
        self._looping = True

    async def _loop(self) -> None:
        async with self._taker:
            while True:
                while await self._await_next():
                    await self._advance()
                if not await self._come_back():
                    return

    async def _await_next(self) -> bool:
        self._idle = True
        try:
            return await self._await_held()
        finally:
            self._idle = False

    def _take_at_once(self) -> bool:
        """Apply the pending update synchronously if no step needs to await. Return whether it is done.

        Called while the receiver loop waits, to save waking it.
        """
        pending = self._pending
        if pending is None or pending.update.version <= self.applier.version:
            return False
        try:
            if not self.applier.take_at_once(pending):
                return False
        except BaseLostError:
            self._skip(whole=True)
        except StaleConversion:
            pending.staged = None
            return False
        except Exception as exc:  # noqa: BLE001 - sent to the sender as a refusal
            self._refuse(exc)
        else:
            self._answer(pending)
        return True

    async def receive(self, deadline: Deadline) -> Mapping[str, Tensor] | None:
        """The weights of an update that no call before has returned, once they are in service, or None if
        none came in time.

        Beside the receiver loop this only waits; without it, this is what takes an update in.

        Raises:
            WorkerLostError: the sender has gone, and nothing more will come.
        """
        self.check_open()
        before = self._returned
        try:
            await asyncio.sleep(0)  # lets an update that has arrived be found even with a timeout of zero
            async with asyncio.timeout(deadline.remaining()):
                while self._stats.updates == before:
                    if self._closed or (self.ended is not None and self._pending is None):
                        raise WorkerLostError((), self.ended or "this side has closed the connection")
                    if self._looping:
                        await self._await_commit()
                    else:
                        await self._take_one(before)
        except TimeoutError:
            pass
        self._returned = self._stats.updates
        return self.weights if self._returned != before else None

    async def _await_commit(self) -> None:
        self._committed.clear()
        await self._committed.wait()

    async def _take_one(self, before: int) -> None:
        async with self._taker:
            if self._stats.updates != before or self._looping:
                return
            if await self._await_held():
                await self._advance()
            else:
                await self._come_back()

    async def _await_held(self) -> bool:
        """Wait for an update. Return False when the sender has gone."""
        try:
            while self._pending is None:
                if self.ended is not None or self._connection.down or self._closed:
                    return False
                if not self.applier.may_fetch:
                    await self.applier.make_room()
                    self._connection.session.have = min(self._connection.session.have, self.applier.have)
                    continue
                self._changed.clear()
                self._connection.session.wanting = True
                self._connection.flush()
                await self._changed.wait()
        finally:
            self._connection.session.wanting = False
        return True

    async def _advance(self) -> Exception | None:
        """Stage and commit the pending update, and answer the sender. Return the error if it was refused."""
        pending = self._pending
        assert pending is not None
        if self.lost or self._connection.down:
            # The sender may have written over the update's memory by now, so its values cannot be used.
            self._pending = None
            return None
        if pending.update.version <= self.version:
            self.applier.forget()
            self._answer(pending)
            return None
        if pending.staged is None and pending.update.joint is None and self._connection.session.superseded:
            self._skip()
            return None
        try:
            if not self.applier.has_staged(pending):
                pending.staged = None
                await self.applier.stage(pending)
                if self.lost or self._connection.down:
                    self._pending = None
                    return None
            await self.applier.commit(pending, self._held_up)
        except (Overtaken, BaseLostError) as exc:
            self._skip(whole=isinstance(exc, BaseLostError))
            return None
        except StaleConversion:
            pending.staged = None  # the bytes that it was staged from are still here
            return None
        except Exception as exc:  # noqa: BLE001 - sent to the sender as a refusal
            if self._closed or (pending.staged is None and (self.lost or self._connection.down)):
                self._pending = None
                return None
            self._refuse(exc)
            return exc
        self._answer(pending)
        return None

    def _skip(self, *, whole: bool = False) -> None:
        """Give the pending update back, to fetch a newer one; or all entries of the same one (``whole``)."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.staged is None:
            self.applier.forget()
        if not self._closed:
            self._say_what_is_here()
            if whole:
                self._connection.session.have = -1
            # Fetch at once: if the loop was not woken for this update, nothing wakes it for the next one.
            self._connection.session.wanting = self._looping and self.applier.may_fetch
            self._connection.session.skip()
            self._connection.flush()

    def _say_what_is_here(self) -> None:
        """Say in the next Fetch which version this process has, and what it can read."""
        session = self._connection.session
        session.have, session.maps = self.applier.have, self.applier.peeks

    def _held_up(self) -> None:
        """Tell the sender that the staged update waits for readers."""
        self._connection.session.staged(copied=not self.applier.needs_sender)
        self._connection.flush()
        if self._connection.session.superseded:  # since it began to be staged
            self.applier.overtake()

    def _answer(self, pending: PendingUpdate) -> None:
        """Acknowledge the pending update: it, or a newer version, is in service."""
        self._pending = None
        applier, connection = self.applier, self._connection
        if not applier.borrows:
            self._say_what_is_here()
        wanting = self._looping and applier.may_fetch
        connection.session.applied(applier.version, pending.seconds, wanting=wanting)
        connection.transport.flush(connection.session)
        # The sender waits for the answer, and nothing below can fail.
        if pending.committed:
            self._count(pending)
        self._committed.set()
        if pending.committed and self._events.hooks:
            self._emit("committed", seconds=pending.seconds)

    def _count(self, pending: PendingUpdate) -> None:
        stats = self._stats
        stats.updates += 1
        stats.nbytes += self.applier.nbytes
        if self._served >= 0:
            stats.skipped += max(0, pending.update.version - self._served - 1)
        self._served = pending.update.version
        stats.add_phases(pending.seconds)

    def _refuse(self, error: Exception) -> None:
        """Refuse the pending update, with the error."""
        pending, self._pending = self._pending, None
        assert pending is not None
        if pending.update.joint is not None:
            give_up(
                pending.update.joint.id, self.worker_idx, f"the part of {self.model_id!r} failed: {error}"
            )
        self._say_what_is_here()
        self._connection.session.refused(nack_of(pending.update.version, error))
        self._tell_failure(error)

    def _tell_failure(self, error: Exception) -> None:
        self._stats.failures += 1
        self._connection.flush()
        self._committed.set()
        self._emit("failed", message=str(error))

    # -- close --------------------------------------------------------------------------------------

    async def wait_closed(self) -> None:
        """Wait until the sender has gone, however long that takes."""
        self.home.check()
        while self.ended is None and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        """Disconnect and release everything; idempotent. The model keeps its version in its own memory."""
        if self._closed:
            return
        if self.home.closed:
            self._closed = True
            self._connection.abandon_loop()
            self.applier.abandon_loop()
        self.home.check()
        self._closed = True
        await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        await self._calls.stop()
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        pending = self._pending
        await self.applier.close()
        if pending is not None and pending.committed and self._pending is pending:
            self._answer(pending)  # cancelled between the commit and the answer, for which the sender waits
        elif pending is not None and pending.update.joint is not None:
            give_up(pending.update.joint.id, self.worker_idx, "the receiver has closed")
        await self._connection.aclose("the worker has closed")
        self._changed.set()
        self._committed.set()
        self._emit("closed")

    def _emit(
        self, kind: EventKind, *, seconds: Mapping[str, float] | None = None, message: str = ""
    ) -> None:
        self._events.emit(
            kind, self.model_id, self.version, self.worker_idx, seconds=seconds, message=message
        )
