"""Frames over what ``multiprocessing`` offers: a pair of queues, or a pipe that the caller has already.

A frame is small (the weights lie in shared memory, and the frame says where), so each is written in one
piece without waiting, or refused: a peer that leaves a pipe's worth of frames unread is not there.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.queues import SimpleQueue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError
from aiosync.protocol.frames import HEADER_SIZE
from aiosync.transports._offload import QueueReader
from aiosync.transports.base import Listener, Transport

__all__ = ["MPTransport", "PipeListener", "PipeTransport", "QueueListener", "QueuePair"]

_F_SETPIPE_SZ = 1031
_F_GETPIPE_SZ = 1032
_PIPE_SIZE = 1 << 20
_PICKLE_OVERHEAD = 64


class QueuePair:
    """Two queues between the sender and one worker. Pickled to the worker when it is spawned.

    Attributes:
        owner: the process that made it, which is the sender's.

    A process that is killed while it waits on a queue leaves the queue's lock taken, so a worker that
    comes back needs a new pair: :meth:`QueueListener.replace`.
    """

    def __init__(self, ctx: BaseContext) -> None:
        self.owner = os.getpid()
        self.to_worker: SimpleQueue[bytes] = ctx.SimpleQueue()
        self.to_sender: SimpleQueue[bytes] = ctx.SimpleQueue()
        for queue in (self.to_worker, self.to_sender):
            _widen(_writer_fd(queue))

    def close(self) -> None:
        """Close this process's copy; idempotent."""
        self.to_worker.close()
        self.to_sender.close()


class QueueListener(Listener):
    """One pair of queues per worker, there from the beginning.

    Attributes:
        pairs: worker index -> its queues; a worker that is spawned now gets these.
    """

    patience = 1e9  # a queue that nobody has written to yet costs nothing and threatens nobody

    def __init__(self, workers: Iterable[int], ctx: BaseContext) -> None:
        self._ctx = ctx
        self.pairs = {worker: QueuePair(ctx) for worker in workers}
        self._served: dict[Transport, int] = {}
        self._on_connection: Callable[[Transport], None] | None = None

    async def listen(self, on_connection: Callable[[Transport], None]) -> None:
        """Hand out one transport per worker; the worker's first frame comes when it comes."""
        self._on_connection = on_connection
        for worker in self.pairs:
            await self._serve(worker)

    async def replace(self, ended: Transport) -> None:
        """New queues for a worker whose old ones may hold what a killed process left in them."""
        worker = self._served.pop(ended, None)
        if worker is None:
            return
        self.pairs.pop(worker).close()
        self.pairs[worker] = QueuePair(self._ctx)
        await self._serve(worker)

    async def _serve(self, worker: int) -> None:
        pair = self.pairs[worker]
        transport = MPTransport(pair.to_sender, pair.to_worker)
        self._served[transport] = worker
        await transport.open(Deadline.after(self.patience))
        assert self._on_connection is not None
        self._on_connection(transport)

    def forget(self) -> None:
        """In a forked child: leave the queues to the worker that takes its own out of them."""
        self.pairs.clear()

    def close(self) -> None:
        """Close the queues; idempotent."""
        for pair in self.pairs.values():
            pair.close()
        self.pairs.clear()


class PipeListener(Listener):
    """Pipes that the caller has made, one per worker in order.

    A pipe that has broken is not replaced: the caller who respawns a worker makes a new scheme or a
    new pipe.
    """

    patience = 1e9

    def __init__(
        self, pipes: Sequence[Connection[Any, Any]], on_other: Callable[[int, Any], None] | None
    ) -> None:
        self.pipes = list(pipes)
        self._on_other = on_other

    async def listen(self, on_connection: Callable[[Transport], None]) -> None:
        """Begin to watch the pipes."""
        for worker, pipe in enumerate(self.pipes):
            on_other = partial(self._on_other, worker) if self._on_other is not None else None
            transport = PipeTransport(pipe, on_other)
            await transport.open(Deadline.after(self.patience))
            on_connection(transport)

    def forget(self) -> None:
        """Nothing: the pipes are the caller's."""

    def close(self) -> None:
        """Nothing: the pipes are the caller's."""


