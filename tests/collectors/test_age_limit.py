"""A replay buffer from which frames are left out that are too old."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase

from aiosync.collectors.versions import VERSION, AgeLimit


class _Buffer:
    def __init__(self) -> None:
        self.transforms: list[Callable[[TensorDictBase], TensorDictBase]] = []

    def append_transform(self, transform: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self.transforms.append(transform)

    def sample(self, *versions: int) -> list[int]:
        frames: TensorDictBase = TensorDict({VERSION: torch.tensor(versions)}, batch_size=[len(versions)])
        for transform in self.transforms:
            frames = transform(frames)
        return list(frames[VERSION].tolist())


def test_the_collector_that_got_the_buffer_last_counts() -> None:
    buffer = _Buffer()
    AgeLimit(buffer, 1, lambda: 100)
    assert buffer.sample(0, 99, 100) == [99, 100]
    AgeLimit(buffer, 1, lambda: 2)  # its versions begin anew
    assert buffer.sample(0, 1, 2) == [1, 2]


def test_a_buffer_is_not_kept() -> None:
    def attach() -> weakref.ref[_Buffer]:
        buffer = _Buffer()
        AgeLimit(buffer, 1, lambda: len(buffer.transforms))
        return weakref.ref(buffer)

    found = attach()
    gc.collect()
    assert found() is None
