"""Unix-socket doorbells for weights that lie in shared memory.

The weights themselves never pass here: an update frame says in which slot they lie. On Linux the
socket's name is abstract (it is in no folder, and goes with its owner); elsewhere it is a file in a
private temporary folder.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any, cast

from aiosync._deadline import Deadline
from aiosync.errors import WorkerLostError
from aiosync.transports._offload import uninterrupted
from aiosync.transports.base import Listener, Transport
from aiosync.transports.sockets import credentials

__all__ = ["SharedMemTransport", "UnixListener"]

_BACKLOG = 4096
_MAX_UNSENT = 16
"""Writes that may wait for a peer that does not read: more than the protocol ever has under way."""

_GRACE = 1.0
"""Seconds that the peer has, when a connection is closed, to take what was said last."""


class _Protocol(asyncio.Protocol):
    """asyncio's callbacks, handed on to a transport."""

    def __init__(self, owner: SharedMemTransport) -> None:
        self._owner = owner
        self.data_received = owner._feed  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods without the base class.
        self._owner._opened(cast(asyncio.Transport, transport))

    def pause_writing(self) -> None:
        self._owner._full = True

    def resume_writing(self) -> None:
        self._owner._full = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner._ended(exc)


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
        self._stream: asyncio.Transport | None = None
        self._gone: asyncio.Future[None] | None = None
        self._peer_pid = 0
        # Whether the kernel has not taken everything that was written, and how many writes since.
        self._full = False
        self._unsent = 0

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
            loop = asyncio.get_running_loop()
            # A few turns of the loop. Cancelled between them, uvloop would leave a stream that is neither
            # open nor reported closed.
            await uninterrupted(lambda _: loop.create_unix_connection(lambda: _Protocol(self), sock=sock))
        except BaseException as exc:
            if self._stream is None:
                sock.close()
            if isinstance(exc, OSError):
                raise WorkerLostError((), _why_not_connected(exc)) from exc
            raise

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if self._full:
            self._unsent += 1
            if self._unsent > _MAX_UNSENT:
                raise OSError(errno.ENOBUFS, f"it does not read: {_MAX_UNSENT} frames wait for it")
        else:
            self._unsent = 0
        self._stream.write(data)

    async def _close(self) -> None:
        if self._stream is not None and self._gone is not None:
            self._stream.close()
            # A peer that is stopped does not take what is still to be sent.
            await asyncio.wait([self._gone], timeout=_GRACE)
            if not self._gone.done():  # asyncio's streams cannot be aborted once they have ended
                self._stream.abort()
            await asyncio.shield(self._gone)

    def _opened(self, stream: asyncio.Transport) -> None:
        self._stream = stream
        stream.set_write_buffer_limits(high=0)  # to hear of each write that the kernel did not take whole
        self._gone = asyncio.get_running_loop().create_future()
        self._peer_pid = _peer_pid(stream.get_extra_info("socket"))
        if self._on_open is not None:
            self._on_open(self)

    def _ended(self, exc: Exception | None) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._lost(f"its channel closed{f' ({exc})' if exc else ''}")


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
        self._server: asyncio.Server | None = None

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Call ``on_connection`` for every peer of this user that connects, on the running loop."""

        def accept(transport: SharedMemTransport) -> None:
            if _same_user(transport):
                on_connection(transport)

        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Protocol(SharedMemTransport(on_open=accept)), sock=self._socket
        )

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket without ending it."""
        self._socket.close()

    def stop(self) -> None:
        """Let nobody in any more."""
        self.close()

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._socket.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _os_address(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _peer_pid(sock: Any) -> int:
    return credentials(sock)[0]


def _same_user(transport: SharedMemTransport) -> bool:
    stream = transport._stream
    assert stream is not None
    _, uid = credentials(stream.get_extra_info("socket"))
    if uid in (-1, os.geteuid()):
        return True
    stream.abort()
    return False


def _why_not_connected(exc: OSError) -> str:
    if isinstance(exc, ConnectionRefusedError | FileNotFoundError):
        return "nobody listens at the scheme's address: the sender has closed, or its process is gone"
    return f"connecting failed: {exc.strerror or exc}"
