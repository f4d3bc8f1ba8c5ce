"""Versions that the connection carries, in blocks with checksums.

The worker has two slots: one in service, and the back slot, which the next update is written into. It sends a
Fetch when it has answered the last update, so one slot is free then. From the Fetch until the event loop gets
the update, only the connection's thread uses the back slot. It writes each block and verifies its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiosync.errors import ArenaAllocationError, ProtocolError
from aiosync.protocol import framing
from aiosync.protocol.frames import Chunk, End, Fetch, Update
from aiosync.protocol.stream import BLOCK, block_count
from aiosync.transfer.base import InboundTransfer, MemoryAccess, OutboundTransfer, Transfer
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.transfer.encoded_version import (
    NOTHING,
    EncodedVersion,
    EncodedVersions,
    Encoding,
    StreamPayload,
    block_of,
    memory_of,
)
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.base import FramedTransport
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.weights import codec as block_codec
from aiosync.weights.arena import Slot
from aiosync.weights.codec import Codec, checksum_of, digest_of
from aiosync.weights.copying import ProcessorYielder, read_at
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup


@dataclass(eq=False, repr=False)
class StreamTransfer(Transfer):
    """The connection carries the weights, in blocks."""

    codec: Codec = "full"
    readable: bool = field(default=False, kw_only=True)  # workers on this machine may read the slots
    # What each group's workers are sent, in each encoding. Only of the newest version.
    _encoded: dict[WorkerGroup, EncodedVersions] = field(default_factory=dict, init=False)

    streams = "checked"

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        if self.readable and nbytes > BLOCK and "memfd_create" in dir(os):
            with suppress(ArenaAllocationError):  # shared memory may be limited; private memory will do
                return Segment.shared(nbytes)
        return Segment.private(nbytes)

    def outbound(self, transport: FramedTransport, group: WorkerGroup) -> OutboundTransfer:
        assert isinstance(transport, TCPConnection)
        return StreamOutbound(transport, group, self.codec, self._encoded.setdefault(group, {}))

    def inbound(self, layout: Layout, transport: FramedTransport, source: torch.device) -> InboundTransfer:
        return StreamInbound(layout)

    def close(self) -> None:
        self._encoded.clear()


# -- the sender's side -------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class StreamOutbound(OutboundTransfer):
    """The sender's side."""

    sends_update = True
    transport: TCPConnection
    group: WorkerGroup
    codec: Codec  # "full" if the worker cannot decode the scheme's codec
    encoded: EncodedVersions  # of the group's newest version; shared by all workers of the group
    # CHECKED if the worker reads blocks in the slot, else PRIVATE.
    access: MemoryAccess = field(default=MemoryAccess.PRIVATE, init=False)
    _version: EncodedVersion | None = field(default=None, init=False)  # to be sent next

    def accept_codecs(self, codecs: Sequence[str]) -> None:
        if self.codec not in codecs:
            self.codec = "full"

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        have = fetched.have
        partial = self.group.changes.since(have) is not None
        saves_bytes = self.codec == "delta" or have == published.version or partial
        base = have if saves_bytes and have >= 0 and self.group.slot_of(have) is not None else -1
        memory = None
        handle = published.slot.segment.handle
        if fetched.maps and self.codec == "full" and handle is not None and handle["kind"] == "memfd":
            memory = handle["fd"], handle["inode"]
        self.access = MemoryAccess.CHECKED if memory is not None else MemoryAccess.PRIVATE
        encoding = Encoding(self.codec, base, shared=memory is not None)
        version = self.encoded.get((published.round, encoding))
        if version is None:
            slot, layout = self.group.slot_of(base), self.group.pool.layout
            version = EncodedVersion(published, layout, encoding, slot, StreamPayload(base, memory))
            for older in [k for k in self.encoded if k[0] != published.round]:
                del self.encoded[older]
            self.encoded[published.round, encoding] = version
        self._version = version
        return version.payload

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        # From here on only the connection refers to it: a worker may take long to answer.
        version, self._version = self._version, None
        assert version is not None
        try:
            whole = version.whole()
        except Exception as exc:  # noqa: BLE001 - ends this connection, and no other one
            self.transport.give_up(f"this side of its connection failed: {exc!r}")
            return
        if whole is None:
            self.transport.stream(version, on_sent)
        else:
            self.transport.send_whole(whole)
            on_sent()

    def base_slot(self) -> Slot | None:
        return self._version.base if self._version is not None else None

    def answered(self) -> None:
        self._version = None

    def cancel(self) -> bool:
        return self.transport.cut()

    @property
    def progress(self) -> int:
        return self.transport.progress

    @property
    def moved(self) -> Hashable:
        return self.transport.progress, self.transport.unread


# -- the worker's side -------------------------------------------------------------------------------


class BaseLostError(ProtocolError):
    """The update cannot be applied as it was sent. The sender must send all entries over the connection."""


