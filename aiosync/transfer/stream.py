"""A version as blocks over a socket: the transfer, and the sender's side of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aiosync.errors import ArenaAllocationError
from aiosync.protocol.frames import Chunk, End, Fetch
from aiosync.protocol.framing import encode
from aiosync.protocol.payloads import StreamPayload
from aiosync.protocol.payloads import encode as encode_payload
from aiosync.protocol.stream import BLOCK
from aiosync.transfer.base import InboundTransfer, MemoryAccess, OutboundTransfer, Streams, Transfer
from aiosync.transfer.slots import SlotVersion
from aiosync.transfer.stream_inbound import StreamInbound, block_of, memory_of
from aiosync.transports.base import Transport
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.transports.tcp.send_queue import NotYet
from aiosync.weights.arena import Slot
from aiosync.weights.codec import Codec, checksum_of, digest_of
from aiosync.weights.codec import encode as encode_block
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = ["EncodedVersion", "Encoding", "StreamOutbound", "StreamTransfer"]


_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class Encoding:
    """In which form a version is sent.

    Attributes:
        codec: how blocks are encoded.
        base: the version that they are encoded against; -1: none.
        shared: blocks that would go as they are stay where they are.
    """

    codec: Codec
    base: int
    shared: bool = False


class EncodedVersion:
    """A version as chunks, in one form. Each is made when the first worker gets to it, and kept for the rest.

    A worker may be served by the connections' thread or, if there is little to send, by the event loop's.

    Args:
        published: the version.
        layout: its layout.
        variant: the form.
        base: the slot of the version that it is encoded against, if it is against one.
    """

    def __init__(self, published: SlotVersion, layout: Layout, variant: Encoding, base: Slot | None) -> None:
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


class StreamTransfer(Transfer):
    """The connection carries the weights, in blocks.

    Args:
        codec: how blocks are encoded.
        readable: whether slots are made so that a worker on this machine can read blocks in them.
    """

    streams: Streams = "checked"

    def __init__(self, codec: Codec = "full", *, readable: bool = False) -> None:
        self._codec: Codec = codec
        self._readable = readable
        # What each group's workers are being sent, in each form; of the newest version only.
        self._encoded: dict[WorkerGroup, dict[tuple[int, Encoding], EncodedVersion]] = {}

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        if self._readable and nbytes > BLOCK and "memfd_create" in dir(os):
            with suppress(ArenaAllocationError):  # shared memory may be limited; it is not needed
                return Segment.shared(nbytes)
        return Segment.private(nbytes)

    def outbound(self, transport: Transport, group: WorkerGroup) -> OutboundTransfer:
        assert isinstance(transport, TCPTransport)
        return StreamOutbound(transport, group, self._codec, self._encoded.setdefault(group, {}))

    def inbound(self, layout: Layout, transport: Transport, source: torch.device) -> InboundTransfer:
        return StreamInbound(layout)

    def close(self) -> None:
        self._encoded.clear()


class StreamOutbound(OutboundTransfer):
    """The sender's side.

    Args:
        transport: the worker's connection.
        group: the worker's group.
        codec: how blocks are encoded, if the worker can decode that.
        ready: the group's newest version in each form that a worker is being sent.
    """

    def __init__(
        self,
        transport: TCPTransport,
        group: WorkerGroup,
        codec: Codec,
        ready: dict[tuple[int, Encoding], EncodedVersion],
    ) -> None:
        self._transport = transport
        self._group = group
        self._codec: Codec = codec
        self._ready = ready
        self._variant = Encoding("full", -1)

    def accept_codecs(self, codecs: Sequence[str]) -> None:
        if self._codec not in codecs:
            self._codec = "full"

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        have = fetched.have
        same = have == published.version
        partial = self._group.changes.since(have) is not None
        of_use = self._codec == "delta" or same or partial
        based = of_use and have >= 0 and self._group.slot_of(have) is not None
        base = have if based else -1
        handle = published.slot.segment.handle  # only of slots that were made to be read by others
        if not fetched.maps or self._codec != "full" or handle is None or handle["kind"] != "memfd":
            self._variant = Encoding(self._codec, base)
            return encode_payload(StreamPayload(base))
        self._variant = Encoding(self._codec, base, shared=True)
        return encode_payload(StreamPayload(base, (handle["fd"], handle["inode"])))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        variant = self._variant
        key = (published.round, variant)
        outgoing = self._ready.get(key)
        if outgoing is None:
            base = self._group.slot_of(variant.base)
            outgoing = EncodedVersion(published, self._group.pool.layout, variant, base)
            for other in [k for k in self._ready if k[0] != published.round]:
                del self._ready[other]
            self._ready[key] = outgoing
        self._transport.stream(outgoing, on_sent)

    @property
    def access(self) -> MemoryAccess:  # type: ignore[override]
        """CHECKED if the worker reads blocks in the slot, else PRIVATE."""
        return MemoryAccess.CHECKED if self._variant.shared else MemoryAccess.PRIVATE

    def base_slot(self) -> Slot | None:
        return self._group.slot_of(self._variant.base)

    def cancel(self) -> bool:
        return self._transport.cut()

    @property
    def progress(self) -> int:
        return self._transport.progress

    @property
    def moved(self) -> Hashable:
        return self._transport.progress, self._transport.unread
