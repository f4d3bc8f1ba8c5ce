"""A profile of the batches that a worker collects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from aiosync.errors import InvalidArgumentError

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to profile; the arguments of :meth:`~aiosync.collectors.MultiCollector.enable_profile`.

    Raises:
        InvalidArgumentError: an invalid value.
    """

    workers: Sequence[int] = (0,)
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: Sequence[str] = ("cpu", "cuda")
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_rollouts < self.num_rollouts:
            raise InvalidArgumentError(
                f"warmup_rollouts={self.warmup_rollouts}: expected 0 or more, and fewer than "
                f"num_rollouts={self.num_rollouts}"
            )
        if not {each.lower() for each in self.activities} <= _ACTIVITIES.keys():
            raise InvalidArgumentError(f"activities={self.activities!r}: expected some of 'cpu' and 'cuda'")

    def path(self, worker: int) -> Path:
        """Return the file for one worker's trace."""
        given = "collector_profile_{worker_idx}.json" if self.save_path is None else str(self.save_path)
        return Path(given.format(worker_idx=worker))


class BatchProfiler:
    """Profiles the next batches of a worker, in the thread that makes it. Writes the trace at the end."""

    def __init__(self, config: ProfileConfig, worker: int) -> None:
        self._config = config
        self._worker = worker
        self._batches = 0
        chosen = {each.lower() for each in config.activities}
        if not torch.cuda.is_available():
            chosen.discard("cuda")
        self._profile: Any = None
        if chosen:
            active = config.num_rollouts - config.warmup_rollouts
            self._profile = profile(
                activities=[_ACTIVITIES[each] for each in chosen],
                schedule=schedule(
                    skip_first=config.warmup_rollouts, wait=0, warmup=0, active=active, repeat=1
                ),
                on_trace_ready=config.on_trace_ready or self._write,
                record_shapes=config.record_shapes,
                profile_memory=config.profile_memory,
                with_stack=config.with_stack,
                with_flops=config.with_flops,
            )
            self._profile.start()

    def _write(self, found: Any) -> None:
        path = self._config.path(self._worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))

    def batch_ended(self) -> None:
        """Called at the end of each batch."""
        if self._profile is None:
            return
        self._batches += 1
        if self._batches >= self._config.num_rollouts:
            self.stop()
        else:
            self._profile.step()

    def stop(self) -> None:
        """End the profile, and write the trace if a batch was profiled; idempotent."""
        found, self._profile = self._profile, None
        if found is not None:
            found.stop()
