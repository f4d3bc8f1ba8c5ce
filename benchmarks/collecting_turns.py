"""One turn of collecting: aiosync's collector or torchrl's, on the same Gymnasium environment.

It is run as a process of its own. Each batch is checked against the version that its frames claim; the
trainer updates after each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import psutil
import torch
import uvloop
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

__all__ = ["ENVS", "Turn"]

ENVS = ("cartpole", "pixels")
WORKERS = 2
_WARM_UP = 10
_SAMPLES = 5
"""How often memory is looked at in a turn, apart from what is timed."""


class Pixels(gym.Env[Any, Any]):
    """Observes 84x84x4 bytes that are new at each step, and asks nothing else of the processor."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self._frames = np.random.default_rng(0).integers(0, 255, (16, 84, 84, 4), np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """See :class:`gymnasium.Env`."""
        super().reset(seed=seed)
        self._step = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        """See :class:`gymnasium.Env`."""
        self._step += 1
        return self._frames[self._step % 16], 1.0, self._step >= 500, False, {}


class Policy(nn.Module):
    """A small policy that says which version acts: its first parameter and its last go with each action."""

    def __init__(self, env: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(4 if env == "cartpole" else 196, 64), nn.Tanh(), nn.Linear(64, 2))
        self.pixels = env == "pixels"
        self.last = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """The action; and the marks."""
        first = self.first.detach().clone()
        seen = observation
        if self.pixels:
            seen = observation[..., ::12, ::12, :].flatten(-3).float() / 255
        action = self.net(seen).argmax(-1)
        marks = torch.stack([first, self.last.detach().clone()])
        return action, marks.expand(*action.shape, 2).clone()


def make_env(name: str) -> Any:
    """The environment, Gymnasium's."""
    return Pixels() if name == "pixels" else gym.make("CartPole-v1")


class _Make:
    """Makes it, in a worker; wrapped by torchrl's own, for torchrl."""

    def __init__(self, name: str, *, wrapped: bool) -> None:
        self._name, self._wrapped = name, wrapped

    def __call__(self) -> Any:
        made = make_env(self._name)
        if not self._wrapped:
            return made
        return importlib.import_module("torchrl.envs").GymWrapper(made, categorical_action_encoding=True)


class _Collecting(Protocol):
    def batches(self) -> AsyncIterator[Any]: ...
    async def update(self) -> None: ...


class _Ours:
    """aiosync's, with an event loop."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    async def batches(self) -> AsyncIterator[Any]:
        """One after the other, and the versions that their frames claim."""
        async for batch in self._collector:
            yield batch, batch["policy_version"]

    async def update(self) -> None:
        """Send the policy's weights."""
        await self._collector.update_policy_weights_()


class _Theirs:
    """torchrl's."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    async def batches(self) -> AsyncIterator[Any]:
        """See :class:`_Ours`."""
        for batch in self._collector:
            yield batch, batch["next", "policy_version"]

    async def update(self) -> None:
        """See :class:`_Ours`."""
        self._collector.update_policy_weights_()


@asynccontextmanager
async def _collecting(
    library: str, env: str, policy: Any, *, sync: bool, frames: int
) -> AsyncIterator[_Collecting]:
    options: dict[str, Any] = {
        "frames_per_batch": frames,
        "total_frames": -1,
        "track_policy_version": True,
    }
    make = [_Make(env, wrapped=library == "torchrl")] * WORKERS
    if library == "aiosync":
        ours: Any = importlib.import_module("aiosync.collectors")
        async with ours.MultiCollector(make, policy, sync=sync, timeout=60, **options) as collector:
            yield _Ours(collector)
        return
    theirs: Any = importlib.import_module("torchrl.collectors")
    schemes: Any = importlib.import_module("torchrl.weight_update")
    make_collector = theirs.MultiSyncCollector if sync else theirs.MultiAsyncCollector
    # torchrl: -1 frames would be an endless iterator too, but with a warning for each batch.
    options["weight_sync_schemes"] = {"policy": schemes.SharedMemWeightSyncScheme()}
    collector = make_collector(make, policy, **options)
    try:
        yield _Theirs(collector)
    finally:
        collector.shutdown()


@dataclass(frozen=True)
class Turn:
    """What one process found.

    Attributes:
        frames: per second, updates included.
        update: seconds of each update, the median.
        first: seconds from the collector's construction to its first batch.
        memory: bytes that trainer and workers had at most, shared ones once.
        wrong: frames whose weights were not those of the version that they claim, of ``total``.
        total: frames.
    """

    frames: float
    update: float
    first: float
    memory: int
    wrong: int
    total: int


def _memory() -> int:
    found = 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found


async def _take_turn(library: str, mode: str, env: str, per_batch: int, wanted: int) -> Turn:
    policy = TensorDictModule(Policy(env), in_keys=["observation"], out_keys=["action", "marks"])
    name = "aiosync.collectors" if library == "aiosync" else "torchrl.collectors"
    importlib.import_module(name)  # what both have before a collector is made
    updates: list[float] = []
    wrong = total = number = memory = 0
    apart = started = 0.0
    each = max(1, wanted // per_batch // _SAMPLES)
    begun = time.perf_counter()
    first = 0.0
    async with _collecting(library, env, policy, sync=mode == "sync", frames=per_batch) as collecting:
        async for batch, claimed in collecting.batches():
            number += 1
            if number == 1:
                first = time.perf_counter() - begun
            if number > _WARM_UP:
                wrong += int((batch["marks"] != claimed[..., None]).any(-1).sum())
                total += claimed.numel()
            with torch.no_grad():
                policy.module.first.fill_(number)
                policy.module.last.fill_(number)
            before = time.perf_counter()
            await collecting.update()
            updates.append(time.perf_counter() - before)
            if number == _WARM_UP:
                updates.clear()
                started = time.perf_counter()
            elif number > _WARM_UP and number % each == 0:
                before = time.perf_counter()
                memory = max(memory, _memory())
                apart += time.perf_counter() - before
            if total >= wanted:
                break
        taken = time.perf_counter() - started - apart
    return Turn(total / taken, float(np.median(updates)), first, memory, wrong, total)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _library, _mode, _env, _per_batch, _wanted = sys.argv[1:]
    _turn = uvloop.run(_take_turn(_library, _mode, _env, int(_per_batch), int(_wanted)))
    sys.stdout.write(f"\n{json.dumps(asdict(_turn))}\n")
    sys.stdout.flush()
    os._exit(0)  # torchrl's threads would hold it up
