"""A buffer that one thread fills while another sends its first blocks."""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from aiosync.weights.checksum import checksum_of
from aiosync.weights.copying import Courtesy, Pairs, Range, copy_with_torch, split_plain

__all__ = ["BlockCopy", "Filling"]

_LEAD = 4
"""Blocks that are copied ahead of who sends them: so few that a cache still has them by then."""

_PATIENCE = 0.005
"""Seconds after which the copy waits for no sender any more: then the network is slow."""


class Filling(ABC):
    """A buffer that is being filled, block after block from its beginning. The thread that fills it has each
    block in its cache, and so computes its checksum."""

    @abstractmethod
    def ready(self, block: int) -> bool:
        """Whether every block up to this one is there."""

    @property
    @abstractmethod
    def whole(self) -> bool:
        """Whether every block is there."""

    @abstractmethod
    def checksum(self, block: int) -> int:
        """That of a block that is there."""

    @abstractmethod
    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in any thread, when more is there than now, or nothing more will come."""


class BlockCopy(Filling):
    """A copy into one buffer, from its beginning to its end, by the thread that needs the next block first.

    So a network can begin with the first block while the last are still to be copied. Who needs a block
    hardly waits for longer than its copy takes; who only wants the copy to end (:meth:`complete`) may keep a
    few blocks ahead of the others, for as long as they are quick.

    Args:
        buffer: 1-D uint8, in CPU memory.
        nbytes: how much of it is in use.
        pairs: (a view of the buffer, source); what memmove cannot do is copied here and now.
        block: bytes of a block.
        checked: whether checksums are wanted.
    """

    def __init__(
        self, buffer: Tensor, nbytes: int, pairs: Pairs, block: int, *, checked: bool = True
    ) -> None:
        plain, rest = split_plain(pairs)
        copy_with_torch(rest, lambda: False)
        ranges = sorted((d.data_ptr(), s.data_ptr(), d.nbytes) for d, s in plain)
        self._memory = buffer.numpy().data[:nbytes]
        self._start = buffer.data_ptr()
        self._block = block
        self._checked = checked
        self._checksums: list[int] = []
        self._alive: Pairs = plain
        self._ranges = iter(ranges)
        self._range: Range | None = next(self._ranges, None)
        self._lock = threading.Lock()
        self._asked = 0
        self._waiting = False
        self._nearer = threading.Event()
        self._give_way = Courtesy()

    def ready(self, block: int) -> bool:
        """Always: what is not there is copied now."""
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
        """Have every block copied; ``paced``: a few blocks ahead of those who ask for them, if they do."""
        last = -(-len(self._memory) // self._block) - 1
        while paced and len(self._checksums) <= last:
            self._nearer.clear()
            self._copy_up_to(min(self._asked + _LEAD, last))
            if self._lead > _LEAD // 2:
                paced = self._nearer.wait(_PATIENCE)
        while len(self._checksums) <= last:
            self._copy_up_to(len(self._checksums))
            if self._waiting:
                time.sleep(0)  # lets a thread run that needs the next block and waits for the lock

    @property
    def _lead(self) -> int:
        return len(self._checksums) - self._asked

    def checksum(self, block: int) -> int:
        return self._checksums[block]

    def on_more(self, callback: Callable[[], None]) -> None:
        """Never needed."""
        callback()

    def _copy_up_to(self, block: int) -> None:
        done = self._checksums
        while len(done) <= block:
            with self._lock:
                begin = len(done) * self._block
                if len(done) <= block:
                    self._copy_until(self._start + begin + self._block)
                    copied = self._memory[begin : begin + self._block]
                    done.append(checksum_of(copied) if self._checked else 0)  # it is still in the cache
            self._give_way()

    def _copy_until(self, end: int) -> None:
        while self._range is not None and self._range[0] < end:
            destination, source, nbytes = self._range
            piece = min(nbytes, end - destination)
            ctypes.memmove(destination, source, piece)  # lets other threads run meanwhile
            rest = nbytes - piece
            self._range = (destination + piece, source + piece, rest) if rest else next(self._ranges, None)
        if self._range is None:
            self._alive = []
