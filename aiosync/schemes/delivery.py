"""How a version gets to one worker: by telling it where it lies, or by sending the bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiosync.protocol.events import Fetched
from aiosync.protocol.frames import Chunk, End, encode
from aiosync.protocol.stream import BLOCK
from aiosync.schemes.ensemble import Member
from aiosync.schemes.group import Published, WeightGroup
from aiosync.schemes.landing import block_of, memory_of
from aiosync.transports.outbox import NotYet
from aiosync.transports.tcp import TCPTransport
from aiosync.weights.arena import Slot
from aiosync.weights.checksum import checksum_of, digest_of
from aiosync.weights.codec import Codec
from aiosync.weights.codec import encode as encode_block
from aiosync.weights.layout import Layout

__all__ = ["ByReference", "ByStream", "Delivery", "Outgoing", "Variant"]

_NOTHING = memoryview(b"")


class Delivery(ABC):
    """One worker's.

    Attributes:
        maps: whether the worker reads the sender's own memory.
        carries: whether anything has to be moved or kept for it besides the update frame.
        holds: whether it goes on reading a slot while that version is in service (it views the memory), or
            only until it has answered (it copied).
    """

    maps: ClassVar[bool]
    carries: ClassVar[bool] = True
    holds = False

    @abstractmethod
    def payload(self, published: Published, fetched: Fetched) -> dict[str, Any]:
        """What the update frame says to a worker that asked for it so."""

    def enter(self, link: Member) -> None:
        """Whose it is."""
        return

    def may_begin(self, published: Published) -> bool:
        """Whether the worker can have it now; if not, it is served again when it can."""
        return True

    def instead(self, due: Published) -> Published:
        """What the worker gets now: what is due, or one before it that is ready when that never would be."""
        return due

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
        """The update frame has been written. ``on_sent``: the slot is not needed any more."""
        return

    def knows(self, codecs: Sequence[str]) -> None:
        """Which encodings the worker can read."""
        return

    def base(self) -> Slot | None:
        """A further slot that is read while the update is being sent."""
        return None

    def cut(self) -> bool:
        """Stop reading the slot, now; returns whether that took the update back."""
        return False

    @property
    def reads_on(self) -> bool:
        """Whether the worker reads the slot until it answers, though all has been sent; it notices if the
        slot is written over meanwhile."""
        return False

    def answered(self) -> None:
        """The worker has done with what it was told of last, whatever has become of it."""
        return

    def leave(self) -> None:
        """The worker is gone."""
        return

    @property
    def progress(self) -> int:
        """Bytes of the connection's that the kernel has taken, where the connection carries the weights."""
        return 0

    @property
    def moved(self) -> Hashable:
        """Differs from what it was as long as anything moves."""
        return None


class ByReference(Delivery):
    """The worker maps the slots, and is told which came and went since it was last told.

    Args:
        group: whose versions.
        holds: see :class:`Delivery`.
    """

    maps = True
    carries = False

    def __init__(self, group: WeightGroup, *, holds: bool) -> None:
        self.holds = holds
        self._group = group
        self._told: list[int] = []

    def may_begin(self, published: Published) -> bool:
        """Only of a version that is whole."""
        return published.copying is None or published.copying.whole

    def payload(self, published: Published, fetched: Fetched) -> dict[str, Any]:
        """Where the version lies."""
        slots, told = self._group.arena.slots, self._told
        there = [slot.index for slot in slots]
        payload: dict[str, Any] = {"slot": published.slot.index}
        if there != told:
            new = [slot for slot in slots if slot.index not in told]
            payload["new"] = [[slot.index, slot.segment.handle or {}] for slot in new]
            payload["gone"] = [index for index in told if index not in there]
            self._told = there
        return payload


@dataclass(frozen=True)
class Variant:
    """In which form a version is sent.

    Attributes:
        codec: how blocks are encoded.
        base: the version that they are encoded against; -1: none.
        shared: blocks that would go as they are stay where they are.
    """

    codec: Codec
    base: int
    shared: bool = False


