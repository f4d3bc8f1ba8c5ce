"""Connections over multiprocessing queues and pipes, which outlive the connections.

A worker inherits its queues or its pipe and cannot get new ones. So its next connection uses the same message
pipe. Each message has the tag of its connection. The first message with a new tag opens a connection and ends
the one before. Messages with an older tag are dropped.

Frames are small. So a message pipe writes each message in one piece without blocking, or raises: a peer that
leaves a full pipe unread does not run.
"""

from __future__ import annotations

import errno
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from aiosync._deadline import Deadline
from aiosync.transports.base import FramedTransport, Listener, OnConnection, OnLost

_MAGIC = b"aiosync\x01"
_TAG_SIZE = 8
_HEAD_SIZE = len(_MAGIC) + _TAG_SIZE


def is_ours(message: bytes) -> bool:
    """Return whether a transport of this package wrote ``message``."""
    return message.startswith(_MAGIC) and len(message) >= _HEAD_SIZE


def refuse_if_full(room: int, size: int, needed: int) -> None:
    """Raise OSError if ``needed`` bytes do not fit into the ``room`` that is left of ``size`` bytes."""
    if needed > size:
        hint = "send a model of so many tensors by SharedMemWeightSyncScheme or TCPWeightSyncScheme"
        problem = f"a frame of {needed} bytes never fits into this pipe, which holds {size}: {hint}"
        raise OSError(errno.EMSGSIZE, problem)
    if needed > room:
        problem = f"a frame of {needed} bytes does not fit: {room} bytes free, the peer does not read"
        raise OSError(errno.ENOBUFS, problem)


def _first_message(buffer: bytearray) -> tuple[int, int]:
    """Return where the first message in ``buffer`` begins and ends; before its length is there, the length.

    A message is its length as int32, or -1 and its length as uint64, and then its bytes; all big-endian.
    """
    if len(buffer) < 4:
        return 4, 4
    (length,) = struct.unpack_from("!i", buffer)
    if length != -1:
        return 4, 4 + length
    if len(buffer) < 12:
        return 12, 12
    (length,) = struct.unpack_from("!Q", buffer, 4)
    return 12, 12 + length


def missing(buffer: bytearray) -> int:
    """Return how many bytes the first message in ``buffer`` still lacks, as far as is known; at least 1."""
    return max(1, _first_message(buffer)[1] - len(buffer))


def split_messages(buffer: bytearray) -> list[bytes]:
    """Remove the whole messages from the front of ``buffer``, and return them."""
    messages: list[bytes] = []
    while True:
        start, end = _first_message(buffer)
        if len(buffer) < end:
            return messages
        messages.append(bytes(buffer[start:end]))
        del buffer[:end]


class MessagePipe(ABC):
    """This process's end of a two-way pipe of whole messages."""

    @abstractmethod
    def open(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Start to read on the running loop, again after :meth:`close`. ``on_lost``: the pipe broke."""

    @abstractmethod
    def put(self, message: bytes) -> None:
        """Write a message without blocking. Raises OSError if the pipe is broken or full."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading; idempotent. The descriptors stay open."""


class PipeConnection(FramedTransport):
    """One connection over a message pipe, on the side that opens the connection.

    Args:
        pipe: this process's end of the pipe.
    """

    def __init__(self, pipe: MessagePipe) -> None:
        super().__init__()
        self.tag = os.urandom(_TAG_SIZE)  # precedes each message of the connection
        self._pipe = pipe

    async def open(self, deadline: Deadline) -> None:
        """Start to read. Does not wait: the pipe exists already."""
        self._pipe.open(self.deliver, self._lost)

    def deliver(self, message: bytes) -> None:
        """Deliver a message from the pipe, if it belongs to this connection."""
        if message[len(_MAGIC) : _HEAD_SIZE] == self.tag and self.check_connection():
            self._feed(message[_HEAD_SIZE:])

    def _write(self, data: bytes) -> None:
        self._pipe.put(_MAGIC + self.tag + data)

    def abandon_loop(self) -> None:
        super().abandon_loop()
        with suppress(RuntimeError):  # the pipe used the closed loop
            self._pipe.close()

    async def _close(self) -> None:
        self._pipe.close()


class _AcceptedPipeConnection(PipeConnection):
    """The sender's end of a connection. The listener reads the pipe, also before and afterwards."""

    def __init__(self, pipe: MessagePipe, tag: bytes) -> None:
        super().__init__(pipe)
        self.tag = tag

    async def open(self, deadline: Deadline) -> None:
        """Do nothing: the listener reads the pipe."""

    async def _close(self) -> None:
        """Do nothing: the worker's next connection uses the same pipe."""


@dataclass(eq=False, repr=False)
class _WorkerPipe:
    """One worker's message pipe, and the connection that uses it now."""

    pipe: MessagePipe
    on_connection: OnConnection | None  # None: opens no more connections
    on_lost: Callable[[str], None]
    current: _AcceptedPipeConnection | None = None

    def __post_init__(self) -> None:
        self.pipe.open(self._message, self._broken)

    def _message(self, message: bytes) -> None:
        tag = message[len(_MAGIC) : _HEAD_SIZE]
        before = self.current
        if before is None or before.tag != tag:
            if self.on_connection is None:
                return
            self.current = _AcceptedPipeConnection(self.pipe, tag)
            if before is not None:
                before._lost("its worker has opened a new connection")
            self.on_connection(self.current)
        if self.current is not None:
            self.current.deliver(message)

    def _broken(self, reason: str) -> None:
        if self.current is not None:
            self.current._lost(reason)
        self.on_lost(reason)


class MessagePipeListener(Listener):
    """Accepts connections over one message pipe per worker. ``pipes``: worker index -> our end."""

    def __init__(self, pipes: dict[int, MessagePipe]) -> None:
        self._pipes = pipes  # until they are read
        self._workers: dict[int, _WorkerPipe] = {}

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        """Start to read all pipes. A worker's connection begins with its first message."""
        while self._pipes:
            worker, pipe = next(iter(self._pipes.items()))
            self._workers[worker] = _WorkerPipe(pipe, on_connection, partial(on_lost, worker))
            del self._pipes[worker]  # only now: if opening it fails, listen() may be called again

    def worker_of(self, transport: FramedTransport) -> int | None:
        """Return the index of the worker whose current connection is ``transport``; None: no worker's."""
        return next((index for index, worker in self._workers.items() if worker.current is transport), None)

    def exchange(self, worker: int, pipe: MessagePipe) -> None:
        """Replace the pipe of ``worker`` by a new one."""
        before = self._workers.pop(worker)
        before.pipe.close()
        self._workers[worker] = _WorkerPipe(pipe, before.on_connection, before.on_lost)

    def forget(self) -> None:
        self._pipes.clear()  # the child's workers use their own ends

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.on_connection = None

    def close(self) -> None:
        for worker in self._workers.values():
            worker.pipe.close()
        self._workers.clear()
