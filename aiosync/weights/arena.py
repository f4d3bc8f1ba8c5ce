"""The arena: a few slots of one layout, taken once and used again for ever.

Each slot holds one version whole. Who may still read a slot is written down as its holders; a slot
without holders is free to be written. Writing into warm pages runs about ten times as fast as into
fresh ones, so slots are not given back while they may be needed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property

from torch import Tensor

from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["Arena", "Slot"]


class Slot:
    """One version's place.

    Attributes:
        index: its number, never used twice in one arena.
        segment: its memory.
        views: entry name -> tensor in that memory (aliases included).
        holders: who may still read it.
        version: the version it holds, -1 while it is empty or being written.
    """

    def __init__(self, index: int, segment: Segment, layout: Layout) -> None:
        self.index = index
        self.segment = segment
        self.holders: set[Hashable] = set()
        self.version = -1
        self._layout = layout

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """Entry name -> tensor, of the layout's shapes and dtypes."""
        return self._layout.views(self.segment.buffer)


class Arena:
    """Slots of one layout.

    Args:
        layout: what a slot holds.
        allocate: takes a number of bytes and returns a segment of at least that many.
        max_slots: how many slots there may be at a time. Slots that only ``parked`` holders keep (see
            :meth:`may_grow`) do not count.
    """

    def __init__(self, layout: Layout, allocate: Callable[[int], Segment], max_slots: int = 3) -> None:
        self.layout = layout
        self.max_slots = max_slots
        self.slots: list[Slot] = []
        self._allocate = allocate
        self._created = 0

    @property
    def nbytes(self) -> int:
        """Bytes taken by all slots."""
        return sum(slot.segment.nbytes for slot in self.slots)

    def free_slot(self) -> Slot | None:
        """A slot without holders, or None."""
        for slot in self.slots:
            if not slot.holders:
                return slot
        return None

    def may_grow(self, parked: Iterable[Hashable] = ()) -> bool:
        """Whether a slot may be added.

        ``parked`` holders are those that are not expected to move on: a worker that hangs, or one that
        later updates are not addressed to. A slot that is kept by them alone would starve the others
        if it counted.
        """
        waiting = set(parked)
        busy = sum(1 for slot in self.slots if not slot.holders or not slot.holders <= waiting)
        return busy < self.max_slots

    def grow(self) -> Slot:
        """Add a slot (its memory is taken here, which takes time: call it in a thread).

        Raises:
            ArenaAllocationError: if the memory is not there.
        """
        slot = Slot(self._created, self._allocate(self.layout.nbytes), self.layout)
        self._created += 1
        self.slots.append(slot)
        return slot

    def release(self, holder: Hashable, *, keep: Slot | None = None) -> None:
        """``holder`` reads no slot any more but ``keep``."""
        for slot in self.slots:
            if slot is not keep:
                slot.holders.discard(holder)

    def trim(self) -> list[Slot]:
        """Give back the free slots that exceed ``max_slots``; returns them."""
        surplus = len(self.slots) - self.max_slots
        spare = [slot for slot in self.slots if not slot.holders][: max(0, surplus)]
        for slot in spare:
            self.slots.remove(slot)
            slot.segment.close()
        return spare

    def close(self) -> None:
        """Give every slot back; idempotent. Tensors that view them stay valid."""
        slots, self.slots = self.slots, []
        for slot in slots:
            slot.segment.close()
