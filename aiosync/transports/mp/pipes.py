"""A duplex ``multiprocessing.Pipe`` per worker, which the caller made and may use for other messages too."""

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
from aiosync.transports.ioctl import ioctl_int
from aiosync.transports.mp.base import (
    CarrierListener,
    MessagePipe,
    is_ours,
    missing,
    refuse_if_full,
    split_messages,
)

_GRACE = 1.0
"""Seconds that the rest of a message has to come."""

__all__ = ["PipeCarrier", "PipeListener", "UnexpectedMessage"]


class UnexpectedMessage(Exception):
    """A message came that is not aiosync's, and there is no handler for such messages."""


class PipeCarrier(MessagePipe):
    """One end of the pipe. It stays open when the carrier closes: it is not ours.

    Our messages are recognised by their first bytes; everything else is decoded as ``Connection.recv``
    would (pickle: the pipe is the caller's own) and handed to ``on_other_message``. The pipe is watched
    with ``add_reader``.

    Args:
        connection: this process's end.
        on_other_message: called with each message that is not aiosync's. Raises UnexpectedMessage if there is
            no handler.
    """

    def __init__(self, connection: Connection[Any, Any], on_other_message: Callable[[Any], None]) -> None:
        self._connection = connection
        self._on_other = on_other_message
        self._buffer = bytearray()
        self._socket: socket.socket | None = None
        self._on_message: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[str], None] | None = None

    def open(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Begin to watch the pipe."""
        self._on_message, self._on_lost = on_message, on_lost
        self._socket = _as_socket(self._connection)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def put(self, message: bytes) -> None:
        """Write a message without waiting."""
        sock = self._socket
        if sock is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        unsent = ioctl_int(sock.fileno(), termios.TIOCOUTQ)
        size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        refuse_if_full(size - unsent, size, len(message))
        self._connection.send_bytes(message)

    def close(self) -> None:
        """Stop watching; idempotent. A message that has been read in part is read to its end, or the caller,
        whose pipe it is, would begin with the rest of it."""
        sock, self._socket = self._socket, None
        if sock is None:
            return
        asyncio.get_running_loop().remove_reader(sock.fileno())
        until = time.monotonic() + _GRACE
        while self._buffer and select.select([sock], [], [], max(0.0, until - time.monotonic()))[0]:
            data = sock.recv(missing(self._buffer), socket.MSG_DONTWAIT)
            if not data:
                break
            self._take(data)
        sock.close()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            # Not to wait is said with each call: O_NONBLOCK would change the caller's end as well.
            data = self._socket.recv(1 << 18, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._break(f"reading its pipe failed: {exc.strerror or exc}")
            return
        if not data:
            self._break("its pipe closed")
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        for message in split_messages(self._buffer):
            if is_ours(message):
                assert self._on_message is not None
                self._on_message(message)
            else:
                # In a callback of its own, so that one that raises does not take the next ones with it.
                asyncio.get_running_loop().call_soon(self._hand_over, message)

    def _hand_over(self, message: bytes) -> None:
        try:
            self._on_other(ForkingPickler.loads(message))
        except UnexpectedMessage as exc:
            self._break(str(exc))

    def _break(self, reason: str) -> None:
        self.close()
        assert self._on_lost is not None
        self._on_lost(reason)


class PipeListener(CarrierListener):
    """Pipes that the caller has made, one per worker in order.

    A pipe that has broken is not replaced: the caller who respawns a worker makes a new scheme with a
    new pipe.
    """

    def __init__(self, pipes: Sequence[Connection[Any, Any]], on_other: Callable[[int, Any], None]) -> None:
        super().__init__()
        self._pipes = list(pipes)
        self._on_other = on_other

    def carriers(self) -> dict[int, MessagePipe]:
        """The sender's ends."""
        return {
            worker: PipeCarrier(pipe, partial(self._on_other, worker))
            for worker, pipe in enumerate(self._pipes)
        }

    def forget(self) -> None:
        """Nothing: the pipes are the caller's."""


def _as_socket(connection: Connection[Any, Any]) -> socket.socket:
    """A second descriptor of a duplex pipe, which on POSIX is a socket pair.

    Raises:
        InvalidArgumentError: if it is closed or not duplex.
    """
    try:
        if connection.readable and connection.writable:
            return socket.socket(fileno=os.dup(connection.fileno()))
    except OSError as exc:
        raise InvalidArgumentError(f"expected an open multiprocessing.Pipe, got {exc}") from exc
    raise InvalidArgumentError("expected a duplex multiprocessing.Pipe(), got a one-way pipe")
