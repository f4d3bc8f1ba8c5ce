"""The short way to write frames: straight from what an environment returns into a batch's memory."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from aiosync.collectors.batch_buffers import BatchBuffer, Column, write_fields
from aiosync.collectors.env import (
    ENDS,
    MASK,
    TRAJ_IDS,
    Env,
    Key,
    Values,
    as_array,
    value_of,
)
from aiosync.collectors.gymnasium_env import GymnasiumEnv, copied
from aiosync.collectors.policy import Actor, ObservationActor
from aiosync.collectors.tensordict_env import TensorDictEnv
from aiosync.collectors.trajectory_ids import TrajectoryIds
from aiosync.collectors.turns import NextTurn, clock
from aiosync.errors import InvalidArgumentError

VERSION = "policy_version"
_BOOL = np.dtype(np.bool_)


class Run(NamedTuple):
    """What :meth:`DirectFrames.run` has done."""

    end: int  # the place after the last frame that is complete
    found: Any  # what the environment returned last; None: it took no step
    # The environment's last step belongs to the next frame, which has to be completed in the general way: an
    # episode has ended; or there are other fields, types, shapes or dtypes than before.
    begun: bool
    # The policy's fields of the next frame, if they are others than before. The environment has not got them.
    chosen: Values | None = None


class DirectFrames(ABC):
    """Writes frames of one environment.

    Per step only the policy's fields and those of the environment's answer are written, by :meth:`run`. The
    other fields are written for many frames at a time, by :meth:`flush`: the observation and the end flags
    that a frame begins with are those below ``"next"`` of the frame before it; trajectories end with
    episodes. The version is written when there is another one.

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
        self._of_version = 0  # the first of those frames whose version is not written
        self._started = -1  # the place whose frame's beginning start() has written
        self._has_beginning = False  # whether that is the first of these frames

    @staticmethod
    def fits(policy: Actor) -> bool:
        """Whether this policy needs nothing but :attr:`observation`."""
        return True

    def start(self, place: int, current: Values) -> bool:
        """Write what a frame begins with that does not follow the one at the place before. Returns False,
        and writes nothing or a part, if these are not the fields that frames begin with here."""
        return False

    def begin(self, place: int, version: int | None, steps: int) -> None:
        """The next frame is at ``place``, of this version, and the rollout has taken so many steps."""
        started, self._started = place == self._started, -1
        if self._first == self._next or place != self._next or started:
            self.flush()
            self._first = self._next = self._of_version = place
            self._steps, self._has_beginning = steps, started
        elif version != self._version:
            self._write_version(place)
        self._version = version

    @abstractmethod
    def run(self, policy: Actor, place: int, end: int, turn: NextTurn) -> Run:
        """Take steps, and write their frames from ``place`` on: to before ``end``, or until a turn of the
        event loop is due, or until something else must be done first."""

    def _write_version(self, end: int) -> None:
        """Write the version of the frames before this place."""
        for column in self._versions:
            column[self._of_version : end] = self._version
        self._of_version = end

    def flush(self, *, begun: bool = False) -> None:
        """Write the other fields of the frames of this run; with ``begun``, also those of the frame after
        them, which ends no trajectory."""
        first, end = self._first, self._next + begun
        if first == end:
            return
        done = self._ends_done[first : end - begun if self._continues else first, ..., 0]
        self._ids.write(self._columns[TRAJ_IDS][first:end], done, self._steps)
        follow = first + self._has_beginning
        for beginning, following in self._carried:
            beginning[follow:end] = following[follow - 1 : end - 1]
        if self._mask is not None:
            self._mask[first:end] = ~self._begins_done[first:end, ..., 0]
        self._write_version(end)
        self._steps += end - first
        self._first = self._next = end
        self._has_beginning = False


