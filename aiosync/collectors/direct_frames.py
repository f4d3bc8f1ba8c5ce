"""The short way to write frames: straight from what an environment returns into a batch's memory."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from aiosync.collectors.batch_buffers import BatchBuffer, write_fields
from aiosync.collectors.env import (
    ENDS,
    MASK,
    TRAJ_IDS,
    Env,
    Fields,
    Key,
    Values,
    as_array,
    as_tensor,
    value_of,
)
from aiosync.collectors.gymnasium_env import GymnasiumEnv
from aiosync.collectors.policy import Actor, ObservationActor
from aiosync.collectors.tensordict_env import TensorDictEnv
from aiosync.collectors.trajectory_ids import TrajectoryIds

VERSION = "policy_version"
_BOOL = np.dtype(np.bool_)


class DirectFrames(ABC):
    """Writes frames of one environment, each of which begins where the one before it has ended.

    Per step only the policy's fields and those of the environment's answer are written, by :meth:`run`. The
    other fields are written for many frames at a time, by :meth:`flush`: the observation and the end flags
    that a frame begins with are those below ``"next"`` of the frame before it; all have the same version;
    trajectories end with episodes.

    Attributes:
        observation: what the policy gets for the next frame; see :meth:`fits`.
    """

    observation: Any = None

    def __init__(
        self,
        env: Env,
        buffer: BatchBuffer,
        ids: TrajectoryIds,
        restarts: bool,
        carried: Iterable[Key],
        chosen: Set[Key],
    ) -> None:
        following: dict[Key, Any] = {key: column.array for key, column in buffer.next_columns.items()}
        columns: dict[Key, Any] = {key: column.array for key, column in buffer.columns.items()}
        self._columns, self._following = columns, following
        self._chosen = chosen  # the policy's fields of each frame
        self._others = columns.keys() - chosen  # with those below "next"
        self._check = buffer.check
        self._write = functools.partial(write_fields, buffer.columns)
        self._carried = [(columns[key], following[key]) for key in carried]
        self._mask, self._begins_done, self._ends_done = columns.get(MASK), columns["done"], following["done"]
        self._versions = [each[VERSION] for each in (columns, following) if VERSION in each]
        self._version: int | None = None
        self._ids = ids
        # Whether episodes begin by themselves; whether the run ends with an episode.
        self._continues = restarts and env.skips
        self._stops = restarts and not env.skips
        # The frames that are not flushed: from this place to before that one. How many steps the rollout had
        # taken before them.
        self._first = self._next = self._steps = 0

    @staticmethod
    def fits(policy: Actor) -> bool:
        """Whether this policy needs nothing but :attr:`observation`."""
        return True

    def begin(self, place: int, version: int | None, steps: int) -> None:
        """The next frame is at ``place``, of this version, and the rollout has taken so many steps."""
        if place != self._next or version != self._version:
            self.flush()
            self._first = self._next = place
            self._version, self._steps = version, steps

    @abstractmethod
    def run(self, policy: Actor, place: int, end: int, until: float) -> tuple[int, Any, bool]:
        """Take steps, and write their frames from ``place`` on: to before ``end``, or until a time of
        ``time.perf_counter()``, or until something else must be done first.

        Returns:
            The place of the last frame, what the environment returned for it, and whether it is complete.
            If not, an episode has ended; or it has other fields, types, shapes or dtypes than before, and is
            not written, or only in parts.
        """

    def _completed(self, chosen: Values) -> Values:
        """Return the policy's fields of a frame, of which it has returned ``chosen``. InvalidArgumentError:
        one is missing."""
        if chosen.keys() != self._chosen:
            self._check(chosen.keys() | self._others, frozenset())
        return chosen

    def flush(self, *, goes_on: bool = False) -> None:
        """Write the other fields of the frames of this run.

        ``goes_on``: begin no trajectory after the last frame, even if its episode has ended.
        """
        first, end = self._first, self._next
        if first == end:
            return
        done = self._ends_done[first : end - goes_on if self._continues else first, ..., 0]
        self._ids.write(self._columns[TRAJ_IDS][first:end], done, self._steps)
        for beginning, following in self._carried:
            beginning[first:end] = following[first - 1 : end - 1]
        if self._mask is not None:
            self._mask[first:end] = ~self._begins_done[first:end, ..., 0]
        for column in self._versions:
            column[first:end] = self._version
        self._steps += end - first
        self._first = end


class GymnasiumFrames(DirectFrames):
    """Of a Gymnasium environment whose observation is one array."""

    FIELDS = frozenset({"observation", *ENDS})

    def __init__(
        self, env: GymnasiumEnv, buffer: BatchBuffer, ids: TrajectoryIds, restarts: bool, chosen: Set[Key]
    ) -> None:
        super().__init__(env, buffer, ids, restarts, self.FIELDS, chosen)
        self._env = env
        # Most policies return one tensor, the action. It is handled in less time than several fields.
        self._action: Any = self._columns[next(iter(chosen))] if len(chosen) == 1 else None
        self._given: Any = None if self._action is None else env.given(self._action[0])
        self._observations = self._following["observation"]
        flat = (self._following[key][..., 0] for key in ("reward", *ENDS))
        self._rewards, self._dones, self._terminations, self._truncations = flat

    @staticmethod
    def fits(policy: Actor) -> bool:
        return isinstance(policy, ObservationActor) and policy.call is not None

    def run(self, policy: Any, place: int, end: int, until: float) -> tuple[int, Any, bool]:
        # With a small policy and a small environment, a fourth of the time would be spent here if this were
        # divided into methods: the processor's caches have no room for all the code of a step.
        env, step, call, clock = self._env, self._env.env.step, policy.call, time.perf_counter
        actions, given, observations, bool_ = self._action, self._given, self._observations, _BOOL
        rewards, terminations, truncations = self._rewards, self._terminations, self._truncations
        shape, dtype = observations.shape[1:], observations.dtype
        ends_shape, stops = rewards.shape[1:], self._stops
        action_shape, action_dtype = (None, None) if actions is None else (actions.shape[1:], actions.dtype)
        observation, complete = as_tensor(self.observation), True
        for place in range(place, end):  # noqa: B020 - the last place is returned
            chosen = call(observation)
            action = as_array(chosen) if type(chosen) is Tensor else None
            if action is not None and action.shape == action_shape and action.dtype == action_dtype:
                actions[place] = action
                found = step(given(action))
            else:
                found = env.act(self._write_fields(place, policy.fields_of(chosen, observation)))
            observed, reward, terminated, truncated, *_ = found
            complete = False
            if type(observed) is not np.ndarray:
                break
            # In any case a copy: a policy may write into its input.
            observed = observed.copy() if observed.dtype == dtype else value_of(observed)
            if observed.shape != shape or observed.dtype != dtype:
                break
            try:
                if ends_shape and not (
                    reward.shape == terminated.shape == truncated.shape == ends_shape
                    and terminated.dtype == truncated.dtype == bool_
                ):
                    break
                rewards[place] = reward
                terminations[place] = terminated
                truncations[place] = truncated
            except (AttributeError, TypeError, ValueError):  # no numbers, or of other shapes
                break
            observations[place] = observed
            observation = from_numpy(observed)
            if stops and np.count_nonzero(terminated | truncated):
                break
            complete = True
            if clock() >= until:
                break
        self._next, self.observation = place + 1, observation
        return place, found, complete

    def _write_fields(self, place: int, fields: Fields) -> Values:
        """Write what the policy has chosen, in the general way."""
        chosen = self._completed({key: as_array(value) for key, value in fields.items()})
        self._write(place, chosen)
        return chosen

    def flush(self, *, goes_on: bool = False) -> None:
        new = slice(self._first, self._next)
        self._dones[new] = self._terminations[new] | self._truncations[new]
        super().flush(goes_on=goes_on)


class TensorDictFrames(DirectFrames):
    """Of a torchrl environment whose steps need nothing but fields, which are all of its own."""

    def __init__(
        self,
        env: TensorDictEnv,
        buffer: BatchBuffer,
        ids: TrajectoryIds,
        restarts: bool,
        carried: Set[Key],
        chosen: Set[Key],
    ) -> None:
        super().__init__(env, buffer, ids, restarts, carried, chosen)
        self._env = env
        self._write_next = functools.partial(write_fields, buffer.next_columns)
        self._fields = buffer.next_columns.keys() - {VERSION}

    def run(self, policy: Actor, place: int, end: int, until: float) -> tuple[int, Any, bool]:
        env, complete = self._env, True
        for place in range(place, end):  # noqa: B020 - the last place is returned
            chosen: Values = dict(policy(self.observation))
            if chosen.keys() != self._chosen:
                kept = {key: value for key, value in self.observation.items() if key in self._chosen}
                chosen = self._completed(kept | chosen)
            self._write(place, chosen)
            found = env.act(chosen)
            self._next, complete = place + 1, False
            if found.keys() != self._fields:
                break
            after = env.fields_of(found)
            self._write_next(place, after)
            self.observation = env.proceed(after)
            if self._stops and np.count_nonzero(as_array(found["done"])):
                break
            complete = True
            if time.perf_counter() >= until:
                break
        return place, found, complete


def direct_frames(
    env: Env, memory: BatchBuffer, ids: TrajectoryIds, restarts: bool, *, chosen: Set[Key], after: Set[Key]
) -> DirectFrames | None:
    """Return what writes the frames of a batch whose first frame is complete.

    Args:
        env: the environment.
        memory: that of the batch.
        ids: the environment's trajectories.
        restarts: whether an episode begins where one has ended.
        chosen: the fields that the policy has added to the first frame.
        after: the fields that the environment has returned for it.

    Returns:
        None: the frames have other fields than these classes write, or the environment is of another kind.
    """
    if any(each.array is None for each in memory.columns.values()):
        return None
    if memory.next_columns.keys() - {VERSION} != after:
        return None  # the policy adds fields below "next" itself
    if isinstance(env, GymnasiumEnv):
        fields = GymnasiumFrames.FIELDS
        plain = not env.suspends and env.device is None and after == fields | {"reward"}
        if plain and fields.isdisjoint(chosen):
            return GymnasiumFrames(env, memory, ids, restarts, chosen)
    if isinstance(env, TensorDictEnv):
        carried = env.carried
        if carried is not None and carried <= after and carried.isdisjoint(chosen):
            return TensorDictFrames(env, memory, ids, restarts, carried, chosen | env.kept)
    return None
