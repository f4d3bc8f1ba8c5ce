"""Connections over TCP and Unix sockets that carry the weights, and the side that dials."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from aiosync._deadline import Deadline, pauses
from aiosync.errors import HandshakeError, ProtocolError, WorkerLostError
from aiosync.protocol.frames import Frame, Inbound
from aiosync.protocol.framing import encode
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.sender_session import SenderSession
from aiosync.protocol.stream import BodySink
from aiosync.transports._loop_thread import LoopThread
from aiosync.transports._offload import abandonable
from aiosync.transports.base import FramedTransport
from aiosync.transports.sockets import credentials, tune
from aiosync.transports.tcp.address import Address
from aiosync.transports.tcp.pace import Pace
from aiosync.transports.tcp.socket_thread import SocketThread
from aiosync.transports.tcp.socket_writer import Body
from aiosync.transports.tcp.tls import TLSConfig, TLSLayer

logger = logging.getLogger("aiosync")

_ATTEMPT = 5.0  # seconds that an attempt to connect to one of a host's addresses may take


class TCPConnection(FramedTransport):
    """A TCP or Unix socket to one peer."""

    # Even on loopback the peer's process id may mean nothing here: containers may share the loopback
    # interface and not the process ids. The kernel gives the process id of a Unix socket's peer.
    same_machine = False
    maps = False

    def __init__(self) -> None:
        super().__init__()
        self.silent = True  # whether no frame has arrived yet
        self._socket: SocketThread | None = None  # None before the socket is connected
        self._peer_pid = 0
        self._rate: float | None = None  # bytes per second that this side reads at most
        self._ahead = b""  # an update, which is sent together with its body

    @property
    def peer_pid(self) -> int:
        """The peer's process id as the kernel reports it for a Unix socket; 0 for TCP."""
        return self._peer_pid

    @property
    def progress(self) -> int:
        """Bytes that the kernel has taken so far."""
        return self._socket.writer.progress if self._socket is not None else 0

    @property
    def unread(self) -> int:
        """About how many sent bytes the peer has not read from the kernel yet."""
        return self._socket.writer.unread if self._socket is not None else 0

    @property
    def shares_with(self) -> int:
        """The peer's process id if this process may read its memory and need not encrypt it; else 0."""
        return 0

    # -- frames and bodies ----------------------------------------------------------------------------

    def trust(self, inbound: Inbound) -> None:
        if self._socket is not None:
            self._socket.decoder.inbound = inbound

    def land(self, sink: BodySink) -> None:
        """Write the bodies of updates into ``sink``. Call it before the first Fetch."""
        if self._socket is not None:
            self._socket.decoder.sink = sink

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)`` on this loop, after the frames that arrived before. For a sink, which is
        called in the connection's thread."""
        if self._socket is not None:
            self._socket.post(function, *args)

    def flush(self, session: SenderSession | ReceiverSession, *, more: bool = False) -> None:
        if more:
            self._ahead = b"".join(map(encode, session.outgoing))
            session.outgoing.clear()
        else:
            super().flush(session)

    def send_whole(self, body: bytes) -> None:
        """Send the update that was flushed last, and its body."""
        if self._socket is not None and self.check_connection():
            self._socket.writer.write_together((self._ahead, body))

    def hand_over(self) -> None:
        if self._socket is not None:
            self._socket.writer.turn.hand_over()

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send the update that was flushed last, and its body.

        ``on_sent`` is called on this loop when the body's memory is no longer read.
        """
        if self._socket is not None and self.check_connection():
            self._socket.writer.write(self._ahead)
            self._socket.writer.stream(body, on_sent)

    def cut(self) -> bool:
        """Cancel the body that is being sent; returns whether there was one."""
        return self._socket is not None and self._socket.writer.cut()

    def _write(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.writer.write(data)

    def _run(
        self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None, patience: float | None
    ) -> None:
        """Let ``thread`` read and write a connected socket. ``patience``: as in ``SocketThread.start``."""
        self._peer_pid, _ = credentials(sock)
        self._socket = SocketThread(
            thread,
            sock,
            tls,
            on_open=self._opened,
            on_frames=self._arrived,
            on_end=self._ended,
            pace=Pace(self._rate) if self._rate is not None else None,
        )
        self._socket.start(patience)

    async def _close(self) -> None:
        if self._socket is not None:
            await self._socket.aclose()

    def give_up(self, reason: str) -> None:
        """Report the connection as lost for ``reason``, and end it at once."""
        self._lost(reason)
        self.abort()

    def abort(self) -> None:
        """End the connection at once, without a Bye."""
        if self._socket is not None:
            self._socket.abort()

    # -- called on this loop by the socket's thread ----------------------------------------------------

    @abstractmethod
    def _opened(self) -> None:
        """Called when frames can be sent."""

    def _arrived(self, frames: list[Frame]) -> None:
        self.silent = False
        try:
            for frame in frames:
                if not self.check_connection():
                    return
                self._deliver(frame)
        except ProtocolError as exc:
            self._lost(str(exc), exc)
        except Exception as exc:
            logger.error("a connection is closed after an unexpected error", exc_info=exc)
            self.give_up(f"this side of its connection failed: {exc!r}")

    def _ended(self, reason: str, error: ProtocolError | None) -> None:
        self._lost(reason or "this side has closed the connection", error)


class DialledTransport(TCPConnection):
    """The worker's end of a connection, which dials the sender. It has its own thread."""

    def __init__(
        self,
        address: Address,
        tls: TLSConfig | None = None,
        *,
        any_user: bool = False,
        rate: float | None = None,
    ) -> None:
        super().__init__()
        self._rate = rate
        # Whether the process that listens at a Unix socket may be another user's. A token or a certificate
        # has to authenticate the sender then.
        self._any_user = any_user
        self.peer_name = str(address)
        self._address = address
        self._tls = tls
        self._thread: LoopThread | None = None
        self._done = asyncio.Event()  # set when the connection is open, or has ended before

    async def open(self, deadline: Deadline) -> None:
        """Connect to the sender, and verify its certificate if TLS is configured.

        Retries until the deadline, because the sender may not have started yet. Raises as the base class, and
        HandshakeError if the sender's certificate is not valid, or its Unix socket is another user's.
        """
        address, tls = self._address, None
        if self._tls is not None:
            name = self._tls.server_hostname or address.host or "localhost"
            tls = TLSLayer(self._tls.for_worker(), name)
        try:
            async with asyncio.timeout(deadline.remaining()):
                sock = await self._dial(deadline)
                try:
                    self.reached = True
                    self._check_user(sock)
                except BaseException:
                    sock.close()
                    raise
                self._thread = LoopThread("aiosync-tcp")
                self._run(self._thread, sock, tls, None)
                await self._done.wait()
        except TimeoutError:
            hint = self.trouble or f"{address} did not answer"
            raise deadline.error("connect", hint=hint) from None
        if self._breach is not None:
            raise self._breach
        if self._end is not None:
            raise WorkerLostError((), f"cannot connect to {address}: {self._end}")

    @property
    def shares_with(self) -> int:
        # A process that may list another's open files may most likely open them too.
        # Memory that is read directly would not be subject to the limit.
        may = (
            self._tls is None
            and self._rate is None
            and os.access(f"/proc/{self.peer_pid}/fd", os.R_OK | os.X_OK)
        )
        return self.peer_pid if may else 0

    def _check_user(self, sock: socket.socket) -> None:
        """Raise HandshakeError if another user listens at the Unix socket."""
        # In a directory that every user may write to, another user can bind the path before the sender does.
        _, uid = credentials(sock)
        if not self._any_user and uid not in (-1, 0, os.geteuid()):
            raise HandshakeError(
                f"the process that listens at {self._address} is of user {uid}, this worker of user "
                f"{os.geteuid()}: give both sides a token=, or take a path that only this user can write to"
            )

    async def _dial(self, deadline: Deadline) -> socket.socket:
        """Connect to the first address that answers; retry until the deadline."""
        address = self._address
        targets = await _resolve(address)
        for pause in pauses(deadline):
            for family, target in targets:
                try:
                    async with asyncio.timeout(_ATTEMPT):
                        return await _connected(family, target)
                except OSError as exc:  # TimeoutError is a subclass
                    problem = os.strerror(exc.errno) if exc.errno else str(exc) or "no answer"
                    if not self.trouble:
                        logger.info("%s: %s; trying again", address, problem)
                    self.trouble = f"cannot connect to {address}: {problem}"
            await asyncio.sleep(pause)
        raise TimeoutError

    async def _close(self) -> None:
        try:
            await super()._close()
        except BaseException:  # cancelled, although not by the caller: the event loop is being closed
            self.abort()
            raise
        finally:
            if self._thread is not None:
                self._thread.close()

    def abandon_loop(self) -> None:
        super().abandon_loop()
        self.abort()
        if self._thread is not None:
            self._thread.close()

    def _opened(self) -> None:
        self._done.set()

    def _ended(self, reason: str, error: ProtocolError | None) -> None:
        super()._ended(reason, error)
        self._done.set()  # open() reports the end


async def _connected(family: int, target: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(address: Address) -> list[tuple[int, Any]]:
    """Look up (family, address to connect to), best first. Raises WorkerLostError: no such host."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    look_up = partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
    try:
        found = look_up(flags=socket.AI_NUMERICHOST)
    except OSError:
        try:
            found = await abandonable(look_up, "aiosync-resolve")
        except OSError as exc:
            raise WorkerLostError((), f"cannot connect to {address}: {exc.strerror or exc}") from exc
    return [(family, target) for family, _, _, _, target in found]
