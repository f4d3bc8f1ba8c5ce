"""Actors of the tests: they know nothing of aiosync."""

from __future__ import annotations

import os
from typing import Any

import torch

from aiosync.weights.strategy import WeightStrategy
from tests.kit.models import Uniform, value_of

__all__ = ["AsyncHolder", "Collector", "Holder"]


class Holder:
    """Has a policy."""

    def __init__(self, size: int = 16) -> None:
        self.policy = Uniform(-1.0, size=size)

    def value(self) -> float:
        """What the policy holds."""
        return value_of(self.policy)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def torn(self, passes: int) -> int:
        """How many of so many forward passes saw two versions."""
        count = len(self.policy.values)
        seen = (self.policy(torch.zeros(1))[0].item() / count for _ in range(passes))
        return sum(value != int(value) for value in seen)


class AsyncHolder:
    """The same, as an async actor."""

    def __init__(self, size: int = 16) -> None:
        self.policy = Uniform(-1.0, size=size)

    async def value(self) -> float:
        """What the policy holds."""
        return value_of(self.policy)


class Collector(Holder):
    """Is told of updates, and refuses some."""

    def __init__(self, size: int = 16) -> None:
        super().__init__(size)
        self.told: list[float] = []

    def update_policy_weights_(self, policy_or_weights: Any, model_id: str = "policy") -> None:
        """Called with each update."""
        weights = WeightStrategy("state_dict").extract_weights(policy_or_weights)
        value = float(next(iter(weights.values())).flatten()[0])
        if value == 13:
            raise ArithmeticError("thirteen is refused")
        self.told.append(value)

    def heard(self) -> list[float]:
        """What it was told."""
        return self.told
