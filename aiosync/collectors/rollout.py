"""Playing: an environment and a policy, one frame after the other, into batches."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from aiosync.collectors.batch_buffers import BatchBuffers
from aiosync.collectors.config import BatchConfig
from aiosync.collectors.env import Env
from aiosync.collectors.fields import MASK, TRAJ_IDS, Fields, under
from aiosync.collectors.messages import Collect
from aiosync.collectors.policy import PolicyAdapter
from aiosync.errors import InvalidArgumentError

__all__ = ["PartialBatch", "Rollout"]

_WRITE_TOGETHER = 16
"""Frames that are put into memory at a time."""


class PartialBatch:
    """A batch that is being collected, by one player or by several at the same time.

    A player first claims a place and then plays the frame for it. So several batches can be open: one that
    waits for its last frames, and the next one.

    Args:
        request: what is wanted.
        shelf: has the memory, once it is known what a frame consists of.
        width: how many frames there are in a place: those of environments that step together.

    Attributes:
        order: the places, each player's in a row and in the order of time.
        slot: the number of the memory; -1: there is none yet.
    """

    def __init__(self, request: Collect, buffers: BatchBuffers, width: int = 1) -> None:
        self.request = request
        self.order: list[int] = []
        self.buffer = -1
        self._capacity = -(-request.frames // width)
        self._buffers = buffers
        self._claimed = 0
        self._written = 0
        self._places_of: dict[int, list[int]] = {}
        self._unwritten: dict[int, Fields] = {}

    @property
    def has_room(self) -> bool:
        """Whether there are places to be claimed."""
        return self._claimed < self._capacity

    @property
    def complete(self) -> bool:
        """Whether every place has its frame."""
        return self._written == self._capacity

    @property
    def steps(self) -> int:
        """How many frames there are."""
        return self._written

    def claim(self) -> int:
        """Take the next place; :attr:`has_room` has to be true."""
        self._claimed += 1
        return self._claimed - 1

    def end_early(self) -> None:
        """End the batch with the frames of the current step. It has at least one frame."""
        self._capacity = max(self._claimed, 1)

    def write(self, place: int, rollout: int, frame: Fields) -> None:
        """Put a frame in its place."""
        if self.buffer < 0:
            self.buffer = self._buffers.allocate(frame, self._capacity)
        self._unwritten[place] = frame
        self._places_of.setdefault(rollout, []).append(place)
        self._written += 1
        if len(self._unwritten) >= _WRITE_TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if not self._unwritten:
            return
        places = sorted(self._unwritten)
        self._buffers[self.buffer].write(places, [self._unwritten[place] for place in places])
        self._unwritten.clear()

    def close(self, *, truncate: bool) -> None:
        """It is complete.

        Args:
            truncate: mark each player's last frame as truncated.
        """
        self._flush()
        views = self._buffers[self.buffer].views
        self.order = [place for rollout in sorted(self._places_of) for place in self._places_of[rollout]]
        for places in self._places_of.values() if truncate else ():
            for name in ("truncated", "done"):
                views["next", name][places[-1]] = True


class Rollout:
    """An environment's rollout, over the ends of episodes and of batches.

    A commit comes before a forward pass or after it, and the version that a frame is tagged with is read
    where its forward pass begins: nothing is awaited between the two.

    Args:
        env: the environment.
        actor: the policy; None: act at random.
        config: which frames.
        first, stride: the trajectories' numbers: ``first``, ``first + stride``, and so on.
        version: gives the version in service; None: frames are not tagged.
    """

    def __init__(
        self,
        env: Env,
        policy: PolicyAdapter | None,
        config: BatchConfig,
        first: int,
        stride: int,
        version: Callable[[], int] | None,
    ) -> None:
        if env.skips and config.max_frames_per_traj:
            raise InvalidArgumentError(
                f"max_frames_per_traj={config.max_frames_per_traj}: an environment that begins episodes by "
                "itself cannot be cut; make it with AutoresetMode.DISABLED, or have it limit them itself"
            )
        self.env = env
        self._policy = policy
        self._config = config
        self._next_id = first
        self._stride = stride
        self._version = version
        self._current: Fields = {}
        self._step_counts = torch.zeros((*env.shape, 1), dtype=torch.int64, device=env.device or "cpu")
        self._ids = torch.zeros(env.shape, dtype=torch.int64, device=env.device or "cpu")
        self._batch: PartialBatch | None = None
        self._lock = asyncio.Lock()

    async def reset(self, seed: int | None = None) -> None:
        """Begin a new episode, after the frame of the current step.

        Args:
            seed: begin anew, as this says.
        """
        async with self._lock:
            if seed is not None:
                self.env.set_seed(seed)
            await self._reset()

    async def _reset(self) -> None:
        self._current = await self.env.reset()
        self._start_trajectories(
            torch.ones(self.env.shape, dtype=torch.bool, device=self.env.device or "cpu")
        )

    def state(self) -> dict[str, Any]:
        """Where it stands; without the environment, if that cannot be pickled."""
        try:
            env = cloudpickle.dumps(self.env.env)
        except Exception:  # noqa: BLE001 - whatever its own methods raise
            env = None
        kept = {
            "current": self._current,
            "step_counts": self._step_counts,
            "traj_ids": self._ids,
            "next_traj_id": self._next_id,
        }
        return {"env": env, **copy.deepcopy(kept)}

    async def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there; with a new episode, if the environment is not in it."""
        async with self._lock:
            self._current = copy.deepcopy(state["current"])
            self._step_counts = copy.deepcopy(state["step_counts"])
            self._ids = copy.deepcopy(state["traj_ids"])
            self._next_id = state["next_traj_id"]
            if state["env"] is None:
                await self._reset()
            else:
                self.env.env = pickle.loads(state["env"])

    async def frame(self, batch: PartialBatch) -> Fields:
        """Play one.

        Raises:
            Exception: what the environment or the policy raises.
        """
        async with self._lock:
            new_batch = self._config.reset_at_each_iter and batch is not self._batch
            self._batch = batch
            if new_batch or not self._current:
                await self._reset()
            step = self._act(batch.request.at_random)
            after = await self.env.step(step)
            self._apply_step_limit(step, after)
            frame = step | {under("next", key): value for key, value in after.items()}
            if "policy_version" in step:
                frame["next", "policy_version"] = step["policy_version"]
            await self._advance(after)
            return frame

    def _act(self, at_random: bool) -> Fields:
        step: Fields = dict(self._current)
        step[TRAJ_IDS] = self._ids.clone()
        if self.env.skips:
            step[MASK] = ~self._current["done"].view(self.env.shape)
        if self._version is not None:
            where = self.env.device or "cpu"
            step["policy_version"] = torch.full(
                self.env.shape, self._version(), dtype=torch.int64, device=where
            )
        if at_random or self._policy is None:
            step["action"] = self.env.random_action()
        else:
            # Copies: a policy may give the same memory each time, or its own parameters.
            step |= {key: v.clone() for key, v in self._policy.act(self._current, self.env.shape).items()}
        return step

    def _apply_step_limit(self, step: Fields, after: Fields) -> None:
        limit = self._config.max_frames_per_traj
        if limit:
            step["step_count"] = self._step_counts
            after["step_count"] = self._step_counts = self._step_counts + 1
            full = self._step_counts >= limit
            after["truncated"] = after["truncated"] | full
            after["done"] = after["done"] | full

    async def _advance(self, after: Fields) -> None:
        """What is observed next is where the next frame begins, or it is a new episode's beginning."""
        done = after["done"].view(self.env.shape)
        if not done.any() or not self._config.reset_when_done:
            left = {"reward", "step_count"} if self._config.max_frames_per_traj else {"reward"}
            self._current = {key: value for key, value in after.items() if key not in left}
            return
        self._current = await self.env.restart(after)
        self._start_trajectories(done)

    def _start_trajectories(self, where: Tensor) -> None:
        count = int(where.sum())
        self._ids[where] = torch.arange(count, device=self.env.device or "cpu") * self._stride + self._next_id
        self._next_id += count * self._stride
        self._step_counts = self._step_counts.masked_fill(where.unsqueeze(-1), 0)
