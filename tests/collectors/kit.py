"""What the tests of collectors share."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiosync.collectors import MultiCollector
from aiosync.collectors.proxy import WorkerProxy
from aiosync.collectors.worker_spec import WorkerSpec
from tests.collectors.worlds import Counting
from tests.kit.clock import PATIENCE

__all__ = ["ENVS", "ListReplayBuffer", "check", "collecting", "pid_of", "pids_of", "specs_of", "workers_of"]

ENVS = [functools.partial(Counting, name) for name in range(2)]


class ListReplayBuffer:
    """A replay buffer that appends all it receives to lists."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.items: list[Any] = []

    def extend(self, frames: Any) -> None:
        """Append each frame."""
        self.frames += list(frames.unbind(0))

    def add(self, item: Any) -> None:
        """Append one item."""
        self.items.append(item)


def workers_of(collector: MultiCollector) -> list[WorkerProxy]:
    """Return the collector's current workers. No other code of the tests reads the collector's pool."""
    assert collector._pool is not None
    return collector._pool.workers


def specs_of(collector: MultiCollector) -> list[WorkerSpec]:
    """Return what the collector keeps for the next start of each worker."""
    assert collector._pool is not None
    return collector._pool.specs


def pid_of(collector: MultiCollector, worker: int) -> int | None:
    """Return the process id of a worker; None while its process starts."""
    return workers_of(collector)[worker].host.pid


def pids_of(collector: MultiCollector) -> list[int]:
    """Return the process ids of all workers, 0 for one without a process."""
    return [worker.host.pid or 0 for worker in workers_of(collector)]


@asynccontextmanager
async def collecting(*args: Any, **options: Any) -> AsyncIterator[MultiCollector]:
    """Connected, on warm processes."""
    given: dict[str, Any] = {
        "start_method": "forkserver",
        "timeout": PATIENCE,
        "frames_per_batch": 20,
    } | options
    async with MultiCollector(*args, **given) as collector:
        yield collector


def check(batch: Any) -> None:
    """That steps follow each other, and that each frame's version is the one that acted."""
    for part in batch.unbind(0) if batch.dim() == 2 else [batch]:
        then, after = part["observation"], part["next", "observation"]
        done = part["next", "done"].view(-1)
        ids = part["collector", "traj_ids"]
        goes_on = ~done[:-1]
        assert torch.equal(then[1:][goes_on], after[:-1][goes_on])
        assert (then[1:][done[:-1]][:, 2] == 0).all(), "a new episode begins with its first step"
        assert torch.equal(ids[1:] != ids[:-1], done[:-1])
        assert (after[:, 2] == then[:, 2] + 1).all()
        assert not part["done"].any()
    if "marks" in batch.keys():
        assert (batch["marks"] == batch["policy_version"].unsqueeze(-1)).all()
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
