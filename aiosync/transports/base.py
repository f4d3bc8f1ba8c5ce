"""What a transport is: one ordered connection to one peer, which moves frames and knows no more."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol

from aiosync._deadline import Deadline
from aiosync.errors import FrameError, ProtocolError, SyncTimeoutError, WorkerLostError
from aiosync.protocol.events import Greeted, Left, Verified, Welcomed
from aiosync.protocol.frames import Ack, Frame, Nack, Update
from aiosync.protocol.framing import FrameDecoder, Inbound, encode
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.sender_session import SenderSession
from aiosync.transports._offload import uninterrupted

__all__ = ["Listener", "Sink", "Transport"]


class Listener(ABC):
    """Where workers connect. Made with ``init_on_sender``, so that no worker can come too early.

    Attributes:
        patience: seconds that a connection may take to authenticate.
    """

    patience = 10.0

    @property
    def full(self) -> bool:
        """Whether there are more connections that have authenticated than there may be."""
        return False

    @abstractmethod
    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Call ``on_connection`` for every worker that connects, on the running loop; and ``on_lost`` for one
        that can be seen never to connect, with its index and the reason."""

    async def replace(self, ended: Transport) -> None:
        """The process at the other end of ``ended`` has died: make room for its worker to come back, where
        that takes something."""
        return

    async def lost(self, worker: int) -> None:
        """A worker is gone: have it come back, where that takes something."""
        return

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors without ending anything."""

    def stop(self) -> None:
        """Accept no more connections. Those that are open can still send a Bye."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; idempotent."""


class Sink(Protocol):
    """Where a started transport delivers, on the event loop."""

    def frame_received(self, frame: Frame) -> None:
        """One frame from the peer. Raising ``ProtocolError`` ends the connection."""

    def connection_lost(self, reason: str) -> None:
        """Called once; nothing comes after it. Not called for an end by ``aclose``."""


