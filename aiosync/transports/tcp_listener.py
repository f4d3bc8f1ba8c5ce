"""Where workers connect over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, ProtocolError
from aiosync.transports._offload import LoopThread
from aiosync.transports.address import Address, is_loopback
from aiosync.transports.base import Listener, Transport
from aiosync.transports.sockets import name_of, tune
from aiosync.transports.tcp import TCPTransport
from aiosync.transports.tls import TLSConfig, TLSLayer

__all__ = ["TCPListener"]

logger = logging.getLogger("aiosync")

_BACKLOG = 1024
_MAX_UNKNOWN = 64
"""Connections that have not authenticated yet, at most; others wait in the kernel's queue."""

_BREATH = 1.0
"""Seconds until the next attempt where no connection could be accepted."""


class AcceptedTransport(TCPTransport):
    """The connection of the side that listens; it is moved by the listener's thread.

    Args:
        listener: told what becomes of it.
        peer_name: where the worker is.
    """

    def __init__(self, listener: TCPListener, peer_name: str) -> None:
        super().__init__()
        self.peer_name = peer_name
        self._listener = listener

    async def open(self, deadline: Deadline) -> None:
        """It is open, or will be without this side's doing."""
        return

    def adopt(self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None) -> None:
        """Have ``thread`` take over ``sock``."""
        self._run(thread, sock, tls, self._listener.patience)

    def trust(self) -> None:
        """The peer has authenticated."""
        super().trust()
        self._listener.trusted(self)

    def _opened(self) -> None:
        self._listener.opened(self)

    def _ended(self, error: ProtocolError | None) -> None:
        self._listener.ended(self, error)


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
        self._alive: set[AcceptedTransport] = set()
        self._unknown: set[AcceptedTransport] = set()
        self._shaking: set[AcceptedTransport] = set()
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
        self._resume()

    def _accept(self) -> None:
        for _ in range(_MAX_UNKNOWN):  # in one turn of the caller's loop
            if len(self._unknown) >= _MAX_UNKNOWN:
                self._pause()
                return
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # no descriptors left, most likely
                logger.warning("a connection could not be accepted: %s", exc.strerror or exc)
                self._pause()
                assert self._home is not None
                self._home.call_later(_BREATH, self._resume)
                return
            if len(self._alive) < self._max:
                self._adopt(sock)
            else:
                sock.close()
                logger.warning(
                    "a connection was refused: there are max_connections=%d already", len(self._alive)
                )

    def _pause(self) -> None:
        """Leave who comes now to the kernel, which has them wait."""
        if self._accepting and self._home is not None:
            self._accepting = False
            self._home.remove_reader(self._socket.fileno())

    def _resume(self) -> None:
        if not self._accepting and self._home is not None and self._on_connection is not None:
            self._accepting = True
            self._home.add_reader(self._socket.fileno(), self._accept)

    def _is_known(self, transport: AcceptedTransport) -> None:
        self._unknown.discard(transport)
        if len(self._unknown) < _MAX_UNKNOWN:
            self._resume()

    def _adopt(self, sock: socket.socket) -> None:
        assert self._thread is not None and self._home is not None
        sock.setblocking(False)
        tune(sock)
        tls = TLSLayer(self._context) if self._context is not None else None
        transport = AcceptedTransport(self, name_of(sock))
        self._alive.add(transport)
        self._unknown.add(transport)
        self._shaking.add(transport)
        transport.adopt(self._thread, sock, tls)

    def opened(self, transport: AcceptedTransport) -> None:
        """A connection stands: whoever greets it says so if it is refused."""
        self._shaking.discard(transport)
        if self._on_connection is not None:
            self._on_connection(transport)

    def trusted(self, transport: AcceptedTransport) -> None:
        """It is one of ours."""
        self._is_known(transport)

    def ended(self, transport: AcceptedTransport, error: ProtocolError | None) -> None:
        """It is no more."""
        if transport in self._shaking and error is not None and self._on_connection is not None:
            self._on_connection(transport)  # whoever greets it finds out, and says so
        self._shaking.discard(transport)
        self._alive.discard(transport)
        self._is_known(transport)

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket without ending it."""
        self._socket.close()

    def stop(self) -> None:
        """Let nobody in any more."""
        self._pause()
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
