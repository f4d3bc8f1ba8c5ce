"""Batches of whole trajectories: the option ``trajs_per_batch``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from tensordict import TensorDictBase

from aiosync.collectors.batch_memory import pad_steps, valid_frames
from aiosync.collectors.env import TRAJ_IDS

TrajFormat: TypeAlias = Literal["padded", "cat"]


class TrajectoryAssembler:
    """Collects the frames of batches until their trajectories have ended.

    A trajectory is complete when its last frame has ``("next", "done")``. Complete trajectories are returned
    in the order in which they have ended; frames of one trajectory are in order of time.
    """

    def __init__(self) -> None:
        self._running: dict[int, list[TensorDictBase]] = {}  # number of a trajectory -> its frames so far
        self._complete: list[TensorDictBase] = []  # of shape (steps,), oldest first

    @property
    def complete(self) -> int:
        """How many complete trajectories wait to be taken."""
        return len(self._complete)

    def add(self, batch: TensorDictBase) -> None:
        """Add the frames of a batch, whose last dimension is time. The frames are copied."""
        frames = valid_frames(batch)
        order = torch.argsort(frames[TRAJ_IDS], stable=True)
        numbers, lengths = frames[TRAJ_IDS][order].unique_consecutive(return_counts=True)
        parts = frames[order].split(lengths.tolist())
        for number, part in zip(numbers.tolist(), parts, strict=True):
            self._running.setdefault(number, []).append(part)
            if part["next", "done"][-1].any():
                self._complete.append(torch.cat(self._running.pop(number)))

    def take(self, count: int) -> list[TensorDictBase]:
        """Return and forget the oldest ``count`` complete trajectories, or all if there are fewer."""
        taken, self._complete = self._complete[:count], self._complete[count:]
        return taken

    def forget_running(self) -> None:
        """Forget the frames of trajectories that have not ended: the environments were reset."""
        self._running.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._running.clear()
        self._complete.clear()


def join(trajectories: Iterable[TensorDictBase], layout: TrajFormat) -> TensorDictBase:
    """Return one batch of trajectories.

    Args:
        trajectories: each of shape ``(steps,)``.
        layout: ``"padded"``: shape ``(trajectories, steps of the longest)``, padded with zeros, with
            ``("collector", "mask")``. ``"cat"``: one after the other, of shape ``(steps of all,)``.
    """
    if layout == "cat":
        return torch.cat(list(trajectories))
    rows = list(trajectories)
    longest = max(len(row) for row in rows)
    return torch.stack([pad_steps(row, longest) for row in rows])