class Transport(ABC):
    """One connection to one peer.

    Attributes:
        peer_name: who is at the other end, for messages.
        same_machine: whether process ids mean the same on both sides.
        maps: whether the receiver can map the sender's memory.
        reached: whether the peer's machine has accepted the connection.
        secret: the token that goes with the peer, where it is found out how to get to it; else None.
        greeting: when a connection that was accepted has to have authenticated; None: the listener's patience
            counts from when it is greeted.

    It begins in inbox mode, in which frames are awaited one by one (the handshake is written so); with
    :meth:`start` it changes over to delivering them to a sink. Until :meth:`trust` is called no more
    than a few KiB are accepted from the peer.

    A subclass brings ``open``, ``_write`` and ``_close``, and calls ``_feed`` and ``_lost``.
    """

    same_machine: ClassVar[bool] = True
    maps: ClassVar[bool] = True

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._inbox: deque[Frame] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self.peer_name = "a local process"
        self.trouble = ""
        self.reached = False
        self.secret: bytes | None = None
        self.greeting: Deadline | None = None
        self._end: str | None = None
        self._breach: ProtocolError | None = None
        self._closed = False

    # -- what a subclass fills in ---------------------------------------------------------------

    @abstractmethod
    async def open(self, deadline: Deadline) -> None:
        """Make the connection, on the side that dials.

        Raises:
            WorkerLostError: no process listens there.
            SyncTimeoutError: the deadline passed.
        """

    async def reach(self, deadline: Deadline) -> Transport:
        """Open it, or a better connection to the same peer, if one was found on the way there; gives that
        which is open.

        Raises:
            As :meth:`open`.
        """
        await self.open(deadline)
        self.reached = True
        return self

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Hand ``data`` over without waiting.

        Raises:
            OSError: the connection is broken.
        """

    @abstractmethod
    async def _close(self) -> None:
        """Let go of descriptors and threads. Called once, shielded from cancellation."""

    # -- frames ---------------------------------------------------------------------------------

    @property
    def peer_pid(self) -> int:
        """The peer's process id as the operating system tells it, or 0 where it does not."""
        return 0

    def check_connection(self) -> bool:
        """Whether frames can still be moved, as far as is known without asking the peer."""
        return not self._closed and self._end is None

    def trust(self, inbound: Inbound) -> None:
        """The peer has authenticated: accept ``inbound`` from it."""
        self._decoder.inbound = inbound

    def write(self, *frames: Frame) -> None:
        """Send frames without waiting; a connection that turns out to be broken is reported lost."""
        if not self.check_connection():
            return
        try:
            self._write(encode(frames[0]) if len(frames) == 1 else b"".join(map(encode, frames)))
        except OSError as exc:
            self._lost(f"writing failed: {exc.strerror or exc}")

    def start(self, sink: Sink) -> None:
        """Deliver to ``sink`` from now on, beginning with what has arrived already."""
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
        """The next frame (inbox mode only).

        Raises:
            WorkerLostError: the peer has gone.
            ProtocolError: what it said was not our protocol.
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
                # After a turn of the loop that took longer than the deadline, the frame may be there too.
                if not self._inbox:
                    raise deadline.error("receive") from None
            finally:
                self._waiter = None
        return self._inbox.popleft()

    async def aclose(self) -> None:
        """End the connection and wait until nothing of it is left; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        # Shielded from cancellation: nothing else would close the rest. It is bounded by itself.
        await uninterrupted(lambda _: self._close())

    def abandon_loop(self) -> None:
        """The event loop that this lived on is closed: release what can be released without it."""
        self._closed = True

    # -- the words of the weight-update vocabulary -------------------------------------------------

    async def send_weights_async(self, update: Update) -> None:
        """Send an update; do not wait for the answer."""
        self.write(update)

    async def send_weights(self, update: Update, timeout: float) -> Ack | Nack:
        """Send an update and wait for the answer (inbox mode), ``timeout`` seconds at most."""
        self.write(update)
        return await self.wait_ack(timeout)

    async def wait_ack(self, timeout: float) -> Ack | Nack:
        """The next answer to an update (inbox mode), within ``timeout`` seconds.

        Raises:
            SyncTimeoutError: none came in time.
            WorkerLostError: the peer has gone.
            ProtocolError: something else came.
        """
        frame = await self.receive(Deadline.after(timeout))
        if isinstance(frame, Ack | Nack):
            return frame
        raise ProtocolError(f"expected an answer to an update, got {type(frame).__name__}")

    async def receive_weights(self, timeout: float) -> Update | None:
        """The next update (inbox mode), or None if none came within ``timeout`` seconds.

        Raises:
            WorkerLostError: the peer has gone.
            ProtocolError: something else came.
        """
        try:
            frame = await self.receive(Deadline.after(timeout))
        except SyncTimeoutError:
            return None
        if isinstance(frame, Update):
            return frame
        raise ProtocolError(f"expected an update, got {type(frame).__name__}")

    async def send_ack(self, answer: Ack | Nack) -> None:
        """Answer an update."""
        self.write(answer)

    async def setup_connection_and_weights_on_sender(
        self, session: SenderSession, deadline: Deadline
    ) -> Greeted:
        """Authenticate the worker; it then waits for its welcome, which brings the weights.

        Raises:
            HandshakeError, ProtocolError: it is not one of ours.
            WorkerLostError: it has gone.
            SyncTimeoutError: it took too long.
        """
        while True:
            frame = await self.receive(deadline)
            try:
                events = session.receive(frame)
            finally:
                self.flush(session)  # a worker that is refused hears why
            for event in events:
                if isinstance(event, Left):
                    raise WorkerLostError((), event.reason)
                if isinstance(event, Greeted):
                    self.trust(session.inbound)
                    return event

    async def setup_connection_and_weights_on_receiver(
        self, session: ReceiverSession, deadline: Deadline
    ) -> Welcomed:
        """Authenticate the sender and wait for its welcome, after which the weights can be fetched.

        Raises:
            HandshakeError: refused, or the sender does not know the token.
            WorkerLostError: the sender has gone.
            SyncTimeoutError: it did not answer in time.
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
                if isinstance(event, Verified):
                    self.trust(session.inbound)  # its welcome may be long
            self.flush(session)
            for event in events:
                if isinstance(event, Welcomed):
                    return event
                if isinstance(event, Left):
                    raise WorkerLostError((), f"it ended the handshake: {event.reason}")

    def flush(self, session: SenderSession | ReceiverSession) -> None:
        """Send what the session has to say."""
        if session.outgoing:
            self.write(*session.frames_to_send())

    # -- for subclasses ---------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Bytes have arrived."""
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
        """The connection is of no use any more. Reported once; ``aclose`` is still to come.

        ``breach``: it is the peer who did not keep to the protocol.
        """
        if self._end is not None or self._closed:
            return
        self._end, self._breach = reason, breach
        self._wake()
        if self._sink is not None:
            self._sink.connection_lost(reason)

    def _deliver(self, frame: Frame) -> None:
        """A frame has arrived. This is what happens in inbox mode."""
        if len(self._inbox) >= 16:
            raise FrameError("the peer sends frames without waiting for answers")
        self._inbox.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
