"""A slot that the pool has released holds no version any more, whatever refers to it."""

from __future__ import annotations

import torch

from aiosync.transfer.slots import SlotPool
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment


def test_a_released_slot_holds_no_version() -> None:
    pool = SlotPool(Layout([("a", (4,), torch.float32)]), Segment.local, 2)
    slots = [pool.grow() for _ in range(3)]
    for version, slot in enumerate(slots):
        slot.version = version
    pool.changed()
    released = [slot for slot in slots if slot not in pool.slots]
    assert len(pool.slots) == 2
    assert [slot.version for slot in released] == [-1]
