"""One turn of ``aiosync bench start``: the time until a collector's first batch, in a fresh process."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import torch
from torch import nn

from aiosync.collectors import MultiCollector

_WIDTH = 8
_FRAMES = 256


@dataclass(frozen=True)
class StartTask:
    """What a turn does: as many collectors, one after the other."""

    collectors: int
    workers: int


@dataclass(frozen=True)
class StartTurn:
    """What a turn found."""

    seconds: list[float]  # from the constructor to the first batch, of each collector


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        action: torch.Tensor = self.layers(observation).argmax(-1)
        return action


async def _start(task: StartTask) -> StartTurn:
    seconds = []
    make = functools.partial(gymnasium.make_vec, "CartPole-v1", num_envs=_WIDTH)
    policy = _Policy()
    for _ in range(task.collectors):
        begun = time.perf_counter()
        collector: Any = MultiCollector([make] * task.workers, policy, frames_per_batch=_FRAMES)
        async with collector:
            async for _ in collector:
                seconds.append(time.perf_counter() - begun)
                break
    return StartTurn(seconds)


def main() -> None:
    """Take the turn of the command line, and print it as the last line."""
    warnings.simplefilter("ignore")
    turn = asyncio.run(_start(StartTask(**json.loads(sys.argv[1]))))
    print(f"\n{json.dumps(asdict(turn))}", flush=True)
    os._exit(0)
