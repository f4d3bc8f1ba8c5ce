"""Two slots of the worker's own that take turns."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Update
from aiosync.transfer.base import InboundTransfer
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["DoubleBuffer"]


_CPU = torch.device("cpu")

_MOST_SLOTS = 4
"""Slots that a worker takes at the most, for updates of some entries."""


class DoubleBuffer(InboundTransfer):
    """Slots of this process: one in service, one that the next update comes into.

    An update of some entries leaves the others in the slot that they view, which is kept for them, so that a
    third slot takes its turn; and a fourth where such updates are about different entries.

    Args:
        layout: what a slot holds.
        device: where they are.
    """

    def __init__(self, layout: Layout, device: torch.device = _CPU) -> None:
        self._layout = layout
        self._entries = [entry.name for entry in layout]
        self._arena = Arena(layout, lambda nbytes: Segment.private(nbytes, device), max_slots=2)
        self._slot: Slot | None = None
        # The slot whose bytes are the newest version's, as they came.
        self._newest: Slot | None = None
        # Where the model's tensor of each entry is, if it is not in the newest slot.
        self._elsewhere: dict[str, Slot] = {}
        # Indices of the slots that the model views: they must not be written.
        self._viewed: set[int] = set()
        # Entries that get memory of their own in the next commit.
        self._leaving: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._arena.nbytes

    def prepare(self) -> None:
        """Take the first slot."""
        if not self._arena.slots:
            self._arena.grow()

    def reserve(self) -> None:
        """Take the second."""
        while len(self._arena.slots) < 2:
            self._arena.grow()

    def take_slot(self) -> Slot:
        """A slot that the model does not view, for the next update.

        Raises:
            ProtocolError: there is none, so the update was not asked for.
        """
        self._slot = self.free_slot()
        if self._slot is None:
            raise ProtocolError("an update came that was not asked for")
        return self._slot

    def free_slot(self) -> Slot | None:
        """A slot that the model does not view; None: there is none."""
        return next((slot for slot in self._arena.slots if slot.index not in self._viewed), None)

    def is_quick(self, update: Update) -> bool:
        return True

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._slot is not None
        return self._slot.segment.buffer, self._slot.lent.tensors()

    def is_lent(self, address: int) -> bool:
        return any(slot.segment.has(address) for slot in self._arena.slots)

    def make_room(self, names: Collection[str]) -> Collection[str]:
        elsewhere = self._elsewhere_after(names)
        viewed = {slot.index for slot in elsewhere.values()}
        leaving: set[str] = set()
        if len(viewed) >= _MOST_SLOTS - 1:
            oldest = min(viewed, key=lambda index: sum(s.index == index for s in elsewhere.values()))
            leaving = {name for name, slot in elsewhere.items() if slot.index == oldest}
            viewed.discard(oldest)
        while len(self._arena.slots) < len(viewed) + 2:
            self._arena.grow()
        self._leaving = leaving
        return leaving

    def _elsewhere_after(self, names: Collection[str]) -> dict[str, Slot]:
        kept = {} if self._newest is None else dict.fromkeys(self._entries, self._newest)
        return {name: slot for name, slot in (kept | self._elsewhere).items() if name not in names}

    def committed(self, names: Collection[str] | None) -> None:
        elsewhere = {} if names is None else self._elsewhere_after(names)
        self._elsewhere = {name: slot for name, slot in elsewhere.items() if name not in self._leaving}
        self._newest, self._leaving = self._slot, set()
        viewed = {slot.index for slot in self._elsewhere.values()}
        if self._newest is not None:
            viewed.add(self._newest.index)
        self._viewed = viewed  # at once: the connection's thread looks for a free slot meanwhile

    def close(self) -> None:
        """Let go of the slots; tensors in service keep theirs."""
        self._arena.close()
