"""TCP and Unix sockets that carry the weights themselves."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, ProtocolError, WorkerLostError
from aiosync.protocol.frames import Frame
from aiosync.protocol.stream import BodySink
from aiosync.transports._offload import LoopThread, Offloader
from aiosync.transports.address import Address, is_loopback
from aiosync.transports.base import Listener, Transport
from aiosync.transports.channel import Channel
from aiosync.transports.outbox import Body
from aiosync.transports.sockets import credentials
from aiosync.transports.tls import TLSConfig, TLSLayer

__all__ = ["TCPListener", "TCPTransport"]

logger = logging.getLogger("aiosync")

_BACKLOG = 1024
_UNIX_BUFFER = 2 << 20
_MAX_UNKNOWN = 64
"""Connections that have not authenticated yet, at most."""


class TCPTransport(Transport):
    """A TCP or Unix socket to one peer.

    Args:
        origin: the sender's address, for the side that dials; the listener, for the side that accepts.
        tls: how to speak TLS, for the side that dials.
    """

    # Not even on loopback: containers may share that and have process ids of their own. (Those of a Unix
    # socket's peer come from the kernel.)
    same_machine = False

    def __init__(self, origin: Address | TCPListener, tls: TLSConfig | None = None) -> None:
        super().__init__()
        self._address = origin if isinstance(origin, Address) else origin.address
        self._listener = None if isinstance(origin, Address) else origin
        self._tls = tls
        self._thread: LoopThread | None = None
        self._channel: Channel | None = None
        self._opened: asyncio.Future[None] | None = None
        self._peer_pid = 0
        self.peer_name = str(self._address)

    @property
    def peer_pid(self) -> int:
        """The peer's process id from the kernel; only Unix sockets have it."""
        return self._peer_pid

    @property
    def progress(self) -> int:
        """Bytes handed to the kernel so far."""
        return self._channel.progress if self._channel is not None else 0

    # -- opening --------------------------------------------------------------------------------------

    async def open(self, deadline: Deadline) -> None:
        """Connect to the sender, and authenticate it by its certificate if TLS is asked for."""
        self._thread = LoopThread("aiosync-tcp")
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self._dial(self._address)
        except TimeoutError:
            raise deadline.error("connect", hint=f"{self._address} did not answer") from None

    async def _dial(self, address: Address) -> None:
        problem = ""
        context = self._tls.for_worker() if self._tls is not None else None
        name = (self._tls and self._tls.server_hostname) or address.host or "localhost"
        for family, target in await _resolve(address):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                _tune(sock, address)
                sock.setblocking(False)
                code = sock.connect_ex(target)
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
                await self._run(sock, TLSLayer(context, name) if context is not None else None)
            except OSError as exc:
                sock.close()
                problem = exc.strerror or str(exc)
            else:
                if self._end is None:
                    return
                problem, self._end = self._end, None
        raise WorkerLostError((), _why_not_connected(address, problem))

    async def _run(self, sock: socket.socket, tls: TLSLayer | None) -> None:
        """Have the thread take over ``sock``; wait until it is open or of no use."""
        assert self._thread is not None
        self._opened = asyncio.get_running_loop().create_future()
        self._peer_pid, _ = credentials(sock)
        self._channel = Channel(self._thread, sock, self, tls)
        self._channel.start(None)
        await self._opened

    def adopt(self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None, patience: float) -> None:
        """Be the accepting side's end of ``sock``; it has ``patience`` seconds to shake hands."""
        self._peer_pid, _ = credentials(sock)
        self.peer_name = _name_of(sock)
        self._channel = Channel(thread, sock, self, tls)
        self._channel.start(patience)

    # -- frames and bodies ----------------------------------------------------------------------------

    def trust(self) -> None:
        """The peer has authenticated."""
        if self._channel is not None:
            self._channel.decoder.trust()
        if self._listener is not None:
            self._listener.trusted(self)

    def land(self, sink: BodySink) -> None:
        """Put the bodies of updates into ``sink``. To be called before one is fetched."""
        if self._channel is not None:
            self._channel.decoder.sink = sink

    def stream(self, body: Body, on_sent: Callable[[], None]) -> None:
        """Send a body behind its update; ``on_sent`` is called when its memory is not needed any more."""
        if self._channel is not None and self.check_connection():
            self._channel.stream(body, on_sent)

    def cut(self) -> bool:
        """Give up the body that is being sent; returns whether there was one."""
        return self._channel is not None and self._channel.cut()

    def _write(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.write(data)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.aclose()
        if self._thread is not None:
            self._thread.close()

    # -- told by the channel --------------------------------------------------------------------------

    def channel_open(self) -> None:
        """See :class:`Owner`."""
        _settle(self._opened)
        if self._listener is not None:
            self._listener.opened(self)

    def channel_frames(self, frames: list[Frame]) -> None:
        """See :class:`Owner`."""
        try:
            for frame in frames:
                if not self.check_connection():
                    return
                self._deliver(frame)
        except ProtocolError as exc:
            self._lost(str(exc), exc)

    def channel_ended(self, reason: str, error: ProtocolError | None) -> None:
        """See :class:`Owner`."""
        self._lost(reason or "this side has closed the connection", error)
        _settle(self._opened)
        if self._listener is not None:
            self._listener.ended(self, error)

    def abort(self) -> None:
        """End the connection at once, without a word."""
        if self._channel is not None:
            self._channel.abort()


class TCPListener(Listener):
    """Where workers connect. Bound when it is made, so that no worker can come too early.

    Args:
        address: where to listen; port 0 takes a free one.
        tls: how to speak TLS.
        max_connections: how many there may be at a time.

    Attributes:
        address: the real address.
        exposed: whether other machines, or other users of this one, can connect.
    """

    patience = 5.0

    def __init__(
        self, address: Address, tls: TLSConfig | None = None, *, max_connections: int = 1024
    ) -> None:
        self._context = tls.for_sender() if tls is not None else None
        self._socket, self.address = _bind(address)
        self._max = max_connections
        self._inode = _inode(address.path)
        self._owner = os.getpid()
        self._thread: LoopThread | None = None
        self._accepting = False
        self._alive: set[TCPTransport] = set()
        self._unknown: set[TCPTransport] = set()
        self._shaking: set[TCPTransport] = set()
        self._home: asyncio.AbstractEventLoop | None = None
        self._on_connection: Callable[[Transport], None] | None = None

    @property
    def exposed(self) -> bool:
        """Whether other machines can connect. (A Unix socket is for this user alone.)"""
        return not self.address.path and not is_loopback(self._socket.getsockname()[0])

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Call ``on_connection`` for every worker that connects, on the running loop."""
        self._home = asyncio.get_running_loop()
        self._on_connection = on_connection
        self._thread = LoopThread("aiosync-tcp")
        self._home.add_reader(self._socket.fileno(), self._accept)
        self._accepting = True

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                logger.warning("a connection could not be accepted: %s", exc.strerror or exc)
                return
            if len(self._unknown) >= _MAX_UNKNOWN or len(self._alive) >= self._max:
                sock.close()
                logger.warning(
                    "a connection was refused: there are %d, of which %d have not authenticated",
                    len(self._alive),
                    len(self._unknown),
                )
                continue
            self._adopt(sock)

    def _adopt(self, sock: socket.socket) -> None:
        assert self._thread is not None and self._home is not None
        sock.setblocking(False)
        _tune(sock, self.address)
        tls = TLSLayer(self._context) if self._context is not None else None
        transport = TCPTransport(self)
        self._alive.add(transport)
        self._unknown.add(transport)
        self._shaking.add(transport)
        transport.adopt(self._thread, sock, tls, self.patience)

    def opened(self, transport: TCPTransport) -> None:
        """A connection stands: whoever greets it says so if it is refused."""
        self._shaking.discard(transport)
        if self._on_connection is not None:
            self._on_connection(transport)

    def trusted(self, transport: TCPTransport) -> None:
        """It is one of ours."""
        self._unknown.discard(transport)

    def ended(self, transport: TCPTransport, error: ProtocolError | None) -> None:
        """It is no more."""
        if transport in self._shaking and error is not None:
            logger.warning("a connection was refused (%s): %s", transport.peer_name, error)
        self._shaking.discard(transport)
        self._unknown.discard(transport)
        self._alive.discard(transport)

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket without ending it."""
        self._socket.close()

    def stop(self) -> None:
        """Let nobody in any more."""
        if self._accepting and self._home is not None:
            self._accepting = False
            self._home.remove_reader(self._socket.fileno())
        self._on_connection = None
        self._socket.close()
        path, self._inode = self.address.path, (self._inode if os.getpid() == self._owner else None)
        if path and self._inode is not None and _inode(path) == self._inode:
            os.unlink(path)
        self._inode = None

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            for transport in self._alive:
                transport.abort()
            self._alive.clear()
            thread.close()


async def _resolve(address: Address) -> list[tuple[int, Any]]:
    """(family, address to connect to), in order of preference."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    offloader = Offloader("aiosync-resolve")
    try:
        found = await offloader.run(
            lambda _: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        )
    except OSError as exc:
        raise WorkerLostError((), f"{address}: {exc.strerror or exc}") from exc
    finally:
        offloader.close()
    return [(family, target) for family, _, _, _, target in found]


def _bind(address: Address) -> tuple[socket.socket, Address]:
    try:
        if address.path:
            return _bind_unix(address), address
        family, _, _, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        _listen(sock, target)
    except OSError as exc:
        raise InvalidArgumentError(f"address: cannot listen at {address}: {exc.strerror or exc}") from exc
    return sock, Address(address.host, sock.getsockname()[1])


def _bind_unix(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(sock.fileno(), 0o600)  # the file gets this mode, at once
    try:
        _listen(sock, address.path)
    except OSError:
        if not _is_left_over(address.path):
            raise
        os.unlink(address.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.fchmod(sock.fileno(), 0o600)
        _listen(sock, address.path)
    return sock


def _listen(sock: socket.socket, target: Any) -> None:
    try:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise


def _is_left_over(path: str) -> bool:
    """Whether this is a socket that nobody listens at any more."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino if path else None
    except OSError:
        return None


def _tune(sock: socket.socket, address: Address) -> None:
    """Small frames at once, and a peer whose machine is gone is noticed within half a minute."""
    if address.path:
        # What it has by default is less than the other side takes while it is being woken up.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if option in dir(socket):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if "TCP_USER_TIMEOUT" in dir(socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _name_of(sock: socket.socket) -> str:
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a local process"


def _why_not_connected(address: Address, problem: str) -> str:
    return f"cannot connect to {address}: {problem}"


def _settle(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
