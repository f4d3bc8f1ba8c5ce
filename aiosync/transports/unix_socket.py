"""Unix-socket doorbells for weights that lie in shared memory.

The weights themselves never pass here: an update frame says in which slot they lie. On Linux the
socket's name is abstract (it is in no folder, and goes with its owner); elsewhere it is a file in a
private temporary folder.

A connection is a non-blocking socket that the event loop watches. It is used directly: a small update is
little more than one frame in each direction, and asyncio's streams would add a tenth to it.

States: NEW (no socket) → OPEN → ENDED; OPEN → CLOSING → ENDED. In CLOSING nothing is read any more, and
what the kernel had not taken is still written, for a bounded time. Only the event loop's thread touches the
socket. Nothing is awaited while a connection is opened. ``aclose`` is not cut short by a cancellation.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable

from aiosync._deadline import Deadline
from aiosync.errors import WorkerLostError
from aiosync.transports.base import Listener, Transport
from aiosync.transports.socket_options import credentials

__all__ = ["SharedMemTransport", "UnixListener"]

logger = logging.getLogger("aiosync")

_BACKLOG = 4096
_AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop."""

_RETRY = 1.0
"""Seconds until connections are accepted again, after the system had no descriptor or memory for one."""

_READ = 1 << 16
"""Bytes that are read at once."""

_MAX_UNSENT = 16
"""Writes that may wait for a peer that does not read: more than the protocol ever has under way."""

_GRACE = 1.0
"""Seconds that the peer has, when a connection is closed, to take what was said last."""

_NOT_NOW = BlockingIOError, InterruptedError


class SharedMemTransport(Transport):
    """A Unix socket to one peer on this machine.

    Args:
        address: the listener's address, for the side that dials.
        on_open: called with the transport once the connection stands, for the side that accepts.
    """

    def __init__(
        self, address: str = "", on_open: Callable[[SharedMemTransport], None] | None = None
    ) -> None:
        super().__init__()
        self._address = address
        self._on_open = on_open
        self._sock: socket.socket | None = None
        self._peer_pid = 0
        # What the kernel has not taken, write by write; the first may have been taken in part.
        self._unsent: deque[bytes] = deque()
        self._drained: asyncio.Future[None] | None = None
        # The peer reads no more. What it said before is still to be read.
        self._mute = False

    @property
    def peer_pid(self) -> int:
        """The peer's process id, from the kernel."""
        return self._peer_pid

    async def open(self, deadline: Deadline) -> None:
        """Connect to the sender. It has been listening since ``init_on_sender``, so this is instant."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(_os_address(self._address))
            self._adopt(sock)
        except BaseException as exc:
            sock.close()
            if isinstance(exc, OSError):
                raise WorkerLostError((), _why_not_connected(exc)) from exc
            raise

    def _adopt(self, sock: socket.socket) -> None:
        """Go on with a socket that is connected and does not block; it is this transport's from now on."""
        self._peer_pid, _ = credentials(sock)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable)
        self._sock = sock
        if self._on_open is not None:
            self._on_open(self)

    def abandon_loop(self) -> None:
        super().abandon_loop()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    # -- reading --------------------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(_READ)
        except _NOT_NOW:
            return
        except OSError as exc:
            self._break(exc)
            return
        if not data:
            self._break(None)
            return
        try:
            self._feed(data)
        except Exception as exc:
            logger.error("a connection is given up", exc_info=exc)
            self._break(exc)

    def _break(self, exc: Exception | None) -> None:
        """The peer has closed the connection, or it is of no use any more."""
        self._close_socket()
        self._lost(f"its channel closed{f' ({exc})' if exc else ''}")

    # -- writing --------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._sock is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if self._unsent:
            if len(self._unsent) > _MAX_UNSENT:
                raise OSError(errno.ENOBUFS, f"it does not read: {_MAX_UNSENT} frames wait for it")
            self._unsent.append(data)
            return
        sent = self._send(self._sock, data)
        if sent < len(data):
            self._unsent.append(data[sent:])
            asyncio.get_running_loop().add_writer(self._sock.fileno(), self._writable)

    def _send(self, sock: socket.socket, data: bytes) -> int:
        """How many bytes need not be sent again. Raises OSError as :meth:`_write`."""
        if self._mute:
            return len(data)
        try:
            return sock.send(data)
        except _NOT_NOW:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            # Reading tells of the end, and brings what the peer said before.
            self._mute = True
            return len(data)

    def _writable(self) -> None:
        sock = self._sock
        if sock is None:
            return
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._send(sock, data)
            except OSError as exc:
                self._break(exc)
                return
            if sent < len(data):
                self._unsent[0] = data[sent:]
                return
            self._unsent.popleft()
        asyncio.get_running_loop().remove_writer(sock.fileno())
        self._tell_drained()

    def _tell_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # -- closing --------------------------------------------------------------------------------------

    async def _close(self) -> None:
        if self._sock is not None and self._unsent:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock.fileno())
            self._drained = loop.create_future()
            # A peer that is stopped does not take what is still to be sent.
            await asyncio.wait([self._drained], timeout=_GRACE)
        self._close_socket()

    def _close_socket(self) -> None:
        sock, self._sock = self._sock, None
        self._unsent.clear()
        if sock is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(sock.fileno())
            loop.remove_writer(sock.fileno())
            sock.close()
        self._tell_drained()


class UnixListener(Listener):
    """The sender's end of the rendezvous. Bound when it is made, so that no worker can come too early.

    Attributes:
        address: what workers dial; plain text, good for a pickled recipe.
    """

    def __init__(self) -> None:
        self._folder: str | None = None
        name = f"aiosync-{secrets.token_hex(16)}"
        if sys.platform == "linux":
            self.address = f"@{name}"
        else:
            self._folder = tempfile.mkdtemp(prefix="aiosync-")
            self.address = os.path.join(self._folder, "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_os_address(self.address))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._home: asyncio.AbstractEventLoop | None = None
        self._on_connection: Callable[[Transport], None] | None = None

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Call ``on_connection`` for every peer of this user that connects, on the running loop."""
        self._home, self._on_connection = asyncio.get_running_loop(), on_connection
        self._resume()

    def _resume(self) -> None:
        if self._home is not None:
            self._home.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (*_NOT_NOW, ConnectionAbortedError):
                return
            except OSError as exc:
                if self._home is not None:
                    logger.warning("no worker can connect for %g s: %s", _RETRY, exc)
                    self._home.remove_reader(self._socket.fileno())
                    self._home.call_later(_RETRY, self._resume)
                return
            if not _same_user(sock):
                sock.close()
                continue
            sock.setblocking(False)
            SharedMemTransport(on_open=self._on_connection)._adopt(sock)

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket without ending it."""
        self._socket.close()

    def stop(self) -> None:
        """Accept no more connections."""
        self.close()

    def close(self) -> None:
        """Stop listening; idempotent."""
        home, self._home = self._home, None
        if home is not None:
            home.remove_reader(self._socket.fileno())
        self._socket.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _os_address(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _same_user(sock: socket.socket) -> bool:
    _, uid = credentials(sock)
    return uid in (-1, os.geteuid())


def _why_not_connected(exc: OSError) -> str:
    if isinstance(exc, ConnectionRefusedError | FileNotFoundError):
        return "no sender listens at the scheme's address: it has closed, or its process is gone"
    return f"connecting failed: {exc.strerror or exc}"
