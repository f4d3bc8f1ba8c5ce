"""Unix-socket connections for weights in shared memory.

The weights are not sent over the socket: an Update frame names the slot that has them. On Linux the socket
has an abstract name, which is in no folder and ends with its owner. Elsewhere it is a file in a private
temporary folder.

A connection is a non-blocking socket that the event loop watches. asyncio's streams are not used: a small
update is little more than one frame in each direction, and streams would add a tenth to its time.

States: NEW (no socket) → OPEN → ENDED; OPEN → CLOSING → ENDED.
In CLOSING nothing is read, and what the kernel has not taken is still written, for a bounded time. Only the
event loop's thread uses the socket. A cancellation does not interrupt
``aclose``.
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
from itertools import chain

from aiosync._deadline import Deadline, pauses
from aiosync.errors import WorkerLostError
from aiosync.transports.base import FramedTransport, Listener, OnConnection, OnLost
from aiosync.transports.sockets import close_in_children, credentials, has_broken

logger = logging.getLogger("aiosync")

_BACKLOG = 4096
_AT_ONCE = 64  # most connections that one callback of the event loop accepts
_RETRY = 1.0  # seconds without accepting after the system had no descriptor or memory for a connection
_READ = 1 << 16  # most bytes that one call reads
# Most writes that may wait for a peer that does not read. The protocol never has as many in flight.
_MAX_UNSENT = 16
_GRACE = 1.0  # seconds that the peer has to read the last frames when the connection is closed
_NOT_NOW = BlockingIOError, InterruptedError


class UnixConnection(FramedTransport):
    """A Unix socket to one peer on this machine.

    Args:
        address: the listener's address, on the side that dials.
        on_open: called with the transport when the connection is open, on the side that accepts.
    """

    takes_arrived = True

    def __init__(self, address: str = "", on_open: Callable[[UnixConnection], None] | None = None) -> None:
        super().__init__()
        self._address = address
        self._on_open = on_open
        self._sock: socket.socket | None = None
        self._peer_pid = 0
        self._unsent: deque[bytes] = deque()  # not taken by the kernel, or the first one in part
        self._drained: asyncio.Future[None] | None = None  # resolved when nothing is unsent; for _close
        self._mute = False  # the peer has closed its reading end; its last frames may still be unread

    @property
    def peer_pid(self) -> int:
        return self._peer_pid

    async def open(self, deadline: Deadline) -> None:
        """Connect to the sender, which has been listening since ``init_on_sender``.

        Waits only while more workers connect at once than the system lets wait (somaxconn).

        Raises:
            WorkerLostError: no sender listens at the address.
            SyncTimeoutError: it accepts no connection until the deadline.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            for pause in chain(pauses(deadline), [None]):
                try:
                    sock.connect(_os_address(self._address))
                    break
                except BlockingIOError:
                    self.trouble = "the sender accepts no connection"
                    if pause is None:
                        raise deadline.error("connect", hint=self.trouble) from None
                    await asyncio.sleep(pause)
            self._adopt(sock)
        except BaseException as exc:
            sock.close()
            if isinstance(exc, OSError) and not isinstance(exc, TimeoutError):
                raise WorkerLostError((), _why_not_connected(exc)) from exc
            raise

    def _adopt(self, sock: socket.socket) -> None:
        """Take ownership of a connected, non-blocking socket."""
        self._peer_pid, _ = credentials(sock)
        close_in_children(sock)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable)
        self._sock = sock
        if self._on_open is not None:
            self._on_open(self)

    def abandon_loop(self) -> None:
        super().abandon_loop()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def take_arrived(self) -> bool:
        if not self.check_connection():
            return False
        try:
            return self._readable()
        except (SystemExit, KeyboardInterrupt):
            raise
        # An error of a handler or a hook is not the caller's, as in a callback of the event loop.
        except BaseException as exc:  # noqa: BLE001
            context = {"message": "Exception in a handler of a connection", "exception": exc}
            asyncio.get_running_loop().call_exception_handler(context)
            return True

    def _readable(self) -> bool:
        to_the_end = False
        while (sock := self._sock) is not None:
            try:
                data = sock.recv(_READ)
            except _NOT_NOW:
                return to_the_end
            except OSError as exc:
                self._break(exc)
                return True
            if not data:
                self._break(None)
                return True
            to_the_end = to_the_end or has_broken(sock)
            try:
                self._feed(data)
            except Exception as exc:
                logger.error("a connection is closed after an unexpected error", exc_info=exc)
                self._break(exc)
                return True
            if not to_the_end or not self.check_connection():
                return True
        return False

    def _break(self, exc: Exception | None) -> None:
        """Close the socket and report the connection as lost. None: the peer has closed it."""
        self._close_socket()
        self._lost(f"its connection closed{f' ({exc})' if exc else ''}")

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
        """Return how many bytes the kernel took, or all if the peer no longer reads."""
        if self._mute:
            return len(data)
        try:
            return sock.send(data)
        except _NOT_NOW:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            # The reader finds the end too, after the peer's last frames.
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
        self._resolve_drained()

    def _resolve_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def _close(self) -> None:
        if self._sock is not None and self._unsent:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock.fileno())
            self._drained = loop.create_future()
            # Bounded: a suspended peer does not read what is left.
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
        self._resolve_drained()


class UnixListener(Listener):
    """The sender's listening socket. The constructor binds it, so that workers can connect from then on.

    Workers dial ``address``, a string that can be pickled.
    """

    def __init__(self) -> None:
        self._folder = None if sys.platform == "linux" else tempfile.mkdtemp(prefix="aiosync-")
        abstract = f"@aiosync-{secrets.token_hex(16)}"
        self.address = abstract if self._folder is None else os.path.join(self._folder, "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self._socket)  # in a child it would take connections that nothing serves
        self._socket.bind(_os_address(self.address))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._home: asyncio.AbstractEventLoop | None = None
        self._on_connection: OnConnection | None = None

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        """Accept the connections of processes of this user."""
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
            if credentials(sock)[1] not in (-1, os.geteuid()):
                sock.close()  # another user's process
                continue
            sock.setblocking(False)
            UnixConnection(on_open=self._on_connection)._adopt(sock)

    def forget(self) -> None:
        self._socket.close()

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            home.remove_reader(self._socket.fileno())
        self._socket.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _os_address(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _why_not_connected(exc: OSError) -> str:
    if isinstance(exc, ConnectionRefusedError | FileNotFoundError):
        return "no sender listens at the scheme's address: it has closed, or its process is gone"
    return f"connecting failed: {exc.strerror or exc}"