class Outgoing:
    """A version as chunks, in one form. Each is made when the first worker gets to it, and kept for the rest.

    A worker may be served by the connections' thread or, if there is little to send, by the event loop's.

    Args:
        published: the version.
        layout: its layout.
        variant: the form.
        base: the slot of the version that it is encoded against, if it is against one.
    """

    def __init__(self, published: Published, layout: Layout, variant: Variant, base: Slot | None) -> None:
        self.nbytes = layout.nbytes
        self._copying = published.copying
        self._memory = memory_of(published.slot, layout.nbytes)
        self._base = memory_of(base, layout.nbytes) if base is not None else None
        self._codec = variant.codec
        self._shared = variant.shared
        self._widths = _widths(layout)
        self._chunks: list[tuple[bytes, memoryview]] = []
        self._sums: list[int] = []
        self._lock = threading.Lock()

    def chunk(self, index: int) -> tuple[bytes, memoryview] | None:
        """A chunk's frame and its raw bytes; None if there are no more.

        Raises:
            NotYet: it is still to be copied, or to arrive.
        """
        with self._lock:
            while index == len(self._chunks) and len(self._sums) < len(self._widths):
                self._encode_next()
        return self._chunks[index] if index < len(self._chunks) else None

    def _encode_next(self) -> None:
        block = len(self._sums)
        copying, data = self._copying, block_of(self._memory, block)
        if copying is not None and not copying.ready(block):
            raise NotYet
        checksum = checksum_of(data) if copying is None else copying.checksum(block)
        base = block_of(self._base, block) if self._base is not None else None
        encoded = encode_block(self._codec, data, base, self._widths[block])
        self._sums.append(checksum)
        if encoded is not None:
            encoding, raw = ("shared", _NOTHING) if self._shared else encoded
            head = Chunk(block=block, size=len(raw), checksum=checksum, encoding=encoding)
            self._chunks.append((encode(head), raw))

    def on_more(self, callback: Callable[[], None]) -> None:
        """See :class:`~aiosync.transports.channel.Body`."""
        assert self._copying is not None
        self._copying.on_more(callback)

    def end(self) -> bytes:
        """The frame that is sent after the last chunk."""
        return encode(End(digest=digest_of(self._sums)))


def _widths(layout: Layout) -> list[int]:
    """Block by block, the bytes of an element of the entry that the block begins in."""
    widths = []
    entries = iter(layout.entries)
    width, until = 1, 0
    for start in range(0, layout.nbytes, BLOCK):
        while until <= start:
            entry = next(entries, None)
            if entry is None:
                break
            width, until = min(entry.dtype.itemsize, 8), entry.offset + max(entry.nbytes, 1)
        widths.append(width)
    return widths


class ByStream(Delivery):
    """The connection carries the bytes.

    Args:
        transport: the worker's.
        group: whose versions.
        codec: in which form they are wanted.
        ready: what the group's workers are being sent, in each form; of the newest version only.
    """

    maps = False

    def __init__(
        self,
        transport: TCPTransport,
        group: WeightGroup,
        codec: Codec,
        ready: dict[tuple[int, Variant], Outgoing],
    ) -> None:
        self._transport = transport
        self._group = group
        self._codec: Codec = codec
        self._ready = ready
        self._variant = Variant("full", -1)

    def knows(self, codecs: Sequence[str]) -> None:
        """Which encodings the worker can read."""
        if self._codec not in codecs:
            self._codec = "full"

    def payload(self, published: Published, fetched: Fetched) -> dict[str, Any]:
        """What it is encoded against: the version that the worker has, if that is of use and still here; and
        where it lies, if the worker can look."""
        have = fetched.have
        same = have == published.version
        partial = self._group.changes.since(have) is not None
        of_use = self._codec == "delta" or same or partial
        based = of_use and have >= 0 and self._group.slot_of(have) is not None
        base = have if based else -1
        handle = published.slot.segment.handle  # only of slots that were made to be read by others
        if not fetched.maps or self._codec != "full" or handle is None or handle["kind"] != "memfd":
            self._variant = Variant(self._codec, base)
            return {"base": base}
        self._variant = Variant(self._codec, base, shared=True)
        return {"base": base, "memory": [handle["fd"], handle["inode"]]}

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
        """Send the bytes."""
        variant = self._variant
        key = (published.round, variant)
        outgoing = self._ready.get(key)
        if outgoing is None:
            base = self._group.slot_of(variant.base)
            outgoing = Outgoing(published, self._group.arena.layout, variant, base)
            for other in [k for k in self._ready if k[0] != published.round]:
                del self._ready[other]
            self._ready[key] = outgoing
        self._transport.stream(outgoing, on_sent)

    @property
    def reads_on(self) -> bool:
        """See :class:`Delivery`."""
        return self._variant.shared

    def base(self) -> Slot | None:
        """A further slot that is read while this update is being sent."""
        return self._group.slot_of(self._variant.base)

    def cut(self) -> bool:
        """See :meth:`Delivery.cut`."""
        return self._transport.cut()

    @property
    def progress(self) -> int:
        """See :class:`Delivery`."""
        return self._transport.progress

    @property
    def moved(self) -> Hashable:
        """See :class:`Delivery`."""
        return self._transport.progress, self._transport.unread
