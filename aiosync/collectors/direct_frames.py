"""The short way to write frames: straight from what a Gymnasium environment returns into a batch's memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from aiosync.collectors.batch_buffers import BatchBuffer, write_fields
from aiosync.collectors.env import ENDS, MASK, TRAJ_IDS, GymnasiumEnv, Key, Value, value_of

_CARRIED = ("observation", *ENDS)
_NEXT = {*_CARRIED, "reward", "policy_version"}


class DirectFrames:
    """Writes frames of one environment, whose observation is one array, each of which begins where the one
    before it has ended.

    Per step only the policy's fields and those of the environment's answer are written. The other fields are
    written for a run of frames at a time, by :meth:`flush`: the observation and the end flags that a frame
    begins with are those below ``"next"`` of the frame before it; trajectory numbers and version are those of
    the whole run.
    """

    def __init__(self, buffer: BatchBuffer, ids: Value) -> None:
        following: dict[Key, Any] = {key: column.array for key, column in buffer.next_columns.items()}
        columns: dict[Key, Any] = {key: column.array for key, column in buffer.columns.items()}
        self._columns = columns
        self._carried = [(columns[key], following[key]) for key in _CARRIED]
        self.write = functools.partial(write_fields, buffer.columns)  # of a place, and the policy's fields
        self._ids = ids  # of the current trajectories; changes in place
        self._observation: Any = following["observation"]
        self._shape, self._dtype = self._observation.shape[1:], self._observation.dtype
        flat = (following[key][..., 0] for key in ("reward", *ENDS))
        self._reward, self._done, self._terminated, self._truncated = flat
        self._ends_shape = self._done.shape[1:]
        self._first = self._next = 0  # the run: from this place to before that one
        self._ids_column, self._first_ids = columns[TRAJ_IDS], 0  # from this place on, the numbers are _ids
        self._version: int | None = None
        self.observation: Any = None  # that the next frame begins with

    @classmethod
    def of(cls, env: object, buffer: object, ids: Value) -> DirectFrames | None:
        """Return an object for a batch whose first frame is complete; None: its frames have other fields than
        this class writes, or the environment is of another kind."""
        if not isinstance(env, GymnasiumEnv) or env.suspends or env.device is not None:
            return None
        if not isinstance(buffer, BatchBuffer) or not _NEXT >= buffer.next_columns.keys() >= {*_CARRIED}:
            return None
        if any(column.array is None for column in buffer.columns.values()):
            return None
        return cls(buffer, ids)

    def begin(self, place: int, version: int | None) -> None:
        """The next frame is at ``place``, and of this version."""
        if place != self._next or version != self._version:
            self.flush()
            self._first = self._first_ids = self._next = place
            self._version = version

    def record(self, place: int, found: Any) -> int | None:
        """Write what the environment's ``step`` returned. Returns how many episodes have ended. None: it has
        other types, shapes or dtypes than before, and is not written, or only in parts."""
        self._next = place + 1
        observation, reward, terminated, truncated, *_ = found
        if type(observation) is not np.ndarray:
            return None
        if observation.dtype != self._dtype or not observation.flags.writeable:
            observation = value_of(observation)
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
        columns = self._columns
        for beginning, following in self._carried:
            beginning[first:end] = following[first - 1 : end - 1]
        if MASK in columns:
            columns[MASK][first:end] = ~columns["done"][first:end, ..., 0]
        if self._version is not None:
            for key in ("policy_version", ("next", "policy_version")):
                columns[key][first:end] = self._version