class StreamInbound(DoubleBuffer):
    """The worker's side. The connection's thread writes the blocks into the back slot."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._blocks = block_count(layout.nbytes)
        # The process id of the sender, if this process can read its memory; else 0.
        self._sender = 0
        # A descriptor of the sender's memory that has the update's blocks; -1: they arrive in chunks.
        self._source = -1
        self._shared = False
        self._yield_processor = ProcessorYielder()
        # The back slot, and the slot whose blocks the update leaves out.
        self._memory = NOTHING
        self._base: memoryview | None = None
        # The bytes of a chunk that has to be decoded.
        self._encoded = NOTHING
        # Block -> the checksum of what is in the back slot.
        self._sums: dict[int, int] = {}
        # All blocks before this one are in the back slot.
        self._filled = 0
        # Why the update cannot be used.
        self._damage: ProtocolError | None = None

    # -- on the event loop ----------------------------------------------------------------------------

    def attach(self, transport: FramedTransport) -> None:
        assert isinstance(transport, TCPConnection)
        self._sender = transport.shares_with
        transport.land(self)

    @property
    def can_read_sender(self) -> bool:
        return self._sender != 0

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        if self._damage is not None:
            raise self._damage
        return super().find(update)

    def close(self) -> None:
        super().close()
        self._sender = 0

    # -- in the connection's thread -------------------------------------------------------------------

    def begin(self, update: Update) -> None:
        """Prepare the back slot: the blocks of an update follow."""
        slot, front = self._slots()
        if slot is None:
            raise ProtocolError("an update arrived that was not requested")
        payload = framing.decode_payload(update, StreamPayload)
        based = payload.base != -1
        self._base = memory_of(front, self._layout.nbytes) if front is not None and based else None
        self._slot = slot
        self._memory = memory_of(slot, self._layout.nbytes)
        self._sums = {}
        self._filled = 0
        self._damage = None
        self._shared = payload.memory is not None
        if payload.memory is None:
            return
        if not self._sender:
            raise ProtocolError(f"an update lies in memory that this process cannot read: {payload.memory}")
        try:
            self._source = Segment.open(self._sender, *payload.memory, self._layout.nbytes)
        except (OSError, ProtocolError) as exc:
            self._fail(f"the sender's memory cannot be read: {exc}")

    def _slots(self) -> tuple[Slot | None, Slot | None]:
        """The slot for the next update, and the slot of the version in service."""
        return self.free_slot(), self._newest

    def place(self, chunk: Chunk) -> memoryview:
        """The buffer that a chunk's bytes are read into."""
        if not 0 <= chunk.block < self._blocks or chunk.block in self._sums:
            raise ProtocolError(f"block {chunk.block} arrived twice, or is not one of {self._blocks}")
        place = block_of(self._memory, chunk.block)
        if chunk.encoding == "raw":
            return place
        if chunk.encoding == "shared" and self._shared:
            return NOTHING
        if not 0 < chunk.size < len(place):
            raise ProtocolError(f"an encoded block of {chunk.size} bytes, expected less than {len(place)}")
        self._encoded = memoryview(bytearray(chunk.size))
        return self._encoded

    def placed(self, chunk: Chunk) -> None:
        """The chunk's bytes have been read: decode the block and verify its checksum."""
        place = block_of(self._memory, chunk.block)
        if chunk.encoding == "shared":
            if self._source >= 0:
                read_at(self._source, place, chunk.block * BLOCK)  # a short read fails the checksum
                self._yield_processor()
        elif chunk.encoding != "raw":
            base = None if self._base is None else block_of(self._base, chunk.block)
            try:
                block_codec.decode(chunk.encoding, self._encoded, place, base)
            except ProtocolError as exc:
                self._fail(str(exc))
        # The digest is computed from the checksums of the slot's bytes, not from those that the sender sent.
        self._sums[chunk.block] = found = checksum_of(place)
        if found != chunk.checksum:
            self._fail(f"block {chunk.block} arrived damaged (its checksum differs)")

    def finish(self, end: End) -> None:
        """All chunks have arrived: copy the other blocks from the base, and verify the digest."""
        self._fill_up_to(self._blocks)
        if digest_of([self._sums[block] for block in range(self._blocks)]) != end.digest:
            self._fail("an update arrived damaged (its digest differs)")
        self._base = None
        self._close_source()

    def _fill_up_to(self, end: int) -> None:
        """Copy blocks before ``end`` that have not arrived from the base."""
        for block in range(self._filled, end):
            if block not in self._sums:
                if self._base is None:
                    raise ProtocolError(f"block {block} of {self._blocks} did not arrive")
                place = block_of(self._memory, block)
                place[:] = block_of(self._base, block)
                # Compute it again: the model may have written into the version in service.
                self._sums[block] = checksum_of(place)
        self._filled = max(self._filled, end)

    def _fail(self, reason: str) -> None:
        """The update cannot be used. :meth:`find` raises the first reason."""
        if self._damage is None:
            again = self._base is not None or self._shared
            self._damage = BaseLostError(reason) if again else ProtocolError(reason)
        if self._shared:
            self._sender = 0  # the slot may have been overwritten: later blocks come over the connection

    def abandon(self) -> None:
        """The update will not be completed."""
        self._slot = self._base = None
        self._close_source()

    def _close_source(self) -> None:
        source, self._source = self._source, -1
        if source >= 0:
            os.close(source)
