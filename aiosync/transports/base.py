"""The base classes of connections: a framed transport is one ordered connection to one peer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar, NoReturn, Protocol, TypeAlias

from aiosync._deadline import Deadline
from aiosync.errors import AlreadyConnectedError, FrameError, ProtocolError, WorkerLostError
from aiosync.protocol.frames import Accepted, Bye, Frame, Hello, Inbound, Welcome
from aiosync.protocol.framing import FrameDecoder, encode
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.sender_session import SenderSession
from aiosync.transports._offload import uninterrupted
from aiosync.transports.contract import Transport

OnConnection: TypeAlias = Callable[["FramedTransport"], None]
OnLost: TypeAlias = Callable[[int, str], None]


class Listener(ABC):
    """The sender's side of the rendezvous: accepts connections of workers.

    ``init_on_sender`` constructs it, so that workers can connect before the sender does. After that its
    methods are called in this order: ``listen``; ``lost`` and ``replace`` when a worker disconnects;
    ``stop``; ``close``.
    """

    patience = 10.0  # seconds that a connection may take to authenticate

    @property
    def full(self) -> bool:
        """Whether there are more authenticated connections than allowed."""
        return False

    @abstractmethod
    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        """Start to accept connections.

        Args:
            on_connection: called on the running loop with the transport of each worker that connects.
            on_lost: called with a worker's index and the reason if that worker cannot connect any more.
        """

    async def replace(self, ended: FramedTransport) -> None:
        """Called when the process at the other end of ``ended`` has died.

        Override it if a respawned worker needs new resources to connect.
        """
        return

    async def lost(self, worker: int) -> None:
        """Called with a worker's index when the worker disconnects. Override it to restart the worker."""
        return

    @abstractmethod
    def forget(self) -> None:
        """Close this process's copies of the descriptors, in a forked child. The parent's stay open."""

    def stop(self) -> None:
        """Accept no more connections. Open connections can still send a Bye."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release all resources; idempotent."""


class Sink(Protocol):
    """Gets the frames of a started transport, on the event loop."""

    def frame_received(self, frame: Frame) -> None:
        """Called with each frame from the peer. Raise ``ProtocolError`` to end the connection."""

    def connection_lost(self, reason: str) -> None:
        """Called once when the connection is lost, as the last call. Not called after ``aclose``."""


