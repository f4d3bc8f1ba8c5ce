"""A worker's slots: the memory that it puts batches into."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiosync.collectors.fields import Fields, Slot, Specs, specs_of
from aiosync.collectors.messages import NewSlot

__all__ = ["Shelf"]


class Shelf:
    """Slots are used again when the collector has given them back. Those that have got too small, or whose
    frames consisted of other things, are replaced.

    Args:
        tell: called with each new slot. None: the memory is this process's own.
        shape: of a frame.
    """

    def __init__(self, tell: Callable[[NewSlot], None] | None, shape: tuple[int, ...]) -> None:
        self._tell = tell
        self._shape = shape
        self._slots: dict[int, Slot] = {}
        self._free: set[int] = set()
        self._next = 0

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def take(self, frame: Fields, steps: int) -> int:
        """A slot for so many frames like this one: its number.

        Raises:
            ArenaAllocationError: there is not that much memory.
        """
        specs = specs_of(frame)
        for index in sorted(self._free):
            if self._slots[index].holds(specs, steps):
                self._free.remove(index)
                return index
        return self._make(specs, steps)

    def _make(self, specs: Specs, steps: int) -> int:
        useless = tuple(self._free)  # none of them holds what is wanted now
        for index in useless:
            self._slots.pop(index).segment.close()
        self._free.clear()
        index, self._next = self._next, self._next + 1
        slot = self._slots[index] = Slot.make(specs, steps, shared=self._tell is not None)
        if self._tell is not None:
            assert slot.segment.handle is not None
            self._tell(NewSlot(index, slot.segment.handle, specs, steps, self._shape, useless))
        return index

    def give_back(self, indices: Iterable[int]) -> None:
        """These are free again."""
        self._free.update(indices)
