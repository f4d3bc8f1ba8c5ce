"""Number the trajectories of one rollout."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(eq=False, repr=False)
class TrajectoryIds:
    """The current trajectories of environments that step together.

    A trajectory gets the next number when it begins. So in each environment the numbers increase.
    """

    shape: tuple[int, ...]  # of the environments
    next_id: int  # the number of the next trajectory; the one after it has this number + stride
    stride: int
    _: KW_ONLY
    skips: bool  # the step after the end of an episode belongs to no trajectory

    current: Array = field(init=False)  # their numbers
    begun: Array = field(init=False)  # how many steps the rollout had taken when they began
    _cut: list[int] = field(default_factory=list, init=False)  # trajectories that a reset has ended

    def __post_init__(self) -> None:
        self.current = np.zeros(self.shape, np.int64)
        self.begun = np.zeros(self.shape, np.int64)

    def start(self, where: Array, steps: int) -> None:
        """Begin a trajectory in these environments, after so many steps of the rollout."""
        count = int(np.count_nonzero(where))
        self.begun[where] = steps + self.skips
        self.current[where] = np.arange(count) * self.stride + self.next_id
        self.next_id += count * self.stride

    def restart(self, steps: int) -> None:
        """Begin a trajectory in each environment: it was reset."""
        self._cut += self.current[steps > self.begun].tolist()
        self.start(np.ones(self.shape, np.bool_), steps)
        self.begun[...] = steps

    def raise_to(self, next_id: int) -> None:
        """Number trajectories from ``next_id`` on, or higher."""
        self.next_id += max(0, -(-(next_id - self.next_id) // self.stride)) * self.stride

    def write(self, column: Array, done: Array, steps: int) -> None:
        """Write the numbers of the trajectories of frames, and begin one where an episode has ended.

        Args:
            column: ``int64`` of shape ``(frames, *shape)``: gets the numbers.
            done: ``bool``, which episodes have ended with each frame. If it has one frame less, the
                trajectories go on after the last frame.
            steps: how many steps the rollout had taken before these frames.
        """
        (where,) = done.reshape(-1).nonzero()
        if not len(where):
            column[...] = self.current
            return
        numbers = np.zeros((1 + len(done), self.current.size), np.int64)
        numbers[0] = self.current.reshape(-1)
        numbers[1:].reshape(-1)[where] = np.arange(len(where)) * self.stride + self.next_id
        np.maximum.accumulate(numbers, axis=0, out=numbers)
        column.reshape(len(column), -1)[...] = numbers[: len(column)]
        self.current.reshape(-1)[...] = numbers[-1]
        self.next_id += len(where) * self.stride
        frames, environments = np.divmod(where, self.current.size)
        # Of several ends in one environment the last one counts.
        self.begun.reshape(-1)[environments] = steps + 1 + self.skips + frames

    def take_cut(self) -> list[int]:
        """Return and forget the numbers of the trajectories that a reset has ended."""
        cut, self._cut = self._cut, []
        return cut

    def lengths(self, steps: int) -> dict[int, int]:
        """Return how many frames the current trajectories have: number -> frames, if there are any."""
        lengths = np.asarray(steps - self.begun)
        where = lengths > 0
        return dict(zip(self.current[where].tolist(), lengths[where].tolist(), strict=True))
