"""The worker's own slots: a slot that was removed leaves nothing behind."""

from __future__ import annotations

import gc

import torch

from aiosync.protocol.frames import Update
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment


class _OfAPool(DoubleBuffer):
    """As a relay's: its slots come from a pool that adds and removes them."""

    def use(self, slot: Slot) -> None:
        self._slot = slot
        self.find(Update(round=0, version=0, payload={}))
        self._slot = None

    @property
    def kept(self) -> int:
        return len(self._lent)


def test_a_removed_slot_is_freed() -> None:
    layout = Layout.of({"a": torch.zeros(1024)})
    arena, buffer = Arena(layout, Segment.private), _OfAPool(layout)
    for _ in range(3):
        slot = arena.grow()
        buffer.use(slot)
        assert buffer.kept == 1
        arena.remove(slot)
        del slot
        gc.collect()
        assert buffer.kept == 0
