"""Updates whose bytes the connection brings: they land in slots of this process.

Two slots take turns. The next update is asked for when the last one has been answered for, so one of them
is free by then: the connection's thread fills it, and checks every block as it comes, while the other is
in service. Who may write into a slot changes with the messages: from the Fetch until the update is handed
to the event loop the back slot is the thread's.
"""

from __future__ import annotations

import os

from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Chunk, End, Update
from aiosync.protocol.payloads import StreamPayload
from aiosync.protocol.payloads import decode as decode_payload
from aiosync.protocol.stream import BLOCK, block_count
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.transports.base import Transport
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.weights.arena import Slot
from aiosync.weights.codec import checksum_of, decode, digest_of
from aiosync.weights.copying import ProcessorYielder, read_at
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["BaseLostError", "StreamInbound", "block_of", "memory_of"]


class BaseLostError(ProtocolError):
    """What an update builds on is not what the sender thinks it is: all of it is needed, and over the
    connection."""


class StreamInbound(DoubleBuffer):
    """Updates that the connection brings, and what is known of their bytes.

    Args:
        layout: what a slot holds.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._blocks = block_count(layout.nbytes)
        self._base: memoryview | None = None
        self._encoded = memoryview(b"")
        self._memory = memoryview(b"")
        self._sender = 0
        self._source = -1
        self._shared = False
        self._give_way = ProcessorYielder()
        self._sums: dict[int, int] = {}
        self._filled = 0
        self._damage: ProtocolError | None = None

    # -- the event loop's side ------------------------------------------------------------------------

    def attach(self, transport: Transport) -> None:
        """Take in the bodies that this connection brings."""
        assert isinstance(transport, TCPTransport)
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

    # -- the thread's side ----------------------------------------------------------------------------

    def begin(self, update: Update) -> None:
        """The body of an update follows, perhaps as what differs from the version in service."""
        slot, front = self._slots()
        if slot is None:
            raise ProtocolError("an update came that was not asked for")
        payload = decode_payload(update.payload, StreamPayload)
        based = payload.base != -1
        self._base = memory_of(front, self._layout.nbytes) if front is not None and based else None
        self._slot = slot
        self._memory = memory_of(slot, self._layout.nbytes)
        self._sums = {}
        self._filled = 0
        self._damage = None
        self._shared = payload.memory is not None
        if payload.memory is not None:
            self._open_memory(*payload.memory)

    def _open_memory(self, fd: int, inode: int) -> None:
        """Open the sender's memory that holds the update."""
        if not self._sender:
            raise ProtocolError(f"an update lies in memory that this process cannot read: {fd}, {inode}")
        try:
            self._source = Segment.open(self._sender, fd, inode, self._layout.nbytes)
        except (OSError, ProtocolError) as exc:
            self._harm(f"the sender's memory cannot be read: {exc}")

    def _slots(self) -> tuple[Slot | None, Slot | None]:
        """Where to put the next update, and the version in service."""
        return self.free_slot(), self._newest

    def place(self, chunk: Chunk) -> memoryview:
        """Where a block's bytes belong."""
        if not 0 <= chunk.block < self._blocks or chunk.block in self._sums:
            raise ProtocolError(f"block {chunk.block} came twice, or there are only {self._blocks}")
        place = block_of(self._memory, chunk.block)
        if chunk.encoding == "raw":
            return place
        if chunk.encoding == "shared" and self._shared:
            return memoryview(b"")
        if not 0 < chunk.size < len(place):
            raise ProtocolError(f"an encoded block of {chunk.size} bytes, expected less than {len(place)}")
        self._encoded = memoryview(bytearray(chunk.size))
        return self._encoded

    def placed(self, chunk: Chunk) -> None:
        """A block is there: decode and check it."""
        place = block_of(self._memory, chunk.block)
        if chunk.encoding == "shared":
            if self._source >= 0:
                read_at(self._source, place, chunk.block * BLOCK)  # the checksum tells whether it did
                self._give_way()
        elif chunk.encoding != "raw":
            base = None if self._base is None else block_of(self._base, chunk.block)
            try:
                decode(chunk.encoding, self._encoded, place, base)
            except ProtocolError as exc:
                self._harm(str(exc))
        # What is there, and not what was said: it is from these that the digest is made.
        self._sums[chunk.block] = found = checksum_of(place)
        if found != chunk.checksum:
            self._harm(f"block {chunk.block} arrived damaged (its checksum differs)")

    def finish(self, end: End) -> None:
        """All that differs is there: take the rest from the version before, and check the whole."""
        self._fill_up_to(self._blocks)
        if digest_of([self._sums[block] for block in range(self._blocks)]) != end.digest:
            self._harm("an update arrived damaged (its digest differs)")
        self._base = None
        self._let_go()

    def _fill_up_to(self, end: int) -> None:
        """Blocks before this one that have not come are those of the version before."""
        for block in range(self._filled, end):
            if block not in self._sums:
                if self._base is None:
                    raise ProtocolError(f"block {block} of {self._blocks} has not come")
                place = block_of(self._memory, block)
                place[:] = block_of(self._base, block)
                # Computed anew: the version in service is the model's, which may have written into it.
                self._sums[block] = checksum_of(place)
        self._filled = max(self._filled, end)

    def _harm(self, what: str) -> None:
        if self._damage is None:
            again = self._base is not None or self._shared
            self._damage = BaseLostError(what) if again else ProtocolError(what)
        if self._shared:
            self._sender = 0  # it may have been written over: from now on the connection brings all

    def abandon(self) -> None:
        """What has come is of no use."""
        self._slot = self._base = None
        self._let_go()

    def _let_go(self) -> None:
        source, self._source = self._source, -1
        if source >= 0:
            os.close(source)


def memory_of(slot: Slot, nbytes: int) -> memoryview:
    """A slot's bytes, as many as its layout has."""
    return slot.segment.buffer.numpy().data[:nbytes]


def block_of(memory: memoryview, block: int) -> memoryview:
    """One block of a slot's bytes."""
    return memory[block * BLOCK : (block + 1) * BLOCK]
