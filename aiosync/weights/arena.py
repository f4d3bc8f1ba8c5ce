"""The arena: a few slots of one layout, which are allocated once and reused.

A slot holds one whole version. Writing into warm pages is about ten times as fast as into fresh ones, so the
memory of a slot is kept as long as the slot may be needed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor

from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment


class Slot:
    """The memory of one version.

    Attributes:
        index: its number, never used twice in one arena.
        segment: its memory.
        views: entry name -> tensor in that memory (aliases included). Writes through these tensors must reach
            the slot, so they are never handed out: see :meth:`fresh_views` and :class:`LentViews`.
        leases: the reasons for which the slot must not be written; only
            :class:`~aiosync.transfer.slots.SlotPool` changes them.
        version: the version that the slot holds, -1 while it is empty or being written.
    """

    def __init__(self, index: int, segment: Segment, layout: Layout) -> None:
        self.index = index
        self.segment = segment
        self.leases: set[Any] = set()
        self.version = -1
        self._layout = layout

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """Entry name -> tensor in the slot, of the layout's shapes and dtypes."""
        return self._layout.views(self.segment.buffer)

    @cached_property
    def lent(self) -> LentViews:
        """The slot's tensors for a model's parameters to view."""
        return LentViews(self._layout, self.segment.buffer)

    def fresh_views(self) -> dict[str, Tensor]:
        """Return new tensors over the slot's memory, which the caller may re-point or reshape."""
        return self._layout.views(self.segment.buffer)


class LentViews:
    """The tensors of a slot as a worker's parameters view them.

    If a user calls ``share_memory_()`` on a parameter, or puts it into a ``torch.multiprocessing`` queue,
    torch moves its storage into other memory. Such a tensor is made again before the slot is used again.
    Otherwise the next version in this slot would show the old values.
    """

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self._layout = layout
        self._buffer = buffer
        # Filled when a storage drops its memory. Comparing the address of each tensor at each update would
        # take longer than the rest of a small update's staging. On a device the addresses are compared.
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
        """Return entry name -> tensor in the memory, aliases included. Do not change the dict."""
        if self._moved or (
            self._addresses is not None and [*map(Tensor.data_ptr, self._tensors.values())] != self._addresses
        ):
            self._make()
        return self._tensors


class LentTensors(dict[str, Tensor]):
    """Entry name -> tensor."""

    # (mark, result) that a binding has cached, so that the next commit of the same slot does not compute the
    # result again. The mark identifies the binding and its state.
    matched: tuple[object, Any] | None = None


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
        slot = Slot(self._created, self._allocate(self.layout.nbytes), self.layout)
        self._created += 1
        self.slots.append(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Release a slot's memory. Tensors that view it stay valid."""
        self.slots.remove(slot)
        slot.segment.close()

    def close(self) -> None:
        """Release the memory of every slot; idempotent. Tensors that view it stay valid."""
        slots, self.slots = self.slots, []
        for slot in slots:
            slot.segment.close()
