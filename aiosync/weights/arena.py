"""The arena: a few slots of one layout, which are allocated once and reused.

A slot holds one whole version. Writing into warm pages is about ten times as fast as into fresh ones, so the
memory of a slot is kept as long as the slot may be needed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from aiosync.weights.copying import Place, place_of
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment


class Slot:
    """The memory of one version."""

    def __init__(self, index: int, segment: Segment, layout: Layout) -> None:
        # Its number, never used twice in one arena.
        self.index = index
        self.segment = segment
        # The reasons for which the slot must not be written. Only :class:`SlotPool` changes them.
        self.leases: set[Any] = set()
        # The version that the slot holds; -1 while it is empty or being written.
        self.version = -1
        self._layout = layout

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """Entry name -> tensor in the slot, aliases included, of the layout's shapes and dtypes.

        Writes through these tensors must reach the slot, so they are never given to users.
        """
        return self._layout.views(self.segment.buffer)

    @cached_property
    def places(self) -> Sequence[Place]:
        """The place of each entry in the slot, in the order of the layout's entries."""
        return [place_of(self.views[entry.name]) for entry in self._layout.entries]

    def fresh_views(self) -> dict[str, Tensor]:
        """Return new tensors over the slot's memory, which the caller may re-point or reshape."""
        return self._layout.views(self.segment.buffer)


class Arena:
    """Slots of one layout, and their memory. ``allocate`` returns a segment of at least so many bytes."""

    def __init__(self, layout: Layout, allocate: Callable[[int], Segment], max_slots: int = 3) -> None:
        self.layout = layout
        self.max_slots = max_slots
        self.slots: list[Slot] = []
        self._allocate = allocate
        self._created = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.segment.nbytes for slot in self.slots)

    def grow(self) -> Slot:
        """Add a slot. The allocation takes time: call this in a thread.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        return self.add(self._allocate(self.layout.nbytes))

    def add(self, segment: Segment) -> Slot:
        """Add a slot with this memory."""
        slot = Slot(self._created, segment, self.layout)
        self._created += 1
        self.slots.append(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Release a slot's memory. Tensors that view it stay valid."""
        self.slots.remove(slot)
        slot.version = -1
        slot.segment.close()

    def close(self) -> None:
        """Release the memory of every slot; idempotent. Tensors that view it stay valid."""
        slots, self.slots = self.slots, []
        for slot in slots:
            slot.segment.close()
