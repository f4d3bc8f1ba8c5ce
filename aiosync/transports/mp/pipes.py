"""Connections over one duplex ``multiprocessing.Pipe`` per worker. The caller may use the pipes too."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import termios
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from aiosync.errors import InvalidArgumentError
from aiosync.transports.mp.base import (
    MessagePipe,
    MessagePipeListener,
    is_ours,
    missing,
    refuse_if_full,
    split_messages,
)
from aiosync.transports.sockets import has_broken, ioctl_int

_GRACE = 1.0  # seconds that ``close`` waits for the rest of a message


class UnexpectedMessage(Exception):
    """A message arrived that aiosync did not write, and there is no handler for such messages."""


class ConnectionPipe(MessagePipe):
    """One end of a multiprocessing pipe. It belongs to the caller, so ``close`` leaves it open.

    The event loop watches it. Messages of this package are recognised by their first bytes. Others are
    unpickled and passed to ``on_other_message``, which raises UnexpectedMessage if there is no handler.
    """

    _on_message: Callable[[bytes], None]  # set by ``open``
    _on_lost: Callable[[str], None]

    def __init__(self, connection: Connection[Any, Any], on_other_message: Callable[[Any], None]) -> None:
        self._connection = connection
        self._on_other = on_other_message
        self._buffer = bytearray()  # bytes of a message that has arrived in part
        self._socket: socket.socket | None = None  # duplicates the connection's descriptor; None: closed

    def open(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._socket = _as_socket(self._connection)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def put(self, message: bytes) -> None:
        sock = self._socket
        if sock is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        unsent = ioctl_int(sock.fileno(), termios.TIOCOUTQ)
        size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        refuse_if_full(size - unsent, size, len(message))
        self._connection.send_bytes(message)

    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            return
        asyncio.get_running_loop().remove_reader(sock.fileno())
        # A message that has arrived in part is read to its end: else the caller's next ``recv`` would read
        # the rest of it.
        until, readable = time.monotonic() + _GRACE, select.poll()
        readable.register(sock, select.POLLIN)
        try:
            while self._buffer and (left := until - time.monotonic()) > 0 and readable.poll(1e3 * left):
                data = sock.recv(missing(self._buffer), socket.MSG_DONTWAIT)
                if not data:
                    break
                self._split(data)
        finally:
            sock.close()

    def _readable(self) -> None:
        to_the_end = False
        while (sock := self._socket) is not None:
            try:
                # MSG_DONTWAIT and not O_NONBLOCK, which would also apply to the caller's descriptor.
                data = sock.recv(1 << 18, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                self._break(f"reading its pipe failed: {exc.strerror or exc}")
                return
            if not data:
                self._break("its pipe closed")
                return
            to_the_end = to_the_end or has_broken(sock)
            self._split(data)
            if not to_the_end:
                return

    def _split(self, data: bytes) -> None:
        self._buffer += data
        for message in split_messages(self._buffer):
            if is_ours(message):
                self._on_message(message)
            else:
                # In its own callback: if a handler raises, the next messages are still handled.
                asyncio.get_running_loop().call_soon(self._handle_other, message)

    def _handle_other(self, message: bytes) -> None:
        try:
            self._on_other(ForkingPickler.loads(message))
        except UnexpectedMessage as exc:
            self._break(str(exc))

    def _break(self, reason: str) -> None:
        self.close()
        self._on_lost(reason)


class PipeListener(MessagePipeListener):
    """Accepts connections over pipes that the caller made.

    A broken pipe is not replaced. To respawn a worker, the caller makes a new scheme with a new pipe.
    ``on_other`` is called with a worker's index and each message that aiosync did not write.
    """

    def __init__(self, pipes: Sequence[Connection[Any, Any]], on_other: Callable[[int, Any], None]) -> None:
        ours = [ConnectionPipe(pipe, partial(on_other, worker)) for worker, pipe in enumerate(pipes)]
        super().__init__(dict(enumerate(ours)))


def _as_socket(connection: Connection[Any, Any]) -> socket.socket:
    """Duplicate the descriptor of a pipe, a socket on POSIX. Raises InvalidArgumentError if it is unfit."""
    try:
        if connection.readable and connection.writable:
            return socket.socket(fileno=os.dup(connection.fileno()))
    except OSError as exc:
        raise InvalidArgumentError(f"expected an open multiprocessing.Pipe, got {exc}") from exc
    raise InvalidArgumentError("expected a duplex multiprocessing.Pipe(), got a one-way pipe")
