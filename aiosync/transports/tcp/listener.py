"""The sender's listening socket, TCP or Unix, and the connections that it accepts."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import ssl
import stat
from collections import Counter, deque
from contextlib import suppress

from aiosync._deadline import Deadline
from aiosync._processors import processors
from aiosync.errors import InvalidArgumentError, ProtocolError
from aiosync.protocol.frames import Inbound, Refused
from aiosync.transports._loop_thread import LoopThread
from aiosync.transports.base import Listener, OnConnection, OnLost
from aiosync.transports.log_limit import LogLimit
from aiosync.transports.sockets import close_in_children, inode, listening, peer_of, tune
from aiosync.transports.tcp.address import Address, is_loopback
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.transports.tcp.tls import TLSConfig, TLSLayer

logger = logging.getLogger("aiosync")

_BACKLOG = 1024
# Most connections that have not authenticated. One more replaces one of them, see ``_expel_one``.
_MAX_STRANGERS = 256
_AT_ONCE = 16  # most connections that one callback accepts. Their frames are handled between two callbacks
_MOST_ENCRYPTING = 4  # most threads of a listener: with TLS the encryption is most of the work
_ACCEPT_PAUSE = 1.0  # seconds without accepting after an accept that failed


class AcceptedTransport(TCPConnection):
    """The sender's end of a connection. The listener's thread reads and writes its socket."""

    def __init__(
        self, listener: TCPListener, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None
    ) -> None:
        super().__init__()
        # The peer's machine: limits of unauthenticated connections are per machine.
        self.peer_name, self.origin = peer_of(sock)
        self.greeting = Deadline.after(listener.patience)
        self._listener = listener
        self._run(thread, sock, tls, listener.patience)

    async def open(self, deadline: Deadline) -> None:
        """Return at once: the worker opens the connection."""

    def expel(self) -> None:
        """End this unauthenticated connection in favour of another one. The worker may retry."""
        reason = "more connections are being made than the sender can greet"
        self._lost(reason)
        if self._socket is not None:
            self._socket.refuse(Refused(reason=reason, retry=True))

    def trust(self, inbound: Inbound) -> None:
        super().trust(inbound)
        self._listener.trusted(self)

    def _opened(self) -> None:
        self._listener.opened(self)

    def _ended(self, reason: str, error: ProtocolError | None) -> None:
        super()._ended(reason, error)
        self._listener.ended(self, error)


class TCPListener(Listener):
    """A listening socket for workers. The constructor binds it, so that workers can connect from then on."""

    patience = 5.0

    def __init__(
        self, address: Address, tls: TLSConfig | None = None, *, max_connections: int = 1024
    ) -> None:
        self._tls = tls
        self._context = tls.for_sender() if tls is not None else None
        self._stamp = tls.stamp() if tls is not None else ()  # of the files that the context was read from
        self._owner = os.getpid()  # only this process may unlink the Unix socket
        self._lock = _lock(address)
        try:
            self._socket, self.address = _bind(address)  # which has the port, if a free one was asked for
        except BaseException:
            self._unlock()
            raise
        self._max = max_connections  # most authenticated connections at a time
        close_in_children(self._socket)
        # The Unix socket's inode: another sender may have put its own socket at the path since.
        self._inode = inode(address.path) if address.path else None
        # The connections' threads. The next connection gets the first one.
        self._threads: deque[LoopThread] = deque()
        self._starved = False  # whether accepting is paused until a connection ends and frees its descriptor
        self._log = LogLimit(logger)
        self._alive: set[AcceptedTransport] = set()
        self._shaking: set[AcceptedTransport] = set()  # their TLS handshake is not done
        self._strangers: dict[AcceptedTransport, None] = {}  # have not authenticated; the oldest first
        self._authenticated: set[AcceptedTransport] = set()
        self._home: asyncio.AbstractEventLoop | None = None
        self._on_connection: OnConnection | None = None

    @property
    def exposed(self) -> bool:
        """Whether other machines can connect. Only this user's processes can connect to a Unix socket."""
        return not self.address.path and not is_loopback(self._socket.getsockname()[0])

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        """Start to accept connections. ``on_lost`` is not called: each connection reports its own end."""
        self._home = asyncio.get_running_loop()
        self._on_connection = on_connection
        count = 1 if self._context is None else min(processors(), _MOST_ENCRYPTING)
        self._threads.extend(LoopThread("aiosync-tcp") for _ in range(count))
        self._resume()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # usually: no free descriptor
                self._pause()
                if exc.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._starved = True  # until the expelled connection has freed its descriptor
                    self._expel_one()
                else:
                    self._log.warning("a connection could not be accepted: %s", exc.strerror or exc)
                    asyncio.get_running_loop().call_later(_ACCEPT_PAUSE, self._resume)
                return
            self._adopt(sock)
            if len(self._strangers) > _MAX_STRANGERS:
                self._expel_one()

    def _expel_one(self) -> None:
        """End the oldest silent connection (else the oldest one) of the machine with most strangers."""
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
        return len(self._authenticated) > self._max

    def _pause(self) -> None:
        """Stop accepting. New connections wait in the kernel's backlog."""
        if self._home is not None and self._socket.fileno() >= 0:
            self._home.remove_reader(self._socket.fileno())

    def _resume(self) -> None:
        if self._home is not None and self._on_connection is not None:
            self._home.add_reader(self._socket.fileno(), self._accept)

    def _adopt(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            tune(sock)
            tls = TLSLayer(self._renewed(self._tls)) if self._tls is not None else None
            transport = AcceptedTransport(self, self._threads[0], sock, tls)
            self._threads.rotate(-1)
        except (OSError, MemoryError) as exc:  # the peer has closed, or memory is short
            sock.close()
            self._log.warning("a connection could not be accepted: %s", exc)
            return
        self._alive.add(transport)
        self._strangers[transport] = None
        self._shaking.add(transport)

    def _renewed(self, tls: TLSConfig) -> ssl.SSLContext:
        """Return the context for a new connection: of the files as they are now, if these can be used."""
        assert self._context is not None
        try:
            stamp = tls.stamp()
            if stamp != self._stamp:
                self._stamp = stamp  # files that do not fit together are tried again once one of them changes
                self._context = tls.for_sender()
                logger.info("the TLS certificates have changed: new connections use them")
        except (InvalidArgumentError, OSError) as exc:
            self._log.warning("the TLS certificates have changed, and cannot be used: %s", exc)
        return self._context

    def opened(self, transport: AcceptedTransport) -> None:
        self._shaking.discard(transport)
        if self._on_connection is not None:
            self._on_connection(transport)

    def trusted(self, transport: AcceptedTransport) -> None:
        if transport in self._strangers:
            del self._strangers[transport]
            self._authenticated.add(transport)

    def ended(self, transport: AcceptedTransport, error: ProtocolError | None) -> None:
        if transport in self._shaking and error is not None and self._on_connection is not None:
            self._on_connection(transport)  # whose handshake reports the error
        self._shaking.discard(transport)
        self._alive.discard(transport)
        self._authenticated.discard(transport)
        self._strangers.pop(transport, None)
        if self._starved:
            self._starved = False
            self._resume()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def forget(self) -> None:
        self._socket.close()
        self._unlock()

    def stop(self) -> None:
        self._pause()
        self._log.flush()
        self._on_connection = None
        self._socket.close()
        mine, self._inode = self._inode, None
        if mine is not None and os.getpid() == self._owner and inode(self.address.path) == mine:
            os.unlink(self.address.path)
        self._unlock()

    def close(self) -> None:
        self.stop()
        for transport in self._alive:
            transport.abort()
        self._alive.clear()
        while self._threads:
            self._threads.pop().close()


class _PathLock:
    """A lock on ``path``, in the file ``{path}.lock``. Only the process that holds it may unlink ``path``.

    The kernel releases the lock when the process ends. Forked children do not hold it. Raises
    BlockingIOError if another sender holds the lock, and OSError if its file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._name = f"{path}.lock"
        self._owner = os.getpid()
        self._fd = -1
        while self._fd < 0:
            self._fd = self._acquire()
        close_in_children(self)

    def _acquire(self) -> int:
        """Lock the file and return its descriptor; -1: its last holder unlinked it after it was opened."""
        fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == os.stat(self._name).st_ino:
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return -1

    def fileno(self) -> int:
        return self._fd

    def release(self) -> None:
        """Release the lock; idempotent. In a forked child only the descriptor is closed."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if os.getpid() == self._owner:
            with suppress(OSError):
                os.unlink(self._name)
        os.close(fd)


def _lock(address: Address) -> _PathLock | None:
    """Acquire the lock of a Unix socket's path; None for TCP. Raises InvalidArgumentError."""
    if not address.path:
        return None
    try:
        return _PathLock(address.path)
    except BlockingIOError:
        reason = "another sender listens there"
    except OSError as exc:
        reason = exc.strerror or str(exc)
    raise InvalidArgumentError(f"address: cannot listen at {address}: {reason}")


def _bind(address: Address) -> tuple[socket.socket, Address]:
    try:
        if address.path:
            sock = _bind_unix(address.path)
        else:
            found = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, target = found[0]
            sock = listening(family, target, _BACKLOG)
            address = Address(address.host, sock.getsockname()[1])
    except OSError as exc:
        raise InvalidArgumentError(f"address: cannot listen at {address}: {exc.strerror or exc}") from exc
    sock.setblocking(False)
    return sock, address


def _bind_unix(path: str) -> socket.socket:
    try:
        return listening(socket.AF_UNIX, path, _BACKLOG)
    except OSError:
        if not _is_left_over(path):
            raise
        os.unlink(path)
        return listening(socket.AF_UNIX, path, _BACKLOG)


def _is_left_over(path: str) -> bool:
    """Return whether ``path`` is a Unix socket at which no process listens any more."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False
