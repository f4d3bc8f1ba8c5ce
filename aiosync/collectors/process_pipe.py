"""A command pipe between a process and its child."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import socket
import struct
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, Self

import cloudpickle
import msgspec

from aiosync.collectors.command_pipe import Batch, Collect, CommandPipe, CommandPipeClosed, EndEarly
from aiosync.transports.sockets import close_in_children, has_broken

_HEAD = struct.Struct("!BQ")  # of a message: how it is encoded, and the number of bytes that follow
_PLAIN: tuple[type[Any], ...] = (Collect, EndEarly, Batch)
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = tuple(map(msgspec.msgpack.Decoder, _PLAIN))
_READ = 1 << 16  # most bytes that one call reads
_LIMIT = 1 << 16
"""Bytes of messages that one end buffers before it stops to read, and before ``drain`` waits."""

_NOT_NOW = BlockingIOError, InterruptedError


def _encoded(message: object) -> bytes:
    """Return a message with its head.

    The messages of each batch are encoded by msgspec, in a tenth of pickle's time. cloudpickle also takes
    functions of ``__main__`` and lambdas.
    """
    kind = type(message)
    if kind in _PLAIN and getattr(message, "data", None) is None:
        try:
            plain = _ENCODER.encode(message)
        except (TypeError, OverflowError):  # a user's number that is no int, such as one of NumPy
            pass
        else:
            return _HEAD.pack(1 + _PLAIN.index(kind), len(plain)) + plain
    pickled: bytes = cloudpickle.dumps(message)
    return _HEAD.pack(0, len(pickled)) + pickled


class ProcessCommandPipe(CommandPipe):
    """A pipe between a process and its child. Pickled messages are safe: only this program has the pipe.

    It is a non-blocking socket that the event loop watches. asyncio's streams would take several times as
    long, while the workers of a synchronous collector wait.

    States: OPEN → MUTE (the other end does not read any more; what it has sent is still read) → ENDED (no
    bytes come any more; messages may be left) → CLOSED; or OPEN → ENDED, or any → CLOSED.
    Only the event loop's thread uses a pipe. A cancelled ``receive`` or ``drain`` loses nothing.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = sock  # None: CLOSED
        self._mute = self._ended = False
        self._reading = False  # whether the loop watches for bytes
        self._received = bytearray()  # the next message, or its beginning, and what is behind it
        self._unsent: deque[memoryview] = deque()
        self._unsent_nbytes = 0
        self._arrived: asyncio.Future[None] | None = None  # for receive()
        self._limit = _LIMIT  # 0 once flush() has been called
        self._drained = asyncio.Event()  # whether no more than that is unsent
        self._drained.set()
        self._read_on()

    @classmethod
    async def open(cls, connection: Connection[Any, Any]) -> Self:
        """Take over one end of a duplex pipe. ``connection`` is closed."""
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        # A child of the environment that inherits this socket would keep it open after this process ends.
        close_in_children(sock)
        sock.setblocking(False)
        return cls(sock)

    # -- sending ----------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        data = memoryview(_encoded(message))
        if self._sock is None or self._mute:
            return
        sent = 0 if self._unsent else self._write(self._sock, data)
        if sent < len(data):
            if not self._unsent:
                self._loop.add_writer(self._sock, self._write_unsent)
            self._unsent.append(data[sent:])
            self._unsent_nbytes += len(data) - sent
            if self._unsent_nbytes > self._limit:
                self._drained.clear()

    def _write(self, sock: socket.socket, data: memoryview) -> int:
        """Return how many bytes the socket took."""
        try:
            return sock.send(data)
        except _NOT_NOW:
            return 0
        except OSError:  # the other end is closed. What it has sent is still read
            self._mute = True
            return len(data)

    def _write_unsent(self) -> None:
        while self._sock is not None and self._unsent:
            data = self._unsent.popleft()
            sent = self._write(self._sock, data)
            if self._mute:
                self._forget_unsent()
                return
            self._unsent_nbytes -= sent
            if sent < len(data):
                self._unsent.appendleft(data[sent:])
                break
        if not self._unsent:
            self._forget_unsent()
        elif self._unsent_nbytes <= self._limit:
            self._drained.set()

    def _forget_unsent(self) -> None:
        if self._sock is not None:
            self._loop.remove_writer(self._sock)
        self._unsent.clear()
        self._unsent_nbytes = 0
        self._drained.set()

    async def drain(self) -> None:
        await self._drained.wait()
        if self._sock is None or self._mute:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    async def flush(self) -> None:
        self._limit = 0
        if self._unsent:
            self._drained.clear()
        await self._drained.wait()

    # -- receiving --------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        if not self._reading and not self._ended and self._sock is not None:
            self._reading = True
            self._loop.add_reader(self._sock, self._read)

    def _stop_reading(self) -> None:
        if self._reading and self._sock is not None:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _read(self) -> None:
        to_the_end = False
        while (sock := self._sock) is not None and not self._ended:
            try:
                data = sock.recv(_READ)
            except _NOT_NOW:
                return
            except OSError:  # the other end has left a message unread
                data = b""
            self._received += data
            self._ended = not data
            if self._ended or self._next_end() is not None:
                self._wake()
                if self._ended or len(self._received) >= _LIMIT:
                    self._stop_reading()
            to_the_end = to_the_end or has_broken(sock)
            if not to_the_end:
                return

    def _next_end(self) -> int | None:
        """Where the next message ends; None: it is not complete."""
        if len(self._received) < _HEAD.size:
            return None
        end = _HEAD.size + int(_HEAD.unpack_from(self._received)[1])
        return end if len(self._received) >= end else None

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def receive(self) -> Any:
        while (end := self._next_end()) is None:
            if self._ended or self._sock is None:
                raise CommandPipeClosed("the other end of the pipe is closed")
            self._read_on()
            self._arrived = self._loop.create_future()
            await self._arrived
        number, data = self._received[0], bytes(memoryview(self._received)[_HEAD.size : end])
        del self._received[:end]
        return pickle.loads(data) if number == 0 else _DECODERS[number - 1].decode(data)

    def close(self) -> None:
        if self._sock is not None:
            self._stop_reading()
            self._write_unsent()
            self._forget_unsent()
            self._sock.close()
            self._sock = None
            self._wake()
