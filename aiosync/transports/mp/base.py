"""Connections over what outlives them: queues that a process inherited, a pipe that is the caller's.

Neither can be dialled anew, so a worker that gives up on connecting, or leaves and comes back, begins its
next connection over the same carrier. Each message bears the tag of its connection: the first message with
a new tag opens one (and ends the one before, whose worker has moved on), and what is left over from an
earlier one is dropped.

A frame is small (the weights lie in shared memory, and the frame says where), so a carrier writes each
message in one piece without waiting, or refuses: a peer that leaves a pipe's worth of them unread is not
there.
"""

from __future__ import annotations

import errno
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from aiosync._deadline import Deadline
from aiosync.transports.base import Listener, Transport

__all__ = [
    "CarrierListener",
    "MPTransport",
    "MessagePipe",
    "is_ours",
    "missing",
    "refuse_if_full",
    "split_messages",
]

_MAGIC = b"aiosync\x01"
_TAG_SIZE = 8
_HEAD_SIZE = len(_MAGIC) + _TAG_SIZE


def is_ours(message: bytes) -> bool:
    """Whether ``message`` is one that a transport wrote."""
    return message.startswith(_MAGIC) and len(message) >= _HEAD_SIZE


def refuse_if_full(room: int, size: int, needed: int) -> None:
    """Raise OSError if ``needed`` bytes do not fit into the ``room`` that is left of ``size`` bytes."""
    if needed > size:
        raise OSError(
            errno.EMSGSIZE,
            f"a frame of {needed} bytes never fits into this channel, which holds {size}: a model of so "
            "many tensors can be sent by SharedMemWeightSyncScheme or TCPWeightSyncScheme",
        )
    if needed > room:
        raise OSError(
            errno.ENOBUFS,
            f"a frame of {needed} bytes does not fit: {room} bytes free, the peer does not read",
        )


def missing(buffer: bytearray) -> int:
    """How many bytes are known to be missing of the message that ``buffer`` begins with; at least 1."""
    if len(buffer) < 4:
        return 4 - len(buffer)
    (length,) = struct.unpack_from("!i", buffer)
    start = 4
    if length == -1:
        start = 12
        if len(buffer) < start:
            return start - len(buffer)
        (length,) = struct.unpack_from("!Q", buffer, 4)
    return max(1, start + int(length) - len(buffer))


def split_messages(buffer: bytearray) -> list[bytes]:
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


class MessagePipe(ABC):
    """This process's end of a two-way channel of whole messages."""

    @abstractmethod
    def open(self, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Begin to read, on the running loop; after :meth:`close` it may be opened again."""

    @abstractmethod
    def put(self, message: bytes) -> None:
        """Write a message without waiting.

        Raises:
            OSError: it is broken or full.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop reading; idempotent. The channel itself stays as it is."""


class MPTransport(Transport):
    """One connection over a carrier, on the side that begins it.

    Args:
        carrier: its end of the channel.
    """

    def __init__(self, carrier: MessagePipe) -> None:
        super().__init__()
        self.tag = os.urandom(_TAG_SIZE)
        self._carrier = carrier

    async def open(self, deadline: Deadline) -> None:
        """Start to read. The carrier is there from the beginning, so this is instant."""
        self._carrier.open(self.take, self._lost)

    def take(self, message: bytes) -> None:
        """A message has arrived on the carrier."""
        if message[len(_MAGIC) : _HEAD_SIZE] == self.tag and self.check_connection():
            self._feed(message[_HEAD_SIZE:])

    def _write(self, data: bytes) -> None:
        self._carrier.put(_MAGIC + self.tag + data)

    def abandon_loop(self) -> None:
        super().abandon_loop()
        with suppress(RuntimeError):  # parts of it lived on that loop
            self._carrier.close()

    async def _close(self) -> None:
        self._carrier.close()


class _Answering(MPTransport):
    """The other side's: the listener reads the carrier, before it and after it."""

    def __init__(self, carrier: MessagePipe, tag: bytes) -> None:
        super().__init__(carrier)
        self.tag = tag

    async def open(self, deadline: Deadline) -> None:
        """Nothing: the listener reads."""

    async def _close(self) -> None:
        return

    def supersede(self, reason: str) -> None:
        """The worker has begun another connection, or its carrier broke."""
        self._lost(reason)


class _Lane:
    """One worker's carrier, and the connection that runs over it now."""

    def __init__(
        self,
        carrier: MessagePipe,
        on_connection: Callable[[Transport], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.carrier = carrier
        self._on_lost = on_lost
        self.current: _Answering | None = None
        self._on_connection: Callable[[Transport], None] | None = on_connection
        carrier.open(self._message, self._broken)

    def _message(self, message: bytes) -> None:
        tag = message[len(_MAGIC) : _HEAD_SIZE]
        current = self.current
        if current is None or current.tag != tag:
            if self._on_connection is None:
                return
            self.current = _Answering(self.carrier, tag)
            if current is not None:
                current.supersede("its worker has begun a new connection")
            self._on_connection(self.current)
            current = self.current
        current.take(message)

    def _broken(self, reason: str) -> None:
        if self.current is not None:
            self.current.supersede(reason)
        self._on_lost(reason)

    def admit_nobody(self) -> None:
        self._on_connection = None


class CarrierListener(Listener):
    """One carrier per worker, there from the beginning. A subclass says what they are."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._on_connection: Callable[[Transport], None] | None = None
        self._on_lost: Callable[[int, str], None] | None = None

    @abstractmethod
    def carriers(self) -> dict[int, MessagePipe]:
        """Worker -> this process's end of its channel."""

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """Read all carriers; a worker's connection begins with its first message."""
        self._on_connection, self._on_lost = on_connection, on_lost
        for worker, carrier in self.carriers().items():
            self._lanes[worker] = self._lane(worker, carrier)

    def _lane(self, worker: int, carrier: MessagePipe) -> _Lane:
        assert self._on_connection is not None and self._on_lost is not None
        return _Lane(carrier, self._on_connection, partial(self._on_lost, worker))

    def worker_of(self, transport: Transport) -> int | None:
        """Whose lane ``transport`` runs on, if it still does."""
        return next((w for w, lane in self._lanes.items() if lane.current is transport), None)

    def exchange(self, worker: int, carrier: MessagePipe) -> None:
        """Go on with another channel to this worker."""
        self._lanes.pop(worker).carrier.close()
        self._lanes[worker] = self._lane(worker, carrier)

    def stop(self) -> None:
        """Accept no more connections. Those that are open can still send a Bye."""
        for lane in self._lanes.values():
            lane.admit_nobody()

    def close(self) -> None:
        """Stop reading; idempotent."""
        for lane in self._lanes.values():
            lane.carrier.close()
        self._lanes.clear()
