"""A replay buffer from which frames are left out that are too old."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from aiosync.collectors.versions import VERSION, AgeLimit


@dataclass  # which cannot be hashed
class _Buffer:
    transforms: list[Callable[[TensorDictBase], TensorDictBase]] = field(default_factory=list)
    sampler: Any = None

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


def test_a_collector_without_a_limit_ends_that_of_the_former() -> None:
    buffer = _Buffer()
    former = AgeLimit(buffer, 1, lambda: 100)
    AgeLimit(buffer, None, lambda: 2)
    former.update()
    assert buffer.sample(0, 1, 2) == [0, 1, 2]


@pytest.mark.parametrize(("own", "limits", "expected"), [
    (-1, (1, 5), 5), (-1, (1, None), -1), (3, (1, 5), 3), (3, (5, 1, None), 3), (-1, (None, 2), 2),
])  # fmt: skip
def test_a_sampler_that_knows_versions(own: int, limits: tuple[int | None, ...], expected: int) -> None:
    sampler = SimpleNamespace(consumer_version=0, max_staleness=own)
    buffer = _Buffer(sampler=sampler)
    made = [
        AgeLimit(buffer, limit, functools.partial(int, 10 * number))
        for number, limit in enumerate(limits, start=1)
    ]
    for each in made:  # a closed collector's properties are read
        each.update()
    assert sampler.max_staleness == expected
    newest = [10 * number for number, limit in enumerate(limits, start=1) if limit is not None]
    assert sampler.consumer_version == newest[-1]
    sampler.max_staleness = 7  # by the program
    AgeLimit(buffer, 9, lambda: 0)
    assert sampler.max_staleness == 7
    AgeLimit(buffer, None, lambda: 0)
    assert sampler.max_staleness == 7


def test_a_buffer_is_not_kept() -> None:
    def attach() -> weakref.ref[_Buffer]:
        buffer = _Buffer()
        AgeLimit(buffer, 1, lambda: len(buffer.transforms))
        return weakref.ref(buffer)

    found = attach()
    gc.collect()
    assert found() is None
