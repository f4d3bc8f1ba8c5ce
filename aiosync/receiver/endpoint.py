"""The receiver: applies the sender's updates. All schemes have this one receiver loop.

Frames are handled as they arrive, on the event loop that ``connect`` ran on. They only change which update
is *pending*. The receiver loop waits for a pending update, which leaves nothing behind if it is cancelled,
and has it staged and committed (see :mod:`aiosync.receiver.update_handler` for cancellations there).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from logging import INFO, WARNING

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._endpoint import HomeLoop, OpenCalls
from aiosync._options import OnSenderClose
from aiosync.errors import NotConnectedError, ProtocolError, WorkerLostError
from aiosync.events import EventSource, logger
from aiosync.protocol.frames import Abort, Bye, Cut, Frame, Interrupt, Update
from aiosync.receiver.calls import ReceivingEndpoint
from aiosync.receiver.connection import Connector, SenderConnection
from aiosync.receiver.listeners import ReceiverReporter, UpdateListener
from aiosync.receiver.update_handler import UpdateHandler
from aiosync.receiver.updates import Applier
from aiosync.stats import SchemeStats
from aiosync.transports._offload import uninterrupted
from aiosync.transports._tasks import BackgroundTasks, is_cancelled
from aiosync.transports.base import FramedTransport
from aiosync.weights.target import WeightTarget


class WeightReceiver(ReceivingEndpoint):
    """The live receiving endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        applier: applies updates; this endpoint closes it.
        model_id: the sender's name of the model.
        worker_idx: this worker's index; -1: the sender chooses one.
        make_transport: makes a transport to the sender, not open yet.
        token: the secret that the sender must know.
        reconnect_for: seconds for which to reconnect after the connection was lost.
        on_sender_close: ``"wait"``: if the sender closes in order, reconnect as if the connection was lost.
            ``"stop"``: end, with a WARNING. None: end.
        events: gets what happens.
    """

    def __init__(
        self,
        applier: Applier,
        model_id: str | None,
        worker_idx: int,
        make_transport: Callable[[], FramedTransport],
        token: bytes,
        *,
        reconnect_for: float = 0.0,
        on_sender_close: OnSenderClose | None = None,
        events: EventSource,
    ) -> None:
        self.applier = applier
        # Whether the sender ended without a goodbye, or dropped this worker, or the receiver loop has failed.
        self.lost = False
        # What the receiver loop has failed with.
        self._failure: BaseException | None = None
        self._on_sender_close = on_sender_close
        connection = self._connection = SenderConnection(make_transport, token, model_id, worker_idx)
        reporter = self._reporter = ReceiverReporter(events, model_id, applier, connection)
        handler = self._handler = UpdateHandler(applier, connection, reporter, events)
        begin, give_up = self._start_reading, partial(self._end, lost=True)
        self._connector = Connector(applier, connection, handler, reporter, reconnect_for, begin, give_up)
        self._returned = 0  # the number of updates when receive() returned last
        # Set by each event that a waiting receiver loop has to look at.
        self._changed = asyncio.Event()
        self._idle = False  # whether the receiver loop waits for an update
        # Held by the task that applies updates: the receiver loop, or receive().
        self._taker = asyncio.Lock()
        # The scope of the body of receiving(). It expires only if the sender is lost.
        self._body: asyncio.Timeout | None = None
        self._closed = False
        self._calls = OpenCalls()
        # Whether a lost connection is replaced.
        self._settled = False
        self.home = HomeLoop("this receiver")

    @property
    def stats(self) -> SchemeStats:
        stats = self._handler.stats
        stats.memory = self.applier.memory
        return stats

    @property
    def worker_idx(self) -> int:
        """This worker's index; -1: the sender has not assigned one yet."""
        return self._connection.worker

    @property
    def transport(self) -> FramedTransport:
        """The connection to the sender."""
        return self._connection.transport

    def check_alive(self) -> None:
        self.home.check_alive()

    # -- connect ----------------------------------------------------------------------------------

    async def connect(self, deadline: Deadline) -> None:
        """Connect to the sender and apply its newest version.

        Raises:
            WorkerLostError: there is no sender.
            NotConnectedError: this receiver was closed meanwhile.
            HandshakeError: the sender refused this worker.
            LayoutMismatchError: its weights do not fit the model. The sender gets the same error.
            SyncTimeoutError: the sender did not answer in time.
        """
        self.home.enter()
        try:
            async with self._calls.call(deadline.remaining()):
                await self._settle_in(deadline)
            self._returned = self._handler.stats.updates
        except BaseException as exc:
            await self.aclose()
            if not isinstance(exc, TimeoutError):
                raise
            hint = self.transport.trouble or "the sender did not answer"
            raise deadline.error("connect", hint=hint) from exc

    async def _settle_in(self, deadline: Deadline) -> None:
        await self._connector.join(deadline)
        while self.version < 0:
            if await self._await_pending():
                error = await self._handler.advance()
                if error is not None:
                    raise error
            elif not await self._come_back():
                raise WorkerLostError((), self.ended or "unknown")
        await self.applier.reserve()
        self._reporter.emit("connected")

    async def _come_back(self) -> bool:
        lost = self._connection.down and not self._closed and self.ended is None
        return bool(lost or self._connector.searching) and await self._connector.come_back()

    def _start_reading(self) -> None:
        self._settled = True  # from now on a lost connection is replaced
        self._connection.start(self, lambda: self.connection_lost("its process has ended"))

    # -- the transport's sink -----------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Handle a frame from the sender."""
        if self._closed:
            return  # nothing is applied any more; the Bye says so
        session = self._connection.session
        try:
            events = session.receive(frame)
        except ProtocolError as exc:
            self._connection.break_off(str(exc))
            raise
        for event in events:
            match event:
                case Update():
                    self._handler.arrived(event)
                case Bye(reason=reason, replaced=True):
                    self._end(reason, lost=True)
                case Bye(reason=reason, dropped=True):
                    self.connection_lost(reason)
                case Bye(reason=reason):
                    self._sender_closed(reason or "the sender has closed")
                case Cut():
                    self._handler.refresh_fetch()
                case Interrupt():
                    self._handler.interrupted("another worker of the broadcast was lost")
                case Abort(joint=joint):
                    self.applier.abort(joint, self._connection.worker)
        if session.outgoing:
            self._connection.flush()
        if session.superseded:
            self.applier.overtake()
        if not (self._idle and self._handler.take_at_once()):
            self._changed.set()

    def _sender_closed(self, reason: str) -> None:
        if self._on_sender_close == "wait":
            self.connection_lost(reason)
            return
        if self._handler.looping and self.ended is None:
            self._reporter.sender_closed(reason, level=WARNING if self._on_sender_close == "stop" else INFO)
        self._end(reason, lost=False)

    def connection_lost(self, reason: str) -> None:
        """Handle the loss of the connection: reconnect if that is wanted, else end."""
        if self._connector.seconds <= 0 or not self._settled:
            self._end(reason, lost=True)
        elif self.ended is None and not self._connection.down:
            self._connection.down = reason
            self._handler.give_up_joint(f"the connection ended: {reason}")
            self._handler.interrupted(reason)
            self.applier.disconnected()
            self._changed.set()
            self._reporter.disconnected(reason)

    def _end(self, reason: str, *, lost: bool) -> None:
        if self.ended is None:
            self.ended, self.lost = reason, lost
            self._handler.give_up_joint(f"the connection ended: {reason}")
            self.applier.disconnected()
            self._changed.set()
            self._handler.answered.set()
            if lost:
                self._connection.down = self._connection.down or reason
                self._handler.interrupted(reason)
                self._cancel_body()
                self._reporter.emit("lost", message=reason)

    # -- the receiver loop --------------------------------------------------------------------------

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Run the receiver loop beside the body.

        When the sender says goodbye the loop ends, the body continues and the model keeps its version.

        Raises:
            NotConnectedError: not connected, or the loop runs already.
            WorkerLostError: the sender was lost or dropped this worker, or the loop failed; cancels the body.
        """
        # Not a task group around the body: an exception of the body would come out in an exception group.
        host = BackgroundTasks("aiosync-receiving")
        with self._claimed_loop():
            try:
                await host.start()
                host.spawn(self._loop)
                async with asyncio.timeout(None) as self._body:
                    if self.lost:
                        self._cancel_body()
                    yield
            except TimeoutError:  # of the body itself, or because the sender is lost
                if self._body is None or not self._body.expired():
                    raise
            finally:
                self._body = None
                await host.aclose()
        if self.lost:
            raise WorkerLostError((), self.ended or "unknown") from self._failure

    def _cancel_body(self) -> None:
        """Cancel the body of :meth:`receiving`, which would wait for a version that will never come."""
        if self._body is not None and not self._body.expired():
            self._body.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Run the receiver loop in this task until the sender has gone; :attr:`lost` says how."""
        with self._claimed_loop():
            await self._loop()

    def check_open(self) -> None:
        """Check that this endpoint can be used here.

        Raises:
            NotConnectedError: it is not connected, or has been closed.
            WrongEventLoopError: it lives on another event loop.
        """
        if self._closed or self.applier.inbound is None:
            raise NotConnectedError("connect() first: this receiver is not connected")
        self.home.check()

    @contextmanager
    def _claimed_loop(self) -> Iterator[None]:
        self.check_open()
        if self._handler.looping:
            raise NotConnectedError("the receiver loop runs already; one is enough")
        self._handler.looping = True
        try:
            yield
        finally:
            self._handler.looping = False

    async def _loop(self) -> None:
        """Apply updates until the sender has gone. If that fails, this receiver is lost to the sender."""
        try:
            async with self._taker:
                while True:
                    while await self._await_pending(idle=True):
                        await self._handler.advance()
                    if not await self._come_back():
                        return
        except (Exception, asyncio.CancelledError) as exc:
            if is_cancelled(exc):
                raise
            logger.exception("worker %d: the receiver loop has failed", self.worker_idx)
            self._failure, self.ended = exc, None  # the sender may have closed in order before
            reason = f"the worker's receiver loop has failed: {exc!r}"
            self._end(reason, lost=True)
            self._connection.break_off(reason)

    async def receive_until(self, deadline: Deadline) -> Mapping[str, Tensor] | None:
        """Wait for an update that no earlier call has returned. Return the weights in service, or None if no
        update came in time.

        Beside the receiver loop this only waits. Without the loop, this applies the update.

        Raises:
            WorkerLostError: the sender has gone, and no update will come.
        """
        self.check_open()
        before = self._returned
        try:
            await asyncio.sleep(0)  # lets an update that has arrived be found even with a timeout of zero
            async with asyncio.timeout(deadline.remaining()):
                while self._handler.stats.updates == before:
                    ended = self.ended is not None and self._handler.pending is None
                    if self._closed or ended or self._failure is not None:
                        raise WorkerLostError((), self.ended or "this side has closed the connection")
                    if self._handler.looping:
                        self._handler.answered.clear()
                        await self._handler.answered.wait()
                    else:
                        await self._take_one(before)
        except TimeoutError:
            pass
        self._returned = self._handler.stats.updates
        return self.weights if self._returned != before else None

    async def _take_one(self, before: int) -> None:
        async with self._taker:
            if self._handler.stats.updates != before or self._handler.looping:
                return
            if await self._await_pending():
                await self._handler.advance()
            else:
                await self._come_back()

    async def _await_pending(self, *, idle: bool = False) -> bool:
        """Wait for an update. Return False when the sender has gone.

        ``idle``: the receiver loop waits, so that an update may be applied as soon as its frame arrives.
        """
        connection, self._idle = self._connection, idle
        try:
            while self._handler.pending is None:
                if self.ended is not None or connection.down or self._closed:
                    return False
                applier, session = self.applier, connection.session
                if not applier.may_fetch and (session.due or applier.has_room):
                    await applier.make_room()
                    session.have = min(session.have, applier.have)
                    continue
                self._changed.clear()
                session.wanting = applier.may_fetch
                connection.flush()
                await self._changed.wait()
        finally:
            self._idle = False
            connection.session.wanting = False
        return True

    # -- close --------------------------------------------------------------------------------------

    def pinned(self, deadline: Deadline) -> AbstractAsyncContextManager[int]:
        """Block commits for the length of the body. Raises as ``CommitGate.pinned``."""
        self.check_open()
        return self.model_applier.gate.pinned(deadline, self.applier)

    async def rebind(self, model: WeightTarget | None, listener: UpdateListener, *, may_view: bool) -> None:
        """See ``WeightApplier.rebind``."""
        self.check_open()
        await self.model_applier.rebind(model, listener, may_view=may_view)

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
            self._closed = self._handler.closed = True
            self._handler.abandon_loop()
        self.home.check()
        self._closed = self._handler.closed = True
        await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        await self._calls.stop()
        await self._connector.aclose()
        try:
            await self._handler.close()
        finally:
            self._changed.set()
            self._handler.answered.set()
            self._reporter.emit("closed")
