"""Step an environment with a policy, and write the frames into batches."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from aiosync.collectors.batch_buffers import BatchBuffer
from aiosync.collectors.batch_config import BatchConfig
from aiosync.collectors.direct_frames import DirectFrames, direct_frames
from aiosync.collectors.env import (
    ENDS,
    MASK,
    TRAJ_IDS,
    Env,
    Key,
    NoNestedLoop,
    Values,
    as_array,
    as_tensor,
    as_tensors,
)
from aiosync.collectors.partial_batch import PartialBatch
from aiosync.collectors.pickling import dump_env, load_env
from aiosync.collectors.policy import Acting, Actor
from aiosync.collectors.trajectory_ids import TrajectoryIds
from aiosync.collectors.turns import NextTurn


@dataclass(eq=False, repr=False)
class Rollout:
    """The rollout of one environment, across the ends of episodes and batches.

    A commit of new weights happens before a forward pass or after it. A frame is tagged with the version that
    is read right before its forward pass; nothing is awaited between the two.
    """

    number: int  # among the rollouts of its worker
    env: Env
    policy: Actor | None  # None: random actions
    acting: Acting  # the context of calls of the policy
    config: BatchConfig
    first_id: int  # the number of the first trajectory; the next one has this number + stride
    stride: int
    version: Callable[[], int] | None  # returns the current version of the policy; None: no frame is tagged
    direct: bool = False  # frames may be written by DirectFrames: no option or other rollout is in the way
    # What the environment observes now: the next frame begins with it, or with a reset if it is empty.
    _current: Values = field(default_factory=dict)
    # What the environment's step() returned last, if _current has not been made from it yet.
    _found: Any = None
    # Whether the next frame begins with what the last frame has below "next", which is in the same batch.
    _follows: bool = False
    # The fields of the last frame that are not below "next"; those of them that the policy returned.
    _keys: tuple[Set[Key], Set[Key]] = (frozenset(), frozenset())
    # The batch of the last frame: reset_at_each_iter compares it with that of the next one.
    _batch: PartialBatch | None = None
    # The fields of its first frame: of the policy, below "next", and those that the environment keeps.
    _fields: tuple[Set[Key], Set[Key], Set[Key]] | None = None
    _seed: int | None = None  # of a reset that has failed; None: it had none, or there was no such reset
    _steps: int = 0  # how many steps the environment has taken, or fewer after a state was loaded
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        env = self.env
        env.configure(self.config)
        self._limit = self.config.step_limit
        self._limited = env.ends if self._limit else ()
        self._ids = TrajectoryIds(env.shape, self.first_id, self.stride, skips=env.skips)
        self._version = np.zeros(env.shape, np.int64)  # of the last frame

    async def reset(self, seed: int | None = None) -> None:
        """Begin a new episode, after the frame in progress. ``seed``: seed the environment first."""
        async with self._lock:
            await self._reset(seed)

    async def _reset(self, seed: int | None = None) -> None:
        seed = self._seed if seed is None else seed
        if seed is not None:
            self.env.set_seed(seed)
        self._flush()
        # If the environment raises, the next frame begins with another reset, with the same seed.
        self._current, self._found, self._follows, self._seed = {}, None, False, seed
        current = await self.env.reset()
        self._seed = None
        for ends in self._limited:
            current[ends.step_count] = torch.zeros_like(as_tensor(current[ends.done]), dtype=torch.int64)
        self._current = current
        self._ids.restart(self._steps)

    async def restart(self, next_id: int) -> None:
        """Begin a new episode, and number trajectories from ``next_id`` on, or higher."""
        async with self._lock:
            self._flush()
            self._ids.raise_to(next_id)
            await self._reset()

    async def state(self) -> dict[str, Any]:
        """Return the state, without the environment if that cannot be pickled; after the reset in progress,
        which may go on when the batch is complete."""
        async with self._lock:
            try:
                env = dump_env(self.env.env)
            except Exception:  # noqa: BLE001 - an environment's pickle methods may raise anything
                env = None
            self._flush()
            lengths = as_tensor(np.asarray(self._steps - self._ids.begun))
            ids = as_tensor(self._ids.current)
            kept = {"current": as_tensors(self._observed()), "traj_ids": ids, "lengths": lengths}
            return {"env": env, "next_traj_id": self._ids.next_id, **copy.deepcopy(kept)}

    async def load_state(self, state: dict[str, Any]) -> Env | None:
        """Restore a state. Begins a new episode if the state has no environment. Returns the environment that
        was replaced, if there is one: the caller closes it."""
        async with self._lock:
            env = None if state["env"] is None else load_env(state["env"])  # first: it may raise
            kept = copy.deepcopy(state)
            self._flush()
            self._ids.take_cut()
            self._ids.current[...] = as_array(kept["traj_ids"])
            self._steps, self._ids.begun[...] = 0, -as_array(kept["lengths"])
            self._ids.next_id = kept["next_traj_id"]
            self._current, self._found, self._follows, self._seed = kept["current"], None, False, None
            if env is None:
                await self._reset()
            if env is None or env is self.env.env:
                return None
            replaced = copy.copy(self.env)
            self.env.env = env
            return replaced

    async def collect(self, batch: PartialBatch, turn: NextTurn) -> None:
        """Collect frames for ``batch`` until it has no room, or until a turn of the event loop is due,
        but at least one. Raises what the environment or the policy raises."""
        async with self._lock:
            if batch is not self._batch:
                self._flush()
                if self.direct and self._batch is not None:
                    batch.try_layout_of(self._batch)
                    batch.direct = self._direct_frames(batch.memory)
                self._batch, self._follows = batch, False
                batch.lengths |= self._lengths()
                if self.config.reset_at_each_iter:
                    self._current, self._found = {}, None
            # Grad mode belongs to the thread: it may not be changed where other tasks can run.
            acting, each = (nullcontext(), self.acting) if self.env.suspends else (self.acting, nullcontext())
            with acting:
                if not (self._current or self._found):
                    await self._reset()
                while batch.has_room:  # other rollouts may claim places while this one awaits
                    after, chosen = None, None
                    directly = self._goes_directly(batch)
                    if directly:
                        after, chosen = self._collect_directly(batch, turn)
                    if not directly or chosen is not None:
                        after = await self._collect_frame(batch, each, chosen)
                    if after is not None:
                        await self._advance(after)
                    if turn.is_due():
                        return

    def _goes_directly(self, batch: PartialBatch) -> bool:
        """Return whether the next frame can be written directly."""
        frames, policy = batch.direct, self.policy
        if frames is None or policy is None or batch.request.at_random:
            return False
        return frames.fits(policy) and (self._follows or frames.start(batch.claimed, self._observed()))

    async def _collect_frame(
        self, batch: PartialBatch, acting: AbstractContextManager[None], chosen: Values | None
    ) -> Values:
        """Collect one frame. Returns what the environment returned. ``chosen``: what the policy has returned,
        if it was called already."""
        self._flush()
        place = batch.claim(self.number)
        current = self._observed()
        # Each part is written before the next call that may write over its memory.
        step = current | self._tags(current)
        batch.write(place, step)
        with acting:
            action = self._act(batch.request.at_random) if chosen is None else chosen
        batch.write(place, action)
        self._keys = step.keys() | action.keys(), action.keys()
        after = await self.env.step(current | action)
        if self._limited:
            self._apply_step_limit(after)
            after = self.env.truncated_at(after)
        self._finish(batch, place, after)
        return after

    def _finish(self, batch: PartialBatch, place: int, after: Values) -> None:
        """Write the last fields of a frame."""
        kept = self._compact(after) if self.config.compact_obs else after
        if self.version is not None:
            kept = kept | {"policy_version": self._version}
        self._steps += 1
        batch.write(place, kept, below_next=True)
        batch.finish(place, self._keys[0], kept.keys())
        if self.direct and batch.steps == 1:
            self._fields = frozenset(self._keys[1]), frozenset(after), frozenset(self.env.kept)
            batch.direct = self._direct_frames(batch.memory)

    def _direct_frames(self, memory: Any) -> DirectFrames | None:
        """Return what writes the frames of a batch with the fields of the last batch, if something can."""
        if not isinstance(memory, BatchBuffer) or self._fields is None:
            return None
        if memory.direct is None or memory.direct[0] != self._fields:
            restarts, (chosen, after, _) = self.config.reset_when_done, self._fields
            found = direct_frames(self.env, memory, self._ids, restarts, chosen=chosen, after=after)
            memory.direct = self._fields, found
        return cast("DirectFrames | None", memory.direct[1])

    def _collect_directly(self, batch: PartialBatch, turn: NextTurn) -> tuple[Values | None, Values | None]:
        """Collect frames while nothing but calls of the policy and steps of the environment is to do.

        Returns:
            What the environment returned, if an episode has ended or it has other fields than before; and
            what the policy has chosen for the next frame, if that has other fields.
        """
        env: Any = self.env
        frames: Any = batch.direct
        first = batch.claimed
        version = None if self.version is None else self.version()
        if version is not None:
            self._version.fill(version)
        frames.begin(first, version, self._steps)
        if self._found is None:
            frames.observation = env.observed(self._current)
        with NoNestedLoop():
            run = frames.run(self.policy, first, batch.capacity, turn)
        if run.begun or run.found is not None:  # None may be what the environment has returned
            self._found, self._follows = run.found, True
        if count := run.end + run.begun - first:
            batch.claim(self.number, count)
        batch.count(run.end - first)
        self._steps += run.end - first
        if not run.begun:
            return None, run.chosen
        frames.flush(begun=True)
        batch.wrote(self._keys[0])
        after: Values = env.fields_of(self._found)
        self._finish(batch, run.end, after)
        return after, None

    def _flush(self) -> None:
        """Write what is left to write of frames that were collected directly."""
        if self._batch is not None and self._batch.direct is not None:
            self._batch.direct.flush()

    def _observed(self) -> Values:
        """Return what the next frame begins with."""
        if self._found is not None:
            env: Any = self.env
            self._current, self._found = env.proceed(env.fields_of(self._found)), None
        return self._current

    def _compact(self, after: Values) -> Values:
        """Return what a frame has below ``"next"`` with ``compact_obs``."""
        names = ((key if isinstance(key, str) else key[-1], key) for key in after)
        return {key: after[key] for name, key in names if name in ENDS or key not in self._current}

    def _tags(self, current: Values) -> Values:
        """Return the collector's own fields of the next frame."""
        tags: Values = {TRAJ_IDS: self._ids.current}
        if self.env.skips:
            tags[MASK] = ~current["done"].reshape(self.env.shape)
        if self.version is not None:
            self._version.fill(self.version())
            tags["policy_version"] = self._version
        return tags

    def _act(self, at_random: bool) -> Values:
        if at_random or self.policy is None:
            return self.env.random_action(self._current)
        return dict(self.policy(self._current))

    def _apply_step_limit(self, after: Values) -> None:
        for ends in self._limited:
            after[ends.step_count] = count = as_tensor(self._current[ends.step_count]) + 1
            full = count >= self._limit
            for key in (ends.truncated, ends.done):
                after[key] = as_tensor(after[key]) | full if key in after else full
            for key in ends.within:
                outer = as_tensor(after[ends.done if key[-1] == "done" else ends.truncated])
                inner = as_tensor(after[key])
                while outer.dim() < inner.dim():
                    outer = outer.unsqueeze(-2)
                after[key] = inner | outer

    async def _advance(self, after: Values) -> None:
        """Continue from the next observation, or begin new episodes where one has ended."""
        env, ended = self.env, as_array(self.env.ended(after))
        restart = self.config.reset_when_done and bool(np.count_nonzero(ended))
        # Before the environment is called: it may write over the memory of what it returned.
        counts: Values = {}
        for ends in self._limited:
            count, done = as_tensor(after[ends.step_count]), as_tensor(after[ends.done])
            counts[ends.step_count] = count.masked_fill(done, 0) if restart else count
        if restart:
            self._ids.start(ended, self._steps)
        self._current = await env.restart(after) if restart else env.proceed(after)
        self._current.update(counts)
        self._found, self._follows = None, not restart or env.skips

    def _lengths(self) -> dict[int, int]:
        """Return how many frames the current trajectories have: number -> frames, if there are any."""
        if self.config.trajs_per_batch is None or self.config.set_truncated:
            return {}  # with set_truncated trajectories end with the batch
        return self._ids.lengths(self._steps)

    def take_cut(self) -> list[int]:
        """Return and forget the numbers of the trajectories that a reset has ended."""
        return self._ids.take_cut()
