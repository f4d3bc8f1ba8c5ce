"""How a version gets to one worker: by telling it where it lies, or by sending the bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import xxhash

from aiosync.protocol.frames import Chunk, End, encode
from aiosync.protocol.stream import block_count
from aiosync.schemes.group import Published, WeightGroup
from aiosync.schemes.landing import block_of, digest_of, memory_of
from aiosync.transports.tcp import TCPTransport
from aiosync.weights.arena import Slot

__all__ = ["ByReference", "ByStream", "Delivery", "Outgoing"]


class Delivery(ABC):
    """One worker's.

    Attributes:
        maps: whether the worker reads the sender's own memory.
    """

    maps: ClassVar[bool]

    @abstractmethod
    def payload(self, published: Published, have: int) -> dict[str, Any]:
        """What the update frame says to a worker that has the bytes of version ``have``."""

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
        """The update frame has been written. ``on_sent``: the slot is not needed any more."""
        return

    def cut(self) -> bool:
        """Stop reading the slot, now; returns whether that took the update back."""
        return False

    @property
    def progress(self) -> int:
        """Grows for as long as anything moves."""
        return 0


class ByReference(Delivery):
    """The worker maps the slots, and is told which came and went since it was last told."""

    maps = True

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self._told: dict[int, dict[str, Any]] = {}

    def payload(self, published: Published, have: int) -> dict[str, Any]:
        """Where the version lies."""
        slots = {slot.index: slot.segment.handle or {} for slot in self._group.arena.slots}
        new = [[index, handle] for index, handle in slots.items() if index not in self._told]
        gone = [index for index in self._told if index not in slots]
        self._told = slots
        return {"slot": published.slot.index, "new": new, "gone": gone}


class Outgoing:
    """A version as chunks. Each is made ready when the first worker gets to it, and kept for the others.

    A worker may be served by the connections' thread or, if there is little to send, by the event loop's.
    """

    def __init__(self, slot: Slot, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memory_of(slot, nbytes)
        self._heads: list[bytes] = []
        self._sums: list[int] = []
        self._count = block_count(nbytes)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def chunk(self, index: int) -> tuple[bytes, memoryview]:
        """A chunk's frame and its raw bytes."""
        data = block_of(self._memory, index)
        with self._lock:
            if index == len(self._heads):
                checksum = xxhash.xxh3_64_intdigest(data)
                self._sums.append(checksum)
                self._heads.append(encode(Chunk(block=index, size=len(data), checksum=checksum)))
        return self._heads[index], data

    def end(self) -> bytes:
        """The frame that is sent after the last chunk."""
        return encode(End(digest=digest_of(self._sums)))


class ByStream(Delivery):
    """The connection carries the bytes.

    Args:
        transport: the worker's.
        group: whose versions.
        ready: round -> its chunks, shared by the group's workers; holds the newest only.
    """

    maps = False

    def __init__(self, transport: TCPTransport, group: WeightGroup, ready: dict[int, Outgoing]) -> None:
        self._transport = transport
        self._group = group
        self._ready = ready

    def payload(self, published: Published, have: int) -> dict[str, Any]:
        """What it is encoded against."""
        return {"base": -1}

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
        """Send the bytes."""
        outgoing = self._ready.get(published.round)
        if outgoing is None:
            outgoing = Outgoing(published.slot, self._group.arena.layout.nbytes)
            self._ready.clear()
            self._ready[published.round] = outgoing
        self._transport.stream(outgoing, on_sent)

    def cut(self) -> bool:
        """See :meth:`Delivery.cut`."""
        return self._transport.cut()

    @property
    def progress(self) -> int:
        """Bytes that the kernel has taken."""
        return self._transport.progress
