"""The receiver: applies the sender's updates. All schemes have this one receiver loop.

Frames are handled as they arrive, on the event loop that ``connect`` ran on. They only change which update
is *pending*. The receiver loop waits for a pending update, which leaves nothing behind if it is cancelled,
and has it staged and committed (see :mod:`aiosync.receiver.update_handler` for cancellations there).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint
from aiosync._home_loop import HomeLoop
from aiosync._open_calls import OpenCalls
from aiosync._options import OnSenderClose
from aiosync.errors import (
    NotConnectedError,
    ProtocolError,
    WorkerLostError,
)
from aiosync.events import EventSource, SchemeStats, logger
from aiosync.protocol.events import Aborted, Left, Recalled, UpdateArrived
from aiosync.protocol.frames import Frame
from aiosync.receiver.applier import WeightApplier
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.connector import Connector
from aiosync.receiver.joint_commit import give_up
from aiosync.receiver.listeners import UpdateListener
from aiosync.receiver.reporter import ReceiverReporter
from aiosync.receiver.update_handler import UpdateHandler
from aiosync.receiver.updates import Applier
from aiosync.transports._offload import uninterrupted
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import Transport
from aiosync.weights.target import WeightTarget

__all__ = ["WeightReceiver"]


class WeightReceiver(Endpoint):
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
        applier: Applier,
        model_id: str | None,
        worker_idx: int,
        make_transport: Callable[[], Transport],
        token: bytes,
        *,
        reconnect_for: float = 0.0,
        on_sender_close: OnSenderClose | None = None,
        events: EventSource,
    ) -> None:
        self.applier = applier
        self.ended = None
        self.lost = False
        self._on_sender_close = on_sender_close
        connection = self._connection = SenderConnection(make_transport, token, model_id, worker_idx)
        reporter = self._reporter = ReceiverReporter(events, model_id, applier, connection)
        handler = self._handler = UpdateHandler(applier, connection, reporter, events)
        self._connector = Connector(
            applier, connection, handler, reporter, reconnect_for, self._start_reading
        )
        # Reconnects after the connection was lost. A task of its own, so that the timeout of a receive()
        # does not cut an attempt short.
        self._search: asyncio.Task[bool] | None = None
        # The number of updates when receive() returned last.
        self._returned = 0
        # Set by each event that a waiting receiver loop has to look at.
        self._changed = asyncio.Event()
        # Whether the receiver loop waits for an update.
        self._idle = False
        # Held by the task that applies updates: the receiver loop, or receive().
        self._taker = asyncio.Lock()
        # Expires if the sender is lost, to cancel the body of receiving().
        self._body: asyncio.Timeout | None = None
        self._closed = False
        self._calls = OpenCalls()
        # Whether a lost connection is replaced.
        self._settled = False
        self.home = HomeLoop("this receiver")

    @property
    def version(self) -> int:
        """The version in service, -1 before ``connect``."""
        return self.applier.version

    @property
    def stats(self) -> SchemeStats:
        """This endpoint's figures."""
        stats = self._handler.stats
        stats.memory = self.applier.memory
        return stats

    @property
    def worker_idx(self) -> int:
        """This worker's index; -1: the sender has not assigned one yet."""
        return self._connection.worker

    @property
    def transport(self) -> Transport:
        """The connection to the sender."""
        return self._connection.transport

    @property
    def weights_in_use(self) -> Mapping[str, Tensor] | None:
        return self.applier.weights or None

    def check_alive(self) -> None:
        self.home.check_alive()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors in service, name -> tensor; read only."""
        return self.applier.weights

    @property
    def model_applier(self) -> WeightApplier:
        """The applier of a receiver that applies updates to a model, as all but a relay's do."""
        assert isinstance(self.applier, WeightApplier)
        return self.applier

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
                await self._settle_in(deadline)
            self._returned = self._handler.stats.updates
        except TimeoutError as exc:
            await self.aclose()
            hint = self.transport.trouble or "the sender did not answer"
            raise deadline.error("connect", hint=hint) from exc
        except BaseException:
            await self.aclose()
            raise

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
        """Reconnect if the connection was lost. Return whether there is a connection again."""
        search = self._search
        if search is None or search.done():
            if not self._connection.down or self._closed or self.ended is not None:
                return False
            search = self._search = asyncio.create_task(self._find_sender(), name="aiosync-reconnecting")
        await asyncio.wait([search])
        return not search.cancelled() and search.result()

    async def _find_sender(self) -> bool:
        failure = await self._connector.find_sender()
        if failure:
            self._end(failure, lost=True)
        return not failure

    def _start_reading(self) -> None:
        self._settled = True  # from now on a lost connection is replaced
        self._connection.start(self, lambda: self._lose("its process has ended"))

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
                    self._handler.arrived(update)
                case Recalled():
                    self._handler.tell_state()
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
        if not (self._idle and self._handler.take_at_once()):
            self._changed.set()

    def connection_lost(self, reason: str) -> None:
        """Handle the loss of the connection."""
        self._lose(reason)

    def _sender_closed(self, reason: str) -> None:
        if self._on_sender_close == "wait":
            self._lose(reason)
            return
        if self._handler.looping and self.ended is None:
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
        if self._connector.seconds <= 0 or not self._settled:
            self._end(reason, lost=True)
        elif self.ended is None and not self._connection.down:
            self._connection.down = reason
            self._handler.give_up_joint(f"the connection ended: {reason}")
            self.applier.disconnected()
            self._changed.set()
            logger.warning(
                "worker %d has lost the sender (%s); it goes on with version %d and tries to connect again",
                self.worker_idx,
                reason,
                self.version,
            )
            self._reporter.emit("lost", message=reason)

    def _end(self, reason: str, *, lost: bool) -> None:
        if self.ended is None:
            self.ended, self.lost = reason, lost
            self._handler.give_up_joint(f"the connection ended: {reason}")
            self._changed.set()
            self._handler.answered.set()
            if lost:
                self._connection.down = self._connection.down or reason
                self._cut_body_short()
                self._reporter.emit("lost", message=reason)

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
            self._handler.looping = False
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
            self._handler.looping = False

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
        if self._handler.looping:
            raise NotConnectedError("the receiver loop runs already; one is enough")
        self._handler.looping = True

    async def _loop(self) -> None:
        async with self._taker:
            while True:
                while await self._await_next():
                    await self._handler.advance()
                if not await self._come_back():
                    return

    async def _await_next(self) -> bool:
        self._idle = True
        try:
            return await self._await_pending()
        finally:
            self._idle = False

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
                while self._handler.stats.updates == before:
                    if self._closed or (self.ended is not None and self._handler.pending is None):
                        raise WorkerLostError((), self.ended or "this side has closed the connection")
                    if self._handler.looping:
                        await self._await_commit()
                    else:
                        await self._take_one(before)
        except TimeoutError:
            pass
        self._returned = self._handler.stats.updates
        return self.weights if self._returned != before else None

    async def _await_commit(self) -> None:
        self._handler.answered.clear()
        await self._handler.answered.wait()

    async def _take_one(self, before: int) -> None:
        async with self._taker:
            if self._handler.stats.updates != before or self._handler.looping:
                return
            if await self._await_pending():
                await self._handler.advance()
            else:
                await self._come_back()

    async def _await_pending(self) -> bool:
        """Wait for an update. Return False when the sender has gone."""
        connection = self._connection
        try:
            while self._handler.pending is None:
                if self.ended is not None or connection.down or self._closed:
                    return False
                if not self.applier.may_fetch:
                    await self.applier.make_room()
                    connection.session.have = min(connection.session.have, self.applier.have)
                    continue
                self._changed.clear()
                connection.session.wanting = True
                connection.flush()
                await self._changed.wait()
        finally:
            connection.session.wanting = False
        return True

    # -- close --------------------------------------------------------------------------------------

    def pinned(self, deadline: Deadline) -> AbstractAsyncContextManager[int]:
        """See :meth:`WeightApplier.pinned`."""
        self.check_open()
        return self.model_applier.pinned(deadline)

    async def rebind(self, model: WeightTarget | None, listener: UpdateListener, *, may_view: bool) -> None:
        """See :meth:`WeightApplier.rebind`."""
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
            self._connection.abandon_loop()
            self.applier.abandon_loop()
        self.home.check()
        self._closed = self._handler.closed = True
        await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        await self._calls.stop()
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        await self._handler.close()
        await self._connection.aclose("the worker has closed")
        self._changed.set()
        self._handler.answered.set()
        self._reporter.emit("closed")
