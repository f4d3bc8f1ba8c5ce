"""The short way to write frames: straight from what an environment returns into a batch's memory."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np

from aiosync.collectors.batch_buffers import BatchBuffer, Column, write_fields
from aiosync.collectors.env import (
    ENDS,
    MASK,
    TRAJ_IDS,
    Env,
    Key,
    Value,
    Values,
    as_array,
    value_of,
)
from aiosync.collectors.gymnasium_env import GymnasiumEnv
from aiosync.collectors.policy import Actor
from aiosync.collectors.tensordict_env import TensorDictEnv

VERSION = "policy_version"


class DirectFrames(ABC):
    """Writes frames of one environment, each of which begins where the one before it has ended.

    Per step only the policy's fields and those of the environment's answer are written. The other fields are
    written for a run of frames at a time, by :meth:`flush`: the observation and the end flags that a frame
    begins with are those below ``"next"`` of the frame before it; trajectory numbers and version are those of
    the whole run.

    Attributes:
        chosen: the policy's fields of each frame.
        write: writes the policy's fields of the frame at a place.
        observation: what the policy gets for the next frame; see :meth:`chooser`.
        done: which episodes have ended with the frame that was recorded last.
    """

    observation: Any = None
    done: Any = None

    def __init__(self, buffer: BatchBuffer, ids: Value, carried: Iterable[Key], chosen: Set[Key]) -> None:
        self.chosen = chosen
        self._others = buffer.columns.keys() - chosen  # of each frame, with those below "next"
        following: dict[Key, Any] = {key: column.array for key, column in buffer.next_columns.items()}
        columns: dict[Key, Any] = {key: column.array for key, column in buffer.columns.items()}
        self.write: Callable[[int, Values], None] = _writer_of(buffer.columns, chosen)
        self._following = following
        self._carried = [(columns[key], following[key]) for key in carried]
        self._mask, self._begins_done = columns.get(MASK), columns["done"]
        self._versions = [each[VERSION] for each in (columns, following) if VERSION in each]
        self._version: int | None = None
        self._ids = ids  # of the current trajectories; changes in place
        self._ids_column, self._first_ids = columns[TRAJ_IDS], 0  # from this place on, the numbers are _ids
        self._first = self._next = 0  # the run: from this place to before that one

    @staticmethod
    def chooser(policy: Actor) -> Callable[[Any], Any] | None:
        """Return the function of :attr:`observation` that calls the policy. None: it needs more than that."""
        return policy

    def begin(self, place: int, version: int | None) -> None:
        """The next frame is at ``place``, and of this version."""
        if place != self._next or version != self._version:
            self.flush()
            self._first = self._first_ids = self._next = place
            self._version = version

    def completed(self, chosen: Values, check: Callable[[Set[Key], Set[Key]], None]) -> Values:
        """Return the policy's fields of a frame, of which it has returned ``chosen``. InvalidArgumentError:
        one is missing. ``check``: see :meth:`BatchBuffer.check`."""
        check(chosen.keys() | self._others, frozenset())
        return chosen

    @abstractmethod
    def record(self, place: int, found: Any) -> int | None:
        """Write what the environment's ``act`` returned. Returns how many episodes have ended. None: it has
        other fields, types, shapes or dtypes than before, and is not written, or only in parts."""

    def keep_ids(self) -> None:
        """Write the trajectory numbers of the frames since the numbers changed last."""
        self._ids_column[self._first_ids : self._next] = self._ids
        self._first_ids = self._next

    def flush(self) -> None:
        """Write the other fields of the frames of this run."""
        first, end = self._first, self._next
        if first == end:
            return
        self._first = end
        self.keep_ids()
        for beginning, following in self._carried:
            beginning[first:end] = following[first - 1 : end - 1]
        if self._mask is not None:
            self._mask[first:end] = ~self._begins_done[first:end, ..., 0]
        for column in self._versions:
            column[first:end] = self._version


def _writer_of(columns: Mapping[Key, Column], chosen: Set[Key]) -> Callable[[int, Values], None]:
    """Return what writes the policy's fields of a frame; see :func:`write_fields`."""
    if len(chosen) != 1:
        return functools.partial(write_fields, columns)
    (key,) = chosen
    column = columns[key]
    array, shape = column.array, column.shape
    assert array is not None
    dtype = array.dtype

    def write_one(place: int, fields: Values) -> None:  # a third of the time: most policies return an action
        found = fields[key]
        same = type(found) is np.ndarray and found.dtype == dtype and found.shape == shape
        if same and len(fields) == 1:
            array[place] = found
        else:
            write_fields(columns, place, fields)

    return write_one


