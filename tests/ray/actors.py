"""Actors of the tests: they know nothing of aiosync."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import torch

from aiosync import RayTransport
from aiosync.ray import WeightActorMixin
from aiosync.weights.strategy import WeightStrategy
from tests.kit.clock import PATIENCE
from tests.kit.models import Uniform, value_of

__all__ = [
    "AsyncHolder",
    "Collector",
    "Holder",
    "Module",
    "ModuleElsewhere",
    "Moduleless",
    "Receiving",
    "Roller",
]


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

    def watch(self, until: float) -> float:
        """Be busy until the policy holds that; what it holds then."""
        end = time.monotonic() + PATIENCE
        while self.policy(torch.zeros(1))[0].item() / len(self.policy.values) != until:
            if time.monotonic() > end:
                break
            time.sleep(0.001)
        return self.value()

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


class Roller(WeightActorMixin):
    """Receives on its own loop."""

    def __init__(self, size: int = 16) -> None:
        self.policy = Uniform(-1.0, size=size)

    async def value(self) -> float:
        """What the policy holds."""
        return value_of(self.policy)

    async def rollout(self, passes: int, versions: int) -> list[tuple[int, float, float]]:
        """(version, value at the beginning of the body, value at its end) of at least so many bodies, in
        which there were at least so many versions."""
        seen: list[tuple[int, float, float]] = []
        while len(seen) < passes or len({version for version, _, _ in seen}) < versions:
            async with self.pinned() as version:
                before = value_of(self.policy)
                await asyncio.sleep(0.002)
                seen.append((version, before, value_of(self.policy)))
            await asyncio.sleep(0)
        return seen

    async def version(self) -> int:
        """The one in service."""
        return self.policy_version

    async def pin(self) -> int:
        """Pin, shortly."""
        async with self.pinned() as version:
            return int(version)


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

    def forget(self) -> None:
        """Be told nothing yet."""
        self.told.clear()

    def sleep(self, seconds: float) -> None:
        """Be busy."""
        time.sleep(seconds)


class Module:
    """Has a model that takes weights by methods, and refuses some."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._calls: list[tuple[str, float]] = []

    def _update_weights_tensordict(self, params: Any) -> None:
        first = next(iter(params.values(include_nested=True, leaves_only=True)))
        params.to_module(self.module, preserve_module_state=False)
        self._note("tensordict", first)

    def _update_weights_state_dict(self, state_dict: Any) -> None:
        self.module.load_state_dict(state_dict)
        self._note("state_dict", next(iter(state_dict.values())))

    def _note(self, method: str, first: Any) -> None:
        value = float(first.flatten()[0])
        if value == 13:
            raise ArithmeticError("thirteen is refused")
        self._calls.append((method, value))

    def calls(self) -> list[tuple[str, float]]:
        """By which method each update came, and its value."""
        return self._calls

    def value(self) -> float:
        """What the model holds."""
        return value_of(self.module)

    def parameters(self) -> int:
        """How many parameters the model has."""
        return len(list(self.module.parameters()))

    def state(self) -> dict[str, Any]:
        """The model's."""
        return {key: value.clone() for key, value in self.module.state_dict().items()}

    def write_buffers(self) -> None:
        """As a model in training does."""
        for buffer in self.module.buffers():
            buffer.add_(1)


class ModuleElsewhere(Module):
    """Shows its model under another name."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._actor_module = module
        del self.module

    def _update_weights_state_dict(self, state_dict: Any) -> None:
        self._actor_module.load_state_dict(state_dict)
        self._note("state_dict", next(iter(state_dict.values())))

    def value(self) -> float:
        """What the model holds."""
        return value_of(self._actor_module)


class Receiving:
    """Receives by a transport of its own, as an async actor."""

    def __init__(self, name: str) -> None:
        self.policy = Uniform(-1.0)
        self._transport = RayTransport(worker_idx=3, connection_info_name=name, timeout=PATIENCE)
        self._transport.set_model(self.policy)

    async def receive(self, count: int) -> float:
        """Receive so many versions; return the policy's value."""
        for _ in range(count):
            await self._transport.receive_weights()
        return value_of(self.policy)


class Moduleless:
    """Takes weights for what only it knows of."""

    def __init__(self) -> None:
        self._got = -1.0

    def _update_weights_tensordict(self, params: Any) -> None:
        self._got = float(next(iter(params.values(include_nested=True, leaves_only=True))).flatten()[0])

    def got(self) -> float:
        """The value of the last update."""
        return self._got
