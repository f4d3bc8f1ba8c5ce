"""The arena: a few slots of one layout, taken once and used again for ever.

Each slot holds one version whole. Who may still read a slot is written down as its holders; a slot
without holders is free to be written. Writing into warm pages runs about ten times as fast as into
fresh ones, so slots are not given back while they may be needed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any

from torch import Tensor

from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["Arena", "LentTensors", "LentViews", "Slot"]


class Slot:
    """One version's place.

    Attributes:
        index: its number, never used twice in one arena.
        segment: its memory.
        views: entry name -> tensor in that memory (aliases included). What is written through them must
            reach the slot, so they are never handed out: see :meth:`fresh_views` and :class:`LentViews`.
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

    @cached_property
    def lent(self) -> LentViews:
        """The same for a model's parameters to view."""
        return LentViews(self._layout, self.segment.buffer)

    def fresh_views(self) -> dict[str, Tensor]:
        """The same as new tensors, for the caller to do with as it likes."""
        return self._layout.views(self.segment.buffer)


class LentViews:
    """The tensors of a piece of memory as a worker's parameters view them.

    A user may call ``share_memory_()`` on a parameter, or put it into a ``torch.multiprocessing`` queue.
    torch then moves its storage into other memory. A tensor that was moved is made again before it is lent
    again: otherwise the next version would show the values of this one.

    Args:
        layout: what lies where.
        buffer: the memory; see :meth:`Layout.views`.
    """

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self._layout = layout
        self._buffer = buffer
        # Filled when a storage leaves its memory: looking for that in each tensor, each time, takes longer
        # than the rest of a small update's staging. On a device it is looked for.
        self._moved: list[object] = []
        self._watches: list[object] = []
        self._make()

    def _make(self) -> None:
        moved: list[object] = []
        watches: list[object] = []
        views = self._layout.views(
            self._buffer, lambda memory: watches.append(weakref.ref(memory, moved.append))
        )
        self._tensors, self._moved, self._watches = LentTensors(views), moved, watches
        self._addresses = None if self._buffer.is_cpu else [*map(Tensor.data_ptr, views.values())]

    def tensors(self) -> LentTensors:
        """Entry name -> tensor (aliases included), each where it belongs. Do not change the dict."""
        if self._moved or (
            self._addresses is not None and [*map(Tensor.data_ptr, self._tensors.values())] != self._addresses
        ):
            self._make()
        return self._tensors


class LentTensors(dict[str, Tensor]):
    """Entry name -> tensor.

    Attributes:
        matched: what a binding found out about these tensors, so that the next commit of the same slot need
            not look again: (the binding's own mark, what it needs).
    """

    matched: tuple[object, Any] | None = None


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
