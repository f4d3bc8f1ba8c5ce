"""A version as the bytes that go over a connection: encoded once for all workers that need it so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from aiosync.protocol import framing
from aiosync.protocol.frames import Chunk, End
from aiosync.protocol.stream import BLOCK
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.tcp.socket_writer import NotYet
from aiosync.weights import codec as block_codec
from aiosync.weights.arena import Slot
from aiosync.weights.codec import Codec, checksum_of, digest_of
from aiosync.weights.layout import Layout

NOTHING = memoryview(b"")

_SMALL = 1 << 18
"""Bytes of a version of which all workers get the same bytes object, and not its chunks out of the slot."""


class StreamPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an Update frame says of a version that follows in blocks."""

    # The version that blocks are encoded against; -1: none.
    base: int
    # The descriptor and the inode of the sender's memory, if the worker is to read blocks there.
    memory: tuple[int, int] | None = None


def memory_of(slot: Slot, nbytes: int) -> memoryview:
    """A slot's first ``nbytes`` bytes."""
    return slot.segment.buffer.numpy().data[:nbytes]


def block_of(memory: memoryview, block: int) -> memoryview:
    """The bytes of a block in a version's memory."""
    return memory[block * BLOCK : (block + 1) * BLOCK]


class Encoding(NamedTuple):
    """How a version's blocks are encoded."""

    codec: Codec
    base: int  # the version that they are encoded against; -1: none
    shared: bool = False  # the worker reads raw blocks in the slot instead of getting them


class EncodedVersion:
    """A version as a :class:`Body`, in one encoding. The first worker that needs a chunk makes it.

    Called in the connections' thread or, if there is little to send, on the event loop. ``base`` is the slot
    of the version that the blocks are encoded against, ``payload`` what the Update frame says.
    """

    def __init__(
        self,
        published: SlotVersion,
        layout: Layout,
        encoding: Encoding,
        base: Slot | None,
        payload: StreamPayload,
    ) -> None:
        self.base = base
        self._nbytes = layout.nbytes
        self.payload = framing.encode_payload(payload)
        self._copying = published.copying
        self._memory = memory_of(published.slot, layout.nbytes)
        self._base = memory_of(base, layout.nbytes) if base is not None else None
        self._encoding = encoding
        self._widths = _widths(layout)
        self._chunks: list[tuple[bytes, memoryview]] = []
        # The checksums of the blocks that have been encoded.
        self._sums: list[int] = []
        self._lock = threading.Lock()
        # All of a small version's body, once a worker needed it.
        self._whole: bytes | None = None

    def chunk(self, index: int) -> tuple[bytes, memoryview] | None:
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
        encoded = block_codec.encode(self._encoding.codec, data, base, self._widths[block])
        self._sums.append(checksum)
        if encoded is not None:
            name, raw = ("shared", NOTHING) if self._encoding.shared else encoded
            head = Chunk(block=block, size=len(raw), checksum=checksum, encoding=name)
            self._chunks.append((framing.encode(head), raw))

    def on_more(self, callback: Callable[[], None]) -> None:
        assert self._copying is not None
        self._copying.on_more(callback)

    def end(self) -> bytes:
        return framing.encode(End(digest=digest_of(self._sums)))

    def whole(self) -> bytes | None:
        """Return the body of a small version, encoded once for all workers; None: send it in chunks.

        It is a copy, so that a worker that reads slowly keeps no slot.
        """
        if self._whole is None and self._nbytes <= _SMALL and self._copying is None:
            pieces: list[bytes | memoryview] = []
            while (chunk := self.chunk(len(pieces) // 2)) is not None:
                pieces += chunk
            self._whole = b"".join([*pieces, self.end()])
        return self._whole


EncodedVersions = dict[tuple[int, Encoding], EncodedVersion]
"""(round, encoding) -> the version in that encoding."""


def _widths(layout: Layout) -> list[int]:
    """For each block: the bytes of an element of the entry in which the block begins."""
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