class GymnasiumFrames(DirectFrames):
    """Of a Gymnasium environment whose observation is one array."""

    FIELDS = frozenset({"observation", *ENDS})

    def __init__(self, buffer: BatchBuffer, ids: Value, chosen: Set[Key]) -> None:
        super().__init__(buffer, ids, self.FIELDS, chosen)
        self._observation = self._following["observation"]
        self._shape, self._dtype = self._observation.shape[1:], self._observation.dtype
        flat = (self._following[key][..., 0] for key in ("reward", *ENDS))
        self._reward, self._done, self._terminated, self._truncated = flat
        self._ends_shape = self._done.shape[1:]

    @staticmethod
    def chooser(policy: Actor) -> Callable[[Any], Any] | None:
        return policy.observe if policy.observes_only else None

    def record(self, place: int, found: Any) -> int | None:
        self._next = place + 1
        observation, reward, terminated, truncated, *_ = found
        if type(observation) is not np.ndarray:
            return None
        # In any case a copy: a policy may write into its input.
        observation = observation.copy() if observation.dtype == self._dtype else value_of(observation)
        if observation.shape != self._shape or observation.dtype != self._dtype:
            return None
        try:
            done = terminated | truncated
            if self._ends_shape and not (
                done.shape == reward.shape == self._ends_shape and done.dtype == bool
            ):
                return None
            self._reward[place] = reward
            self._terminated[place] = terminated
            self._truncated[place] = truncated
            self._done[place] = done
        except (AttributeError, TypeError, ValueError):  # no numbers, or of other shapes
            return None
        self._observation[place] = self.observation = observation
        self.done = done
        return int(np.count_nonzero(done)) if self._ends_shape else int(done)


class TensorDictFrames(DirectFrames):
    """Of a torchrl environment whose steps need nothing but fields, which are all of its own."""

    def __init__(
        self, buffer: BatchBuffer, ids: Value, env: TensorDictEnv, carried: Set[Key], chosen: Set[Key]
    ) -> None:
        super().__init__(buffer, ids, carried, chosen)
        self._env = env
        self._write_next = functools.partial(write_fields, buffer.next_columns)
        self._fields = buffer.next_columns.keys() - {VERSION}

    def completed(self, chosen: Values, check: Callable[[Set[Key], Set[Key]], None]) -> Values:
        kept = {key: value for key, value in self.observation.items() if key in self.chosen}
        return super().completed(kept | chosen, check)

    def record(self, place: int, found: Any) -> int | None:
        self._next = place + 1
        if found.keys() != self._fields:
            return None
        self._write_next(place, found)
        self.observation = self._env.proceed(found)
        self.done = as_array(found["done"])
        return int(np.count_nonzero(self.done))


def direct_frames(
    env: Env, memory: BatchBuffer, ids: Value, *, chosen: Set[Key], after: Set[Key]
) -> DirectFrames | None:
    """Return what writes the frames of a batch whose first frame is complete.

    Args:
        env: the environment.
        memory: that of the batch.
        ids: the numbers of the environment's current trajectories, which change in place.
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
        return GymnasiumFrames(memory, ids, chosen) if plain and fields.isdisjoint(chosen) else None
    if isinstance(env, TensorDictEnv):
        carried = env.carried
        if carried is not None and carried <= after and carried.isdisjoint(chosen):
            return TensorDictFrames(memory, ids, env, carried, chosen | env.kept)
    return None