class MPTransport(Transport):
    """A queue to read and a queue to write.

    Args:
        inbound: read by this process alone.
        outbound: written by this process alone.
        on_close: called when the transport has closed and does not need the queues any more.
    """

    def __init__(
        self,
        inbound: SimpleQueue[bytes],
        outbound: SimpleQueue[bytes],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_close = on_close
        self._inbound = inbound
        self._outbound = outbound
        self._reader: QueueReader | None = None

    async def open(self, deadline: Deadline) -> None:
        """Start to read. The queues are there from the beginning, so this is instant."""
        loop = asyncio.get_running_loop()
        self._reader = QueueReader(self._inbound, loop, self._arrived, self._lost)

    def _write(self, data: bytes) -> None:
        fd = _writer_fd(self._outbound)
        _refuse_if_full(_pipe_room(fd), len(data) + _PICKLE_OVERHEAD)
        self._outbound.put(data)

    def _arrived(self, data: bytes) -> None:
        if self.check_connection():
            self._feed(data)

    async def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._on_close is not None:
            self._on_close()


class PipeTransport(Transport):
    """A duplex ``multiprocessing.Pipe`` that the caller made, and may use for other messages too.

    Ours are recognised by their first bytes; everything else is decoded as ``Connection.recv`` would
    (pickle: the pipe is the caller's own) and handed to ``on_other_message``. The pipe is watched with
    ``add_reader`` and stays open when the transport closes: it is not ours.

    Args:
        connection: this process's end.
        on_other_message: takes each message that is not ours; without it such a message is an error.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        on_other_message: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._connection = connection
        self._on_other = on_other_message
        self._buffer = bytearray()
        self._socket: socket.socket | None = None

    async def open(self, deadline: Deadline) -> None:
        """Begin to watch the pipe."""
        self._socket = _as_socket(self._connection)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def _write(self, data: bytes) -> None:
        sock = self._socket
        if sock is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        room = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2 - _unsent(sock)
        _refuse_if_full(room, len(data))
        self._connection.send_bytes(data)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            # Not to wait is said with each call: O_NONBLOCK would change the caller's end as well.
            data = self._socket.recv(1 << 18, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._stop_watching()
            self._lost(f"reading its pipe failed: {exc.strerror or exc}")
            return
        if not data:
            self._stop_watching()
            self._lost("its pipe closed")
            return
        self._buffer += data
        for message in _split(self._buffer):
            self._take(message)

    def _take(self, message: bytes) -> None:
        if message[:2] == b"AS" and len(message) >= HEADER_SIZE:
            if self.check_connection():
                self._feed(message)
        elif self._on_other is not None:
            self._on_other(ForkingPickler.loads(message))
        else:
            self._lost("a message came that is not of aiosync, and there is no on_other_message to take it")

    def _stop_watching(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    async def _close(self) -> None:
        self._stop_watching()


def _split(buffer: bytearray) -> list[bytes]:
    """Cut whole messages off ``buffer``: a length as int32, or -1 and a length as uint64, then the bytes."""
    messages = []
    while len(buffer) >= 4:
        (length,) = struct.unpack_from("!i", buffer)
        start = 4
        if length == -1:
            if len(buffer) < 12:
                break
            (length,) = struct.unpack_from("!Q", buffer, 4)
            start = 12
        if len(buffer) < start + length:
            break
        messages.append(bytes(buffer[start : start + length]))
        del buffer[: start + length]
    return messages


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


def _writer_fd(queue: SimpleQueue[bytes]) -> int:
    # The queue's public face does not tell how full its pipe is.
    return int(queue._writer.fileno())  # type: ignore[attr-defined]


def _widen(fd: int) -> None:
    """Make a pipe as large as an unprivileged process may, so that a long layout fits in one piece."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_SIZE)
        except OSError:
            return  # over the user's limit: it keeps the default size


def _pipe_room(fd: int) -> int:
    if sys.platform != "linux":
        return _PIPE_SIZE
    return fcntl.fcntl(fd, _F_GETPIPE_SZ) - _ioctl_int(fd, termios.FIONREAD)


def _unsent(sock: socket.socket) -> int:
    return _ioctl_int(sock.fileno(), termios.TIOCOUTQ)


def _ioctl_int(fd: int, request: int) -> int:
    value = array.array("i", [0])
    fcntl.ioctl(fd, request, value)
    return value[0]


def _refuse_if_full(room: int, needed: int) -> None:
    if needed > room:
        raise OSError(
            errno.ENOBUFS,
            f"a frame of {needed} bytes does not fit: {room} bytes free, the peer does not read",
        )
