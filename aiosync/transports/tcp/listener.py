"""The sender's listening socket, TCP or Unix, and the connections that it accepts."""

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
from aiosync.protocol.allowed_frames import Inbound
from aiosync.protocol.frames import Frame, Refused
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
"""Most connections that have not authenticated. One more replaces one of them, see ``_expel_one``."""

_AT_ONCE = 16
"""Most connections that one callback accepts. Their frames are handled between two callbacks."""

_ACCEPT_PAUSE = 1.0
"""Seconds without accepting after an accept that failed."""


class AcceptedTransport(TCPTransport):
    """The sender's end of a connection. The listener's thread reads and writes its socket.

    Args:
        listener: gets the connection's changes of state.
        peer_name: the worker's address, for messages.
        origin: the worker's machine. Limits of unauthenticated connections are per machine.

    Attributes:
        silent: whether no frame has arrived yet.
    """

    def __init__(self, listener: TCPListener, peer_name: str, origin: str) -> None:
        super().__init__()
        self.peer_name = peer_name
        self.origin = origin
        self.silent = True
        self.greeting = Deadline.after(listener.patience)
        self._listener = listener

    async def open(self, deadline: Deadline) -> None:
        """Return at once: the worker opens the connection."""
        return

    def adopt(self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None) -> None:
        """Let ``thread`` read and write ``sock``."""
        self._run(thread, sock, tls, self._listener.patience)

    def socket_frames(self, frames: list[Frame]) -> None:
        self.silent = False
        super().socket_frames(frames)

    def expel(self) -> None:
        """End this unauthenticated connection in favour of another one. The worker may retry."""
        reason = "more connections are being made than the sender can greet"
        self._lost(reason)
        if self._socket is not None:
            self._socket.refuse(Refused(reason=reason, retry=True))

    def trust(self, inbound: Inbound) -> None:
        """Accept the frames of ``inbound`` from now on: the peer has authenticated."""
        super().trust(inbound)
        self._listener.trusted(self)

    def _opened(self) -> None:
        self._listener.opened(self)

    def _ended(self, error: ProtocolError | None) -> None:
        self._listener.ended(self, error)


class TCPListener(Listener):
    """A listening socket for workers. The constructor binds it, so that workers can connect from then on.

    Args:
        address: where to listen. Port 0: a free port.
        tls: certificates; None: no TLS.
        max_connections: most authenticated connections at a time.

    Attributes:
        address: where it listens, with the real port.
    """

    patience = 5.0

    def __init__(
        self, address: Address, tls: TLSConfig | None = None, *, max_connections: int = 1024
    ) -> None:
        self._context = tls.for_sender() if tls is not None else None
        # Only this process may unlink the Unix socket.
        self._owner = os.getpid()
        self._lock = _lock(address)
        try:
            self._socket, self.address = _bind(address)
        except BaseException:
            self._unlock()
            raise
        self._max = max_connections
        close_in_children(self._socket)
        # The Unix socket's inode: another sender may have put its own socket at the path since.
        self._inode = _inode(address.path)
        self._thread: LoopThread | None = None
        self._accepting = False
        self._log = LogLimit(logger)
        self._alive: set[AcceptedTransport] = set()
        # Connections that have not authenticated, the oldest first.
        self._strangers: dict[AcceptedTransport, None] = {}
        # Connections that have authenticated.
        self._known: set[AcceptedTransport] = set()
        # Whether accepting is paused until a connection ends, because the process has no free descriptor.
        self._starved = False
        # Connections whose TLS handshake is not done.
        self._shaking: set[AcceptedTransport] = set()
        self._home: asyncio.AbstractEventLoop | None = None
        self._on_connection: Callable[[Transport], None] | None = None

    @property
    def exposed(self) -> bool:
        """Whether other machines can connect. Only this user's processes can connect to a Unix socket."""
        return not self.address.path and not is_loopback(self._socket.getsockname()[0])

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Call ``on_connection`` on the running loop for every worker that connects.

        ``on_lost`` is not called: each connection reports its own end.
        """
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
            except OSError as exc:  # usually: no free descriptor
                if exc.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._pause()  # until the expelled connection has freed its descriptor
                    self._starved = True
                    self._expel_one()
                    return
                self._log.warning("a connection could not be accepted: %s", exc.strerror or exc)
                self._pause()
                assert self._home is not None
                self._home.call_later(_ACCEPT_PAUSE, self._resume)
                return
            self._adopt(sock)
            if len(self._strangers) > _MAX_STRANGERS:
                self._expel_one()

    def _expel_one(self) -> None:
        """End one unauthenticated connection, of the machine that has most of them.

        The oldest one that has sent nothing ends; if all have sent frames, the oldest.
        """
        counts = Counter(stranger.origin for stranger in self._strangers)
        origin, _ = counts.most_common(1)[0]
        theirs = [stranger for stranger in self._strangers if stranger.origin == origin]
        victim = next((stranger for stranger in theirs if stranger.silent), theirs[0])
        self._log.warning(
            "a connection from %s was closed before it had authenticated: there are too many", origin
        )
        del self._strangers[victim]
        victim.expel()

    @property
    def full(self) -> bool:
        """Whether there are more authenticated connections than allowed."""
        return len(self._known) > self._max

    def _pause(self) -> None:
        """Stop accepting. New connections wait in the kernel's backlog."""
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
        except (OSError, MemoryError) as exc:  # the peer has closed, or memory is short
            sock.close()
            self._log.warning("a connection could not be accepted: %s", exc)
            return
        self._alive.add(transport)
        self._strangers[transport] = None
        self._shaking.add(transport)

    def opened(self, transport: AcceptedTransport) -> None:
        """A connection can send frames: pass it to ``on_connection``."""
        self._shaking.discard(transport)
        if self._on_connection is not None:
            self._on_connection(transport)

    def trusted(self, transport: AcceptedTransport) -> None:
        """A connection has authenticated."""
        if transport in self._strangers:
            del self._strangers[transport]
            self._known.add(transport)

    def ended(self, transport: AcceptedTransport, error: ProtocolError | None) -> None:
        """A connection has ended. ``error``: the peer broke the protocol."""
        if transport in self._shaking and error is not None and self._on_connection is not None:
            self._on_connection(transport)  # whose handshake reports the error
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
        """Close this process's copies of the descriptors, in a forked child. The parent goes on listening."""
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
        """Stop listening, and end all connections and the thread; idempotent."""
        self.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            for transport in self._alive:
                transport.abort()
            self._alive.clear()
            thread.close()


def _lock(address: Address) -> PathLock | None:
    """Acquire the lock of a Unix socket's path; None for TCP.

    Raises:
        InvalidArgumentError: another sender listens at the path, or the lock's file cannot be made.
    """
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
    os.fchmod(sock.fileno(), 0o600)  # bind() makes the file with this mode
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
    """Return whether ``path`` is a Unix socket at which no process listens any more."""
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
