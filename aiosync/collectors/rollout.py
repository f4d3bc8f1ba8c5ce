"""Step an environment with a policy, and write the frames into batches."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from aiosync.collectors.batch_config import BatchConfig
from aiosync.collectors.batch_memory import BatchBuffers
from aiosync.collectors.command_pipe import Collect
from aiosync.collectors.env import ENDS, MASK, TRAJ_IDS, Env, Fields, Key, under
from aiosync.collectors.policy import Act

_WRITE_TOGETHER = 16
"""Frames that are copied into a batch's memory at a time."""


class PartialBatch:
    """A batch that is being collected, by one rollout or by several concurrently.

    A rollout claims a place first and then collects the frame for it. So two batches can be in progress: one
    that waits for its last frames, and the next one. ``width`` is the number of frames per place: the
    environments that step together.
    """

    def __init__(self, request: Collect, buffers: BatchBuffers, width: int) -> None:
        self.request = request
        self.buffer = -1  # the number of the buffer; -1: not allocated, because no frame has shown the fields
        self.steps = 0  # how many places have their frame
        self._capacity = -(-request.frames // width)  # places of the complete batch; end_early() lowers it
        self._buffers = buffers
        self._claimed = 0
        self._places_of: dict[int, list[int]] = {}  # rollout -> its places, in order of time
        self._unwritten: dict[int, Fields] = {}  # place -> a frame that is not copied into the buffer yet

    @property
    def has_room(self) -> bool:
        """Whether a place is left to claim."""
        return self._claimed < self._capacity

    @property
    def complete(self) -> bool:
        """Whether every place has its frame."""
        return self.steps == self._capacity

    def claim(self) -> int:
        """Claim the next place and return it. Requires :attr:`has_room`."""
        self._claimed += 1
        return self._claimed - 1

    def end_early(self) -> None:
        """Let the batch end with the frames in progress, or with one frame if it has none."""
        self._capacity = max(self._claimed, 1)

    def write(self, place: int, rollout: int, frame: Fields) -> None:
        """Write a frame, collected by the rollout of that number, to its place from :meth:`claim`."""
        if self.buffer < 0:
            self.buffer = self._buffers.allocate(frame, self._capacity)
        self._unwritten[place] = frame
        self._places_of.setdefault(rollout, []).append(place)
        self.steps += 1
        if len(self._unwritten) >= _WRITE_TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if not self._unwritten:
            return
        places = sorted(self._unwritten)
        self._buffers[self.buffer].write(places, [self._unwritten[place] for place in places])
        self._unwritten.clear()

    def close(self, *, truncate: Iterable[Key]) -> list[int]:
        """Write the last frames of a complete batch. Returns its places in order of time, one rollout after
        the other. ``truncate``: the end flags to set in the last frame of each rollout."""
        self._flush()
        keys = [under("next", key) for key in truncate]
        if keys:
            for places in self._places_of.values():
                self._buffers[self.buffer].set_flags(keys, places[-1])
        return [place for rollout in sorted(self._places_of) for place in self._places_of[rollout]]


@dataclass(eq=False, repr=False)
class Rollout:
    """The rollout of one environment, across the ends of episodes and batches.

    A commit of new weights happens before a forward pass or after it. A frame is tagged with the version that
    is read right before its forward pass; nothing is awaited between the two.
    """

    env: Env
    policy: Act | None  # None: random actions
    config: BatchConfig
    next_id: int  # the number of the next trajectory; the one after it has this number + stride
    stride: int
    version: Callable[[], int] | None  # returns the current version of the policy; None: no frame is tagged
    # What the environment observes now: the next frame begins with it. Empty before the first reset.
    _current: Fields = field(default_factory=dict)
    # The batch of the last frame: reset_at_each_iter compares it with that of the next one.
    _batch: PartialBatch | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        env = self.env
        env.configure(self.config)
        self._device = env.device or "cpu"
        self._limit = self.config.step_limit
        # The number of the current trajectory of each environment.
        self._ids = torch.zeros(env.shape, dtype=torch.int64, device=self._device)

    async def reset(self, seed: int | None = None) -> None:
        """Begin a new episode, after the frame in progress. ``seed``: seed the environment first."""
        async with self._lock:
            if seed is not None:
                self.env.set_seed(seed)
            await self._reset()

    async def _reset(self) -> None:
        self._current = current = await self.env.reset()
        for ends in self.env.ends if self._limit else ():
            current[ends.step_count] = torch.zeros_like(current[ends.done], dtype=torch.int64)
        self._start_trajectories(torch.ones(self.env.shape, dtype=torch.bool, device=self._device))

    async def restart(self, next_id: int) -> None:
        """Begin a new episode, and number trajectories from ``next_id`` on, or higher."""
        async with self._lock:
            self.next_id += max(0, -(-(next_id - self.next_id) // self.stride)) * self.stride
            await self._reset()

    def state(self) -> dict[str, Any]:
        """Return the state, without the environment if that cannot be pickled."""
        try:
            env = cloudpickle.dumps(self.env.env)
        except Exception:  # noqa: BLE001 - an environment's pickle methods may raise anything
            env = None
        kept = {"current": self._current, "traj_ids": self._ids}
        return {"env": env, "next_traj_id": self.next_id, **copy.deepcopy(kept)}

    async def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Begins a new episode if the state has no environment."""
        async with self._lock:
            env = None if state["env"] is None else pickle.loads(state["env"])  # first: it may raise
            kept = copy.deepcopy(state)
            self._current, self._ids, self.next_id = kept["current"], kept["traj_ids"], kept["next_traj_id"]
            if env is None:
                await self._reset()
            else:
                self.env.env = env

    async def frame(self, batch: PartialBatch) -> Fields:
        """Take one step and return its frame, which is for ``batch``. Raises what the environment or the
        policy raises."""
        async with self._lock:
            new_batch = self.config.reset_at_each_iter and batch is not self._batch
            self._batch = batch
            if new_batch or not self._current:
                await self._reset()
            step = self._act(batch.request.at_random)
            after = await self.env.step(step)
            self._apply_step_limit(after)
            kept = self._compact(after) if self.config.compact_obs else after
            frame = step | {under("next", key): value for key, value in kept.items()}
            if "policy_version" in step:
                frame["next", "policy_version"] = step["policy_version"]
            await self._advance(after)
            return frame

    def _compact(self, after: Fields) -> Fields:
        """Return what a frame has below ``"next"`` with ``compact_obs``."""
        names = ((key if isinstance(key, str) else key[-1], key) for key in after)
        return {key: after[key] for name, key in names if name in ENDS or key not in self._current}

    def _act(self, at_random: bool) -> Fields:
        step: Fields = dict(self._current)
        step[TRAJ_IDS] = self._ids.clone()
        if self.env.skips:
            step[MASK] = ~self._current["done"].view(self.env.shape)
        if self.version is not None:
            version, shape = self.version(), self.env.shape
            step["policy_version"] = torch.full(shape, version, dtype=torch.int64, device=self._device)
        if at_random or self.policy is None:
            step |= self.env.random_action()
        else:
            # Copies: a policy may return the same memory each time, or its own parameters.
            step |= {key: v.clone() for key, v in self.policy(self._current, self.env.shape).items()}
        return step

    def _apply_step_limit(self, after: Fields) -> None:
        limit = self._limit
        for ends in self.env.ends if limit else ():
            after[ends.step_count] = count = self._current[ends.step_count] + 1
            full = count >= limit
            for key in (ends.truncated, ends.done):
                after[key] = after[key] | full if key in after else full
            for key in ends.within:
                outer = after[ends.done if key[-1] == "done" else ends.truncated]
                while outer.dim() < after[key].dim():
                    outer = outer.unsqueeze(-2)
                after[key] = after[key] | outer

    async def _advance(self, after: Fields) -> None:
        """Continue from the next observation, or begin new episodes where one has ended."""
        env, ended = self.env, self.env.ended(after)
        restart = self.config.reset_when_done and bool(ended.any())
        self._current = current = await env.restart(after) if restart else env.proceed(after)
        for ends in env.ends if self._limit else ():
            count = after[ends.step_count]
            current[ends.step_count] = count.masked_fill(after[ends.done], 0) if restart else count
        if restart:
            self._start_trajectories(ended)

    def _start_trajectories(self, where: Tensor) -> None:
        count = int(where.sum())
        self._ids[where] = torch.arange(count, device=self._device) * self.stride + self.next_id
        self.next_id += count * self.stride
