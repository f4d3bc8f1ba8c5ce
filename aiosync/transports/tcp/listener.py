"""Where workers connect over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, ProtocolError
from aiosync.protocol.frames import Frame, Refused
from aiosync.protocol.framing import Inbound
from aiosync.transports._offload import LoopThread
from aiosync.transports.base import Listener, Transport
from aiosync.transports.forks import close_in_children
from aiosync.transports.log_limit import LogLimit
from aiosync.transports.socket_options import name_of, origin_of, tune
from aiosync.transports.tcp.address import Address, is_loopback
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.transports.tcp.path_lock import PathLock
from aiosync.transports.tcp.tls import TLSConfig, TLSLayer

__all__ = ["TCPListener"]

logger = logging.getLogger("aiosync")

_BACKLOG = 1024
_MAX_STRANGERS = 256
"""Connections that have not authenticated, at most. A further one takes the place of the oldest."""

_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop; what they say is read in between."""

_BREATH = 1.0
"""Seconds until the next attempt where no connection could be accepted."""


class AcceptedTransport(TCPTransport):
    """The connection of the side that listens; it is moved by the listener's thread.

    Args:
        listener: told what becomes of it.
        peer_name: where the worker is.
        origin: the machine that it comes from.

    Attributes:
        silent: whether nothing has come from it yet.
    """

    def __init__(self, listener: TCPListener, peer_name: str, origin: str) -> None:
        super().__init__()
        self.peer_name = peer_name
        self.origin = origin
        self.silent = True
        self.greeting = Deadline.after(listener.patience)
        self._listener = listener

    async def open(self, deadline: Deadline) -> None:
        """It is open, or will be without this side's doing."""
        return

    def adopt(self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None) -> None:
        """Have ``thread`` take over ``sock``."""
        self._run(thread, sock, tls, self._listener.patience)

    def channel_frames(self, frames: list[Frame]) -> None:
        self.silent = False
        super().channel_frames(frames)

    def make_way(self) -> None:
        """Have this connection, which has not authenticated, give its place to another."""
        reason = "more connections are being made than the sender can greet"
        self._lost(reason)
        if self._channel is not None:
            self._channel.refuse(Refused(reason=reason, retry=True))

    def trust(self, inbound: Inbound) -> None:
        """The peer has authenticated."""
        super().trust(inbound)
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
        max_connections: how many that have authenticated there may be at a time.

    Attributes:
        address: the real address.
        exposed: whether other machines, or other users of this one, can connect.
    """

    patience = 5.0

    def __init__(
        self, address: Address, tls: TLSConfig | None = None, *, max_connections: int = 1024
    ) -> None:
        self._context = tls.for_sender() if tls is not None else None
        self._owner = os.getpid()
        self._lock = _lock(address)
        try:
            self._socket, self.address = _bind(address)
        except BaseException:
            self._unlock()
            raise
        self._max = max_connections
        close_in_children(self._socket)
        self._inode = _inode(address.path)
        self._thread: LoopThread | None = None
        self._accepting = False
        self._log = LogLimit(logger)
        self._alive: set[AcceptedTransport] = set()
        # Those that have not authenticated, the oldest first.
        self._strangers: dict[AcceptedTransport, None] = {}
        self._known: set[AcceptedTransport] = set()
        # Whether no more are accepted until one has ended, for want of descriptors.
        self._starved = False
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
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # no descriptors left, most likely
                if exc.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._pause()  # until its thread has closed it, and a descriptor is free
                    self._starved = True
                    self._expel_one()
                    return
                self._log.warning("a connection could not be accepted: %s", exc.strerror or exc)
                self._pause()
                assert self._home is not None
                self._home.call_later(_BREATH, self._resume)
                return
            self._adopt(sock)
            if len(self._strangers) > _MAX_STRANGERS:
                self._expel_one()

    def _expel_one(self) -> None:
        """End one of the connections that have not authenticated: of the machine that has the most of them,
        the oldest that has said nothing, or the oldest."""
        counts = Counter(stranger.origin for stranger in self._strangers)
        origin, _ = counts.most_common(1)[0]
        theirs = [stranger for stranger in self._strangers if stranger.origin == origin]
        victim = next((stranger for stranger in theirs if stranger.silent), theirs[0])
        self._log.warning(
            "a connection from %s was closed before it had authenticated: there are too many", origin
        )
        del self._strangers[victim]
        victim.make_way()

    @property
    def full(self) -> bool:
        return len(self._known) > self._max

    def _pause(self) -> None:
        """Leave who comes now to the kernel, which has them wait."""
        if self._accepting and self._home is not None:
            self._accepting = False
            self._home.remove_reader(self._socket.fileno())

    def _resume(self) -> None:
        if not self._accepting and self._home is not None and self._on_connection is not None:
            self._accepting = True
            self._home.add_reader(self._socket.fileno(), self._accept)

    def _adopt(self, sock: socket.socket) -> None:
        assert self._thread is not None and self._home is not None
        try:
            sock.setblocking(False)
            tune(sock)
            tls = TLSLayer(self._context) if self._context is not None else None
            transport = AcceptedTransport(self, name_of(sock), origin_of(sock))
            transport.adopt(self._thread, sock, tls)
        except (OSError, MemoryError) as exc:  # it has gone again, or there is no memory for it
            sock.close()
            self._log.warning("a connection could not be accepted: %s", exc)
            return
        self._alive.add(transport)
        self._strangers[transport] = None
        self._shaking.add(transport)

    def opened(self, transport: AcceptedTransport) -> None:
        """A connection is open. The code that greets it reports a refusal."""
        self._shaking.discard(transport)
        if self._on_connection is not None:
            self._on_connection(transport)

    def trusted(self, transport: AcceptedTransport) -> None:
        """It has authenticated."""
        if transport in self._strangers:
            del self._strangers[transport]
            self._known.add(transport)

    def ended(self, transport: AcceptedTransport, error: ProtocolError | None) -> None:
        """It is no more."""
        if transport in self._shaking and error is not None and self._on_connection is not None:
            self._on_connection(transport)  # the code that greets it reports the error
        self._shaking.discard(transport)
        self._alive.discard(transport)
        self._known.discard(transport)
        self._strangers.pop(transport, None)
        if self._starved:
            self._starved = False
            self._resume()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket without ending it."""
        self._socket.close()
        self._unlock()

    def stop(self) -> None:
        """Accept no more connections."""
        self._pause()
        self._log.flush()
        self._on_connection = None
        self._socket.close()
        path, self._inode = self.address.path, (self._inode if os.getpid() == self._owner else None)
        if path and self._inode is not None and _inode(path) == self._inode:
            os.unlink(path)
        self._inode = None
        self._unlock()

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            for transport in self._alive:
                transport.abort()
            self._alive.clear()
            thread.close()


def _lock(address: Address) -> PathLock | None:
    """The right to listen at a Unix socket's path; None for TCP."""
    if not address.path:
        return None
    try:
        return PathLock(address.path)
    except BlockingIOError:
        reason = "another sender listens there"
    except OSError as exc:
        reason = exc.strerror or str(exc)
    raise InvalidArgumentError(f"address: cannot listen at {address}: {reason}")


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
    """Whether no process listens at this socket any more."""
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
