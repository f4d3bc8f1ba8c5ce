"""Slow environments, many at a time: 64 of them on two workers, where each step takes 20 ms elsewhere.

    python examples/async_envs.py
    python examples/async_envs.py --envs 16 --seconds-per-step 0.05

Such an environment is a server, a simulator on another machine, or a language model behind an API: a step
needs time, but no local processor. A collector takes any object with ``async def reset`` and ``async def
step``. Each worker steps ``--envs`` divided by ``--workers`` of them concurrently on its event loop. The
policy acts for each environment in turn, with the newest weights.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any

import gymnasium
import torch
import typer
from tensordict.nn import TensorDictModule
from torch import nn

from aiosync.collectors import MultiCollector


class Remote:
    """CartPole as a remote environment: each step takes some time, a reset none."""

    def __init__(self, seconds: float) -> None:
        self._env: Any = gymnasium.make("CartPole-v1")
        self._seconds = seconds
        self.action_space = self._env.action_space

    async def reset(self, *, seed: int | None = None) -> Any:
        """Same as Gymnasium's."""
        return self._env.reset(seed=seed)

    async def step(self, action: int) -> Any:
        """Same as Gymnasium's."""
        await asyncio.sleep(self._seconds)
        return self._env.step(action)


class Policy(nn.Module):
    """A small network; takes the action with the greater output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Map observations of shape ``(*, 4)`` to actions of shape ``(*,)``."""
        return torch.as_tensor(self.net(observation).argmax(-1))


async def collect(envs: int, workers: int, seconds: float, frames: int) -> float:
    """Return the steps per second, with an update after each batch."""
    policy = TensorDictModule(Policy(), in_keys=["observation"], out_keys=["action"])
    collector = MultiCollector(
        [partial(Remote, seconds)] * workers,
        policy,
        sync=False,
        envs_per_worker=envs // workers,
        frames_per_batch=10 * envs // workers,
        total_frames=-1,
    )
    async with collector:
        for _ in range(2 * workers):  # until all workers collect
            await anext(collector)
        begun, before = time.perf_counter(), collector.frames
        while collector.frames - before < frames:
            batch = await anext(collector)
            with torch.no_grad():
                policy.module.net[0].bias.add_(0.01)  # an optimizer's step
            await collector.update_policy_weights_()
        taken = time.perf_counter() - begun
        lag = collector.policy_version - batch["policy_version"].float().mean()
        print(f"the last batch was {lag:.1f} versions old")
        return (collector.frames - before) / taken


def main(
    envs: Annotated[int, typer.Option(min=1, help="Environments of all workers together.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    seconds_per_step: Annotated[float, typer.Option(min=0.001, help="Duration of a step.")] = 0.02,
    frames: Annotated[int, typer.Option(min=1, help="How many frames to measure.")] = 32_000,
) -> None:
    """Step many slow environments concurrently, and print the steps per second."""
    rate = asyncio.run(collect(envs, workers, seconds_per_step, frames))
    ideal = envs / seconds_per_step
    print(f"{rate:.0f} steps per second; {ideal:.0f} would be ideal: {rate / ideal:.2f}")


if __name__ == "__main__":
    typer.run(main)
