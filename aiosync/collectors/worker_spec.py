"""What a worker needs at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aiosync.collectors.config import CollectorConfig
from aiosync.schemes.base import WeightSyncScheme

POLICY = "policy"

Schemes: TypeAlias = Mapping[str, WeightSyncScheme]
"""Model id -> the scheme that delivers its weights."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs at its start."""

    index: int
    workers: int  # the number of workers
    create_env: Callable[[], Any]
    make_policy: Callable[[], Any] | None  # None: random actions
    config: CollectorConfig
    first_id: int  # the number of the worker's first trajectory
    seed: int | None = None  # of its first environment; None: unseeded
    extra_updates: int = 0  # updates of the policy before this worker's start that no scheme counts
    env_given: bool = False  # create_env returns an environment that the trainer may use after this worker
    own_process: bool = True  # the worker does not share its process with the collector
    own_loop: bool = False  # the worker's event loop runs nothing else
    use_buffers: bool = True  # batches go through shared memory; otherwise in messages
    parts: int = 1  # how many workers a batch comes from
    share_tensors: bool = False  # tensors of this spec in shared memory are shared, not copied
    processor: int | None = None  # the worker begins each batch on it; None: where it is
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # torch's default dtype

    @property
    def stride(self) -> int:
        """The difference between the numbers of two consecutive trajectories of one environment."""
        return self.workers * self.config.processes.envs_per_worker
