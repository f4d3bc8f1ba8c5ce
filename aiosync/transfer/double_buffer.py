"""Two slots of the worker's own memory: one in service, one that the next update is written into."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Update
from aiosync.transfer.base import InboundTransfer
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import LentViews
from aiosync.weights.segment import Segment

_CPU = torch.device("cpu")

_MAX_SLOTS = 4
"""Most slots of a worker that receives partial updates."""


class DoubleBuffer(InboundTransfer):
    """Slots of this process: one in service, one that the next update is written into.

    After a partial update, the model still views the other entries in their slot. That slot is kept for them,
    so a third slot is used, and a fourth if such updates have different entries.
    """

    def __init__(self, layout: Layout, device: torch.device = _CPU) -> None:
        self.device = device
        self._layout = layout
        self._entries = [entry.name for entry in layout]
        self._arena = Arena(layout, lambda nbytes: Segment.private(nbytes, device), max_slots=2)
        # Slot -> its tensors for the model to view.
        self._lent: WeakKeyDictionary[Slot, LentViews] = WeakKeyDictionary()
        # The slot of the update that arrived last.
        self._slot: Slot | None = None
        # The slot that has the bytes of the version in service, as they arrived.
        self._newest: Slot | None = None
        # Entry -> the slot in which the model views it, if that is not the newest slot.
        self._elsewhere: dict[str, Slot] = {}
        # Indices of the slots that the model views: they must not be written.
        self._viewed: set[int] = set()
        # Entries that get memory of their own in the next commit.
        self._leaving: set[str] = set()

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    def prepare(self) -> None:
        """Allocate the first slot."""
        if not self._arena.slots:
            self._arena.grow()

    def reserve(self) -> None:
        """Allocate the second slot."""
        while len(self._arena.slots) < 2:
            self._arena.grow()

    def free_slot(self) -> Slot | None:
        """A slot that the model does not view; None: there is none."""
        return next((slot for slot in self._arena.slots if slot.index not in self._viewed), None)

    def take_slot(self) -> Slot:
        """The slot for the next update. Raises ProtocolError if the worker has not requested an update."""
        self._slot = self.free_slot()
        if self._slot is None:
            raise ProtocolError("an update arrived that was not requested")
        return self._slot

    def replace(self, slot: Slot) -> None:
        """Give up a free slot that a thread may still write into; there is another one in its place."""
        self._arena.remove(slot)
        # Not warm: this is called on the event loop.
        self._arena.add(Segment.private(self._layout.nbytes, self.device, warm=False))

    def bytes_of(self, slot: Slot) -> Tensor:
        """The buffer that an update is written into."""
        return slot.segment.buffer[: self._layout.nbytes]

    def is_here(self, update: Update) -> bool:
        return True

    def is_quick(self, update: Update) -> bool:
        return True

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._slot is not None
        buffer = self._slot.segment.buffer
        views = self._lent.get(self._slot)
        if views is None:
            views = self._lent[self._slot] = LentViews(self._layout, buffer)
        return buffer, views.tensors()

    def is_lent(self, address: int) -> bool:
        return any(slot.segment.has(address) for slot in self._arena.slots)

    def make_room(self, names: Collection[str]) -> Collection[str]:
        elsewhere = self._elsewhere_after(names)
        viewed = {slot.index for slot in elsewhere.values()}
        leaving: set[str] = set()
        if len(viewed) >= _MAX_SLOTS - 1:
            # Free the slot with the fewest entries.
            fewest = min(viewed, key=lambda index: sum(s.index == index for s in elsewhere.values()))
            leaving = {name for name, slot in elsewhere.items() if slot.index == fewest}
            viewed.discard(fewest)
        while len(self._arena.slots) < len(viewed) + 2:
            self._arena.grow()
        self._leaving = leaving
        return leaving

    def _elsewhere_after(self, names: Collection[str]) -> dict[str, Slot]:
        """Entry -> its slot, for the entries that a partial update of ``names`` does not have."""
        kept = {} if self._newest is None else dict.fromkeys(self._entries, self._newest)
        return {name: slot for name, slot in (kept | self._elsewhere).items() if name not in names}

    def committed(self, names: Collection[str] | None) -> None:
        elsewhere = {} if names is None else self._elsewhere_after(names)
        self._elsewhere = {name: slot for name, slot in elsewhere.items() if name not in self._leaving}
        self._newest, self._leaving = self._slot, set()
        viewed = {slot.index for slot in self._elsewhere.values()}
        if self._newest is not None:
            viewed.add(self._newest.index)
        self._viewed = viewed  # one assignment: the connection's thread looks for a free slot meanwhile

    def close(self) -> None:
        """Release the slots. Tensors in service keep their memory."""
        self._arena.close()