class FramedTransport(Transport):
    """One connection to one peer, which a scheme owns.

    Life cycle: ``open`` on the side that dials; the handshake, in which frames are awaited one by one
    (``receive``); ``trust`` when the peer has authenticated, until which the peer may send only a few KiB;
    ``start``, after which frames are delivered to a sink; ``aclose``.

    A subclass implements ``open``, ``_write`` and ``_close``. It calls ``_feed`` with the bytes that arrive,
    and ``_lost`` when the connection breaks.

    Attributes:
        peer_name: a name of the peer, for messages.
        same_machine: whether process ids mean the same on both sides.
        maps: whether the receiver can map the sender's memory.
        trouble: why the connection has not been made so far, for the error of a timeout.
        reached: whether the peer's machine has accepted the connection.
        secret: the sender's token, if the rendezvous supplied one; else None.
        greeting: deadline for the authentication of an accepted connection. None: the listener's patience
            starts when the connection is passed to ``on_connection``.
    """

    same_machine: ClassVar[bool] = True
    maps: ClassVar[bool] = True
    # Whether take_arrived() looks for frames.
    takes_arrived: ClassVar[bool] = False

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._inbox: deque[Frame] = deque()
        self._waiter: asyncio.Future[None] | None = None  # what ``receive`` waits on
        self._sink: Sink | None = None  # None before ``start``
        self.peer_name = "a local process"
        self.trouble = ""
        self.reached = False
        self.secret: bytes | None = None
        self.greeting: Deadline | None = None
        self._end: str | None = None  # why the connection was lost; None: it was not
        self._breach: ProtocolError | None = None  # set if it was lost because the peer broke the protocol
        self._closed = False

    # -- implemented by subclasses --------------------------------------------------------------

    @abstractmethod
    async def open(self, deadline: Deadline) -> None:
        """Connect to the peer. Called on the side that dials.

        Raises:
            WorkerLostError: no process listens at the address.
            SyncTimeoutError: the deadline passed.
        """

    async def reach(self, deadline: Deadline) -> FramedTransport:
        """Open this connection, or a faster one to the same peer; returns the open one.

        Raises:
            Exception: as :meth:`open`.
        """
        await self.open(deadline)
        self.reached = True
        return self

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Send ``data`` without blocking.

        Raises:
            OSError: the connection is broken.
        """

    @abstractmethod
    async def _close(self) -> None:
        """Release descriptors and threads. Called once, shielded from cancellation."""

    # -- frames ---------------------------------------------------------------------------------

    @property
    def peer_pid(self) -> int:
        """The peer's process id as the operating system reports it; 0 if unknown."""
        return 0

    def check_connection(self) -> bool:
        """Return whether the connection is open, as far as is known without a round trip."""
        return not self._closed and self._end is None

    def take_arrived(self) -> bool:
        """Handle what has arrived, without waiting until the event loop finds it. Return whether there was
        anything.

        A transport may leave it to the event loop, and return False.
        """
        return False

    def trust(self, inbound: Inbound) -> None:
        """Accept the frames of ``inbound`` from now on: the peer has authenticated."""
        self._decoder.inbound = inbound

    def write(self, *frames: Frame) -> None:
        """Send frames without blocking. If the connection is broken, it is reported as lost."""
        if not self.check_connection():
            return
        try:
            self._write(encode(frames[0]) if len(frames) == 1 else b"".join(map(encode, frames)))
        except OSError as exc:
            self._lost(f"writing failed: {exc.strerror or exc}")

    def start(self, sink: Sink) -> None:
        """Deliver frames to ``sink`` from now on, including those that have arrived already."""
        self._sink = sink
        self._deliver = sink.frame_received  # type: ignore[method-assign]
        while self._inbox:
            try:
                self._deliver(self._inbox.popleft())
            except ProtocolError as exc:
                self._lost(str(exc), exc)
                return
        if self._end is not None and not self._closed:
            sink.connection_lost(self._end)

    async def receive(self, deadline: Deadline) -> Frame:
        """Wait for the next frame. Only before :meth:`start`.

        Raises:
            WorkerLostError: the connection was lost or closed.
            ProtocolError: the peer broke the protocol.
            SyncTimeoutError: the deadline passed.
        """
        while not self._inbox:
            if self._breach is not None:
                raise self._breach
            if self._end is not None or self._closed:
                raise WorkerLostError((), self._end or "this side has closed the connection")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await self._waiter
            except TimeoutError:
                # If one callback of the loop took longer than the deadline, the frame may have arrived too.
                if not self._inbox:
                    raise deadline.error("receive") from None
            finally:
                self._waiter = None
        return self._inbox.popleft()

    async def aclose(self) -> None:
        """End the connection and wait until its descriptors and threads are released; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        # Shielded from cancellation: no other code would release the rest. _close is bounded in time.
        await uninterrupted(lambda _: self._close())

    def abandon_loop(self) -> None:
        """Release what can be released without the event loop, which is closed."""
        self._closed = True

    # -- torchrl's vocabulary: a scheme owns this connection ----------------------------------------

    async def send_weights(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. Call ``scheme.send()``."""
        raise _used_by_scheme("send_weights", "send")

    async def send_weights_async(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. Call ``scheme.send(wait=False)``."""
        raise _used_by_scheme("send_weights_async", "send")

    async def wait_ack(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. Call ``scheme.wait_ack()``."""
        raise _used_by_scheme("wait_ack", "wait_ack")

    async def receive_weights(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. Call ``scheme.receive()``."""
        raise _used_by_scheme("receive_weights", "receive")

    async def send_ack(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. ``scheme.receive()`` acknowledges."""
        raise _used_by_scheme("send_ack", "receive")

    async def setup_connection_and_weights_on_sender(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. Call ``scheme.connect()``."""
        raise _used_by_scheme("setup_connection_and_weights_on_sender", "connect")

    async def setup_connection_and_weights_on_receiver(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise AlreadyConnectedError: a scheme uses this connection. Call ``scheme.connect()``."""
        raise _used_by_scheme("setup_connection_and_weights_on_receiver", "connect")

    # -- the handshake --------------------------------------------------------------------------------

    async def authenticate_worker(self, session: SenderSession, deadline: Deadline) -> Hello:
        """Authenticate the worker, which then waits for its Welcome.

        Raises:
            HandshakeError: the worker does not know the token.
            ProtocolError: the worker broke the protocol.
            WorkerLostError: the connection was lost.
            SyncTimeoutError: the deadline passed.
        """
        while True:
            frame = await self.receive(deadline)
            try:
                events = session.receive(frame)
            finally:
                self.flush(session)  # sends the reason to a refused worker
            for event in events:
                if isinstance(event, Bye):
                    raise WorkerLostError((), event.reason)
                if isinstance(event, Hello):
                    self.trust(session.inbound)
                    return event

    async def authenticate_sender(self, session: ReceiverSession, deadline: Deadline) -> Welcome:
        """Authenticate the sender and wait for its Welcome. After that the worker may fetch the weights.

        Raises:
            HandshakeError: the sender refused this worker, or does not know the token.
            WorkerLostError: the connection was lost.
            SyncTimeoutError: the deadline passed.
        """
        self.flush(session)
        while True:
            try:
                frame = await self.receive(deadline)
            except WorkerLostError as exc:
                raise WorkerLostError(
                    (),
                    f"{exc.reason} in the handshake; if it has a log, that says why (another TLS or token?)",
                ) from exc
            events = session.receive(frame)
            for event in events:
                if isinstance(event, Accepted):
                    self.trust(session.inbound)  # the Welcome may be longer than a greeting
            self.flush(session)
            for event in events:
                if isinstance(event, Welcome):
                    return event
                if isinstance(event, Bye):
                    raise WorkerLostError((), f"it ended the handshake: {event.reason}")

    def flush(self, session: SenderSession | ReceiverSession, *, more: bool = False) -> None:
        """Send the session's outgoing frames. ``more``: the body of an update follows at once.

        A connection that carries bodies then keeps the frames, and sends them together with the body.
        """
        if session.outgoing:
            frames = tuple(session.outgoing)
            session.outgoing.clear()
            self.write(*frames)

    def hand_over(self) -> None:
        """Do not wait for the end of the loop's turn with what was flushed and is sent by a thread."""

    # -- for subclasses ---------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Decode bytes that have arrived, and deliver the frames."""
        try:
            alone = self._decoder.alone(data)
            if alone is not None:
                self._deliver(alone)
                return
            for frame in self._decoder.feed(data):
                self._deliver(frame)
                if not self.check_connection():
                    return
        except ProtocolError as exc:
            self._lost(str(exc), exc)

    def _lost(self, reason: str, breach: ProtocolError | None = None) -> None:
        """Report the connection as lost, once. ``aclose`` still has to be called.

        ``breach`` is set if the peer broke the protocol.
        """
        if self._end is not None or self._closed:
            return
        self._end, self._breach = reason, breach
        self._wake()
        if self._sink is not None:
            self._sink.connection_lost(reason)

    def _deliver(self, frame: Frame) -> None:
        """Queue a frame for ``receive``. :meth:`start` replaces this method by the sink's."""
        if len(self._inbox) >= 16:
            raise FrameError("the peer sends frames without waiting for answers")
        self._inbox.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _used_by_scheme(method: str, instead: str) -> AlreadyConnectedError:
    return AlreadyConnectedError(
        f"a scheme uses this connection, and {method}() would break it: call scheme.{instead}() instead"
    )
