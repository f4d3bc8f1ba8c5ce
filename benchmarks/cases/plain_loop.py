"""One turn of ``aiosync bench collectors --against plain``: frames per second of the loop that a user would
write without aiosync, or of a collector.

The loop runs in one process: Gymnasium's environments, the policy without gradients, NumPy buffers. The
collectors send an update after each batch.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import uvloop
from torch import Tensor, nn

WORKERS = 2
_SIZES = {"CartPole-v1": (4, 2), "Acrobot-v1": (6, 3)}


@dataclass(frozen=True)
class PlainTask:
    """What a turn does."""

    contender: str  # "plain"; "single", "sync" or "async": a collector
    env: str  # Gymnasium's name
    rows: int  # environments that step together; 0: one environment that is no vector environment
    per_batch: int  # frames
    batches: int  # that count
    warm_up: int  # batches before those


@dataclass(frozen=True)
class PlainTurn:
    """What a turn found."""

    frames: float  # per second, updates included
    switches: float  # context switches per batch, of this process


class _Policy(nn.Module):
    """Two hidden layers of 64."""

    def __init__(self, env: str) -> None:
        super().__init__()
        observed, actions = _SIZES[env]
        self.net = nn.Sequential(
            nn.Linear(observed, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions)
        )

    def forward(self, observation: Tensor) -> Tensor:
        action: Tensor = self.net(observation).argmax(-1)
        return action


def _make(env: str, rows: int) -> Any:
    return gym.make_vec(env, num_envs=rows, vectorization_mode="sync") if rows else gym.make(env)


class _Clock:
    """Times the batches that count, and counts this process's context switches in them."""

    def __init__(self, task: PlainTask) -> None:
        self._task = task
        self._number = 0
        self.turn: PlainTurn | None = None

    def batch_ended(self) -> bool:
        """Whether that was the last batch."""
        number = self._number = self._number + 1
        if number == self._task.warm_up:
            self._begun, self._switches = time.perf_counter(), _switches()
        if number < self._task.warm_up + self._task.batches:
            return False
        seconds, batches = time.perf_counter() - self._begun, self._task.batches
        switches = (_switches() - self._switches) / batches
        self.turn = PlainTurn(batches * self._task.per_batch / seconds, switches)
        return True


def _switches() -> int:
    resource = importlib.import_module("resource")
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(used.ru_nvcsw + used.ru_nivcsw)


def _plain(task: PlainTask, clock: _Clock) -> None:
    env, policy = _make(task.env, task.rows), _Policy(task.env)
    steps, shape = task.per_batch // max(1, task.rows), (task.rows,) if task.rows else ()
    observed = _SIZES[task.env][0]
    observations = np.zeros((steps, *shape, observed), np.float32)
    following = np.zeros_like(observations)
    actions = np.zeros((steps, *shape), np.int64)
    rewards = np.zeros((steps, *shape), np.float32)
    terminations = np.zeros((steps, *shape), np.bool_)
    truncations = np.zeros((steps, *shape), np.bool_)
    observation, _ = env.reset(seed=0)
    while not clock.batch_ended():
        with torch.no_grad():
            for step in range(steps):
                observations[step] = observation
                action = policy(torch.from_numpy(observation)).numpy()
                actions[step] = action
                observation, reward, terminated, truncated, _ = env.step(action if shape else int(action))
                following[step], rewards[step] = observation, reward
                terminations[step], truncations[step] = terminated, truncated
                if not shape and (terminated or truncated):
                    observation, _ = env.reset()


async def _collector(task: PlainTask, clock: _Clock) -> None:
    collectors = importlib.import_module("aiosync.collectors")
    make, policy = functools.partial(_make, task.env, task.rows), _Policy(task.env)
    options: dict[str, Any] = {"frames_per_batch": task.per_batch, "total_frames": -1}
    if task.contender == "single":
        collector = collectors.Collector(make, policy, **options)
    else:
        collector = collectors.MultiCollector(
            [make] * WORKERS, policy, sync=task.contender == "sync", **options
        )
    async with collector:
        async for _ in collector:
            await collector.update_policy_weights_()
            if clock.batch_ended():
                break


def main() -> None:
    """Take the turn of the command line, and print it as the last line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as in the collectors' workers
    torch.manual_seed(0)  # the same policy for all: how many steps begin an episode depends on it
    task = PlainTask(**json.loads(sys.argv[1]))
    clock = _Clock(task)
    if task.contender == "plain":
        _plain(task, clock)
    else:
        uvloop.run(_collector(task, clock))
    assert clock.turn is not None
    print(f"\n{json.dumps(asdict(clock.turn))}", flush=True)
    os._exit(0)