class GymnasiumFrames(DirectFrames):
    """Of a Gymnasium environment whose observation is one array."""

    FIELDS = frozenset({"observation", *ENDS})

    def __init__(
        self, env: GymnasiumEnv, buffer: BatchBuffer, ids: TrajectoryIds, restarts: bool, chosen: Set[Key]
    ) -> None:
        super().__init__(env, buffer, ids, restarts, self.FIELDS, chosen)
        self._env = env
        self._beginnings: dict[Key, Column] = {
            key: column for key, column in buffer.columns.items() if key in self.FIELDS
        }
        # Most policies return one tensor, the action. It is handled in less time than several fields.
        self._action: Any = self._columns[next(iter(chosen))] if len(chosen) == 1 else None
        self._given: Any = None if self._action is None else env.given(self._action[0])
        self._observations = self._following["observation"]
        flat = (self._following[key][..., 0] for key in ("reward", *ENDS))
        self._rewards, self._dones, self._terminations, self._truncations = flat

    @staticmethod
    def fits(policy: Actor) -> bool:
        return isinstance(policy, ObservationActor) and policy.call is not None

    def start(self, place: int, current: Values) -> bool:
        if current.keys() != self.FIELDS:
            return False
        try:
            write_fields(self._beginnings, place, current)
        except InvalidArgumentError:  # the general way says it, or takes other memory
            return False
        self._started = place
        return True

    def run(self, policy: Any, place: int, end: int, turn: NextTurn) -> Run:
        same_memory = self._env.stop_copying()
        try:
            return self._run(policy, place, end, turn, same_memory)
        finally:
            if same_memory:
                self._env.copy_again()

    def _run(self, policy: Any, place: int, end: int, turn: NextTurn, same_memory: bool) -> Run:
        # With a small policy and a small environment, a fourth of the time would be spent here if this were
        # divided into methods: the processor's caches have no room for all the code of a step.
        env, step, call, stops = self._env, self._env.env.step, policy.call, self._stops
        actions, given, observations = self._action, self._given, self._observations
        rewards, terminations, truncations = self._rewards, self._terminations, self._truncations
        action_shape, action_dtype = (None, None) if actions is None else (actions.shape[1:], actions.dtype)
        observation, found, begun, other = self.observation, None, False, None
        checked: Any = self  # no observation
        while place < end:
            chosen = call(observation)
            try:  # as _array_of(), with fewer calls
                action = chosen.numpy() if type(chosen) is Tensor else None
            except (RuntimeError, TypeError):
                action = _array_of(chosen)
            if action is not None and action.shape == action_shape and action.dtype == action_dtype:
                actions[place] = action
                found = step(given(action))
            else:
                fields: Values = dict(policy.fields_of(chosen, observation))
                if not self._write_chosen(place, fields):
                    other = fields
                    break
                found = env.act(fields)
            begun = True
            try:
                observed, reward, terminated, truncated, _ = found
            except (TypeError, ValueError):
                break
            own: Any = observed.copy() if observed is checked else self._own(*found[:4])
            if own is None:
                break
            if same_memory and own.dtype == observed.dtype:
                checked = observed  # the next steps return the same memory, and the rest is alike too
            try:
                rewards[place] = reward
                terminations[place] = terminated
                truncations[place] = truncated
            except (AttributeError, TypeError, ValueError):  # no numbers, or of other shapes
                break
            observations[place] = own
            observation = from_numpy(own)
            if stops and np.count_nonzero(terminations[place] | truncations[place]):
                break
            begun = False
            place += 1
            if clock() >= turn.not_before and turn.is_due():
                break
        self.observation, self._next = observation, place
        return Run(place, copied(found) if same_memory and found is not None else found, begun, other)

    def _own(self, observed: Any, *others: Any) -> Any:
        """Return a copy of an observation: a policy may write into its input, the environment into what it
        returned. None: this, or the reward and the flags, are not as in the frames before."""
        if type(observed) is not np.ndarray or (self._env.shape and not self._are_usual(*others)):
            return None
        usual = self._observations
        own = observed.copy() if observed.dtype == usual.dtype else value_of(observed)
        return own if own.shape == usual.shape[1:] and own.dtype == usual.dtype else None

    def _are_usual(self, reward: Any, terminated: Any, truncated: Any) -> bool:
        """Return whether these are a reward and two booleans for each environment."""
        try:
            same = reward.shape == terminated.shape == truncated.shape == self._rewards.shape[1:]
            return bool(same and terminated.dtype == truncated.dtype == _BOOL)
        except AttributeError:  # no arrays
            return False

    def _write_chosen(self, place: int, fields: Values) -> bool:
        if fields.keys() != self._chosen:
            return False
        try:
            self._write(place, fields)
        except InvalidArgumentError:  # the general way says it, or takes other memory
            return False
        return True

    def flush(self, *, begun: bool = False) -> None:
        new = slice(self._first, self._next + begun)
        self._dones[new] = self._terminations[new] | self._truncations[new]
        super().flush(begun=begun)


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

    def run(self, policy: Actor, place: int, end: int, turn: NextTurn) -> Run:
        env, found, begun, other = self._env, None, False, None
        while place < end:
            chosen: Values = dict(policy(self.observation))
            if chosen.keys() != self._chosen:
                kept = {key: value for key, value in self.observation.items() if key in self._chosen}
                chosen = kept | chosen
                if chosen.keys() != self._chosen:
                    other = chosen
                    break
            self._write(place, chosen)
            found, begun = env.act(chosen), True
            if found.keys() != self._fields:
                break
            after = env.fields_of(found)
            self._write_next(place, after)
            self.observation = env.proceed(after)
            if self._stops and np.count_nonzero(as_array(after["done"])):
                break
            begun = False
            place += 1
            if turn.is_due():
                break
        self._next = place
        return Run(place, found, begun, other)


def _array_of(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """Return the tensor as an array. None: NumPy has no such dtype."""
    try:
        return as_array(tensor)
    except TypeError:
        return None


def _can_follow(memory: BatchBuffer, carried: Iterable[Key]) -> bool:
    """Return whether these fields have the shapes and dtypes that they have below ``"next"``."""
    columns, following = memory.columns, memory.next_columns
    pairs = ((columns[key], following[key]) for key in carried)
    return all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)


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
        if plain and fields.isdisjoint(chosen) and _can_follow(memory, fields):
            return GymnasiumFrames(env, memory, ids, restarts, chosen)
    if isinstance(env, TensorDictEnv):
        carried = env.carried
        if carried is None or not carried <= after or not carried.isdisjoint(chosen):
            return None
        if _can_follow(memory, carried):
            return TensorDictFrames(env, memory, ids, restarts, carried, chosen | env.kept)
    return None
