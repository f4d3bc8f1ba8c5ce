"""A buffer that one thread fills while another sends its first blocks."""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from aiosync.weights.codec import checksum_of
from aiosync.weights.copying import Pairs, ProcessorYielder, Range, copy_with_torch, split_plain

_LEAD = 4
"""Blocks that are copied ahead of the sending thread. They are few, to be in a cache when they are sent."""

_PATIENCE = 0.005
"""Seconds that the copy waits for the sending thread. If that takes longer, the network is slow."""


class Filling(ABC):
    """A buffer that is being filled, block by block from its beginning.

    The thread that fills a block also computes its checksum, while the block is in the thread's cache.
    """

    @abstractmethod
    def ready(self, block: int) -> bool:
        """Return whether ``block`` and all blocks before it are filled."""

    @property
    @abstractmethod
    def whole(self) -> bool:
        """Whether all blocks are filled."""

    @abstractmethod
    def checksum(self, block: int) -> int:
        """Return the checksum of a filled block."""

    @abstractmethod
    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from any thread, when more blocks are filled or filling has ended."""


class BlockCopy(Filling):
    """A copy into one buffer, block by block. A thread that needs a block copies up to that block.

    So a connection can send the first block before the last is copied. A thread that needs a block waits
    hardly longer than the block's copy takes. :meth:`complete` copies the rest. It may stay a few blocks
    ahead of the sending threads, as long as they are fast.

    Args:
        buffer: 1-D uint8, in CPU memory; its first ``nbytes`` bytes are in use.
        pairs: (view of the buffer, source). The constructor copies those that ``memmove`` cannot copy; the
            caller has waited for their devices.
        block: size of a block in bytes.
        checked: whether to compute checksums.
    """

    def __init__(
        self, buffer: Tensor, nbytes: int, pairs: Pairs, block: int, *, checked: bool = True
    ) -> None:
        plain, rest = split_plain(pairs)
        copy_with_torch(rest, lambda: False, settled=True)
        ranges = sorted((d.data_ptr(), s.data_ptr(), d.nbytes) for d, s in plain)
        self._memory = buffer.numpy().data[:nbytes]
        self._start = buffer.data_ptr()
        self._block = block
        self._checked = checked
        self._checksums: list[int] = []  # one per copied block; 0 each if no checksums are wanted
        self._alive: Pairs = plain  # keeps the memory of the ranges that are still to be copied
        self._ranges = iter(ranges)
        self._range: Range | None = next(self._ranges, None)
        self._lock = threading.Lock()
        self._asked = 0  # the largest block that was asked for
        self._waiting = False  # whether a thread waits for a block
        self._nearer = threading.Event()  # set when the sending thread has caught up
        self._give_way = ProcessorYielder()

    def ready(self, block: int) -> bool:
        self._asked = max(self._asked, block)
        self._waiting = True
        self._copy_up_to(block)
        self._waiting = False
        if self._lead <= _LEAD // 2:
            self._nearer.set()
        return True

    @property
    def whole(self) -> bool:
        return len(self._checksums) * self._block >= len(self._memory)

    def complete(self, *, paced: bool) -> None:
        """Copy all blocks. ``paced``: stay only a few blocks ahead of the threads that ask for blocks."""
        last = -(-len(self._memory) // self._block) - 1
        while paced and len(self._checksums) <= last:
            self._nearer.clear()
            self._copy_up_to(min(self._asked + _LEAD, last))
            if self._lead > _LEAD // 2:
                paced = self._nearer.wait(_PATIENCE)
        while len(self._checksums) <= last:
            self._copy_up_to(len(self._checksums))
            if self._waiting:
                time.sleep(0)  # lets a thread that waits for the lock copy the block that it needs

    @property
    def _lead(self) -> int:
        return len(self._checksums) - self._asked

    def checksum(self, block: int) -> int:
        return self._checksums[block]

    def on_more(self, callback: Callable[[], None]) -> None:
        callback()  # at once: ready() always returns true

    def _copy_up_to(self, block: int) -> None:
        done = self._checksums
        while len(done) <= block:
            with self._lock:
                begin = len(done) * self._block
                if len(done) <= block:
                    self._copy_until(self._start + begin + self._block)
                    copied = self._memory[begin : begin + self._block]  # still in the cache
                    done.append(checksum_of(copied) if self._checked else 0)
            self._give_way()

    def _copy_until(self, end: int) -> None:
        while self._range is not None and self._range[0] < end:
            destination, source, nbytes = self._range
            piece = min(nbytes, end - destination)
            ctypes.memmove(destination, source, piece)  # releases the GIL
            rest = nbytes - piece
            self._range = (destination + piece, source + piece, rest) if rest else next(self._ranges, None)
        if self._range is None:
            self._alive = []
