"""Batches of whole trajectories: the option ``trajs_per_batch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from aiosync.collectors.batch_config import TrajFormat
from aiosync.collectors.batch_iterator import BatchIterator, EndOfBatches
from aiosync.collectors.batch_memory import pad_steps, valid_frames
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.env import ENDS, TRAJ_IDS
from aiosync.collectors.pool import Pool
from aiosync.collectors.proxy import DeliveredBatch, WorkerProxy
from aiosync.collectors.versions import VERSION

_ENDLESS = (
    "the workers step, but no trajectory has ended, or each was older than max_staleness=: has the "
    "environment a limit of steps (max_episode_steps, max_frames_per_traj=)?"
)


class TrajectoryIterator(BatchIterator):
    """The iterator with the option ``trajs_per_batch``.

    A cancelled call loses no trajectory: the frames of a batch are added before the next one is awaited.
    """

    def __init__(self, config: CollectorConfig, *, sync: bool) -> None:
        super().__init__(config, sync=sync)
        whole = config.batch.trajs_per_batch is not None
        self._assembler = TrajectoryAssembler() if whole else None
        self._workers: dict[int, WorkerProxy] = {}  # whose batches were taken last
        # Of the batch that is taken: see Continued.
        self._lengths: dict[int, int] = {}
        self._cut: list[int] = []

    @property
    def _is_done(self) -> bool:
        return super()._is_done and not self._has_batch

    @property
    def _has_batch(self) -> bool:
        count, assembler = self.config.batch.trajs_per_batch, self._assembler
        stored = self.config.replay.replay_buffer is not None
        return count is not None and assembler is not None and not stored and assembler.complete >= count

    async def _next_batch(self, pool: Pool) -> TensorDictBase | None:
        config, assembler = self.config.batch, self._assembler
        if (
            assembler is None
            or config.trajs_per_batch is None
            or self.config.replay.replay_buffer is not None
        ):
            return await super()._next_batch(pool)
        most, deadline = -1, self._deadline(None)
        while not self._has_fresh_batch(assembler):
            if super()._is_done:
                raise EndOfBatches
            if assembler.complete > most or not self._not_paused.is_set():
                await self._wait_while_paused()
                most, deadline = max(most, assembler.complete), self._deadline(None)
            elif not deadline.remaining():
                raise deadline.error("receive", hint=_ENDLESS)
            batch = await super()._next_batch(pool)
            assert batch is not None
            self._add(assembler, batch)
        return join(assembler.take(config.trajs_per_batch), config.traj_format or "padded")

    def _has_fresh_batch(self, assembler: TrajectoryAssembler) -> bool:
        """Return whether there is a batch, after whole trajectories that are too old were forgotten."""
        allowed = self.config.weights.max_staleness
        if allowed is not None:
            oldest = self._version_number - allowed
            assembler.keep(lambda trajectory: int(trajectory[VERSION].min()) >= oldest)
        return self._has_batch

    def _write(self, found: TensorDictBase, *, whole: bool) -> None:
        assembler = self._assembler
        if assembler is None:
            super()._write(found, whole=whole)
            return
        self._add(assembler, found)
        while ended := assembler.take(self.config.batch.trajs_per_write or assembler.complete):
            self.config.replay.replay_buffer.extend(join(ended, "cat"))

    def _finish(self, batch: TensorDictBase, parts: Sequence[DeliveredBatch]) -> TensorDictBase:
        for part in parts if self._assembler is not None else ():
            if self._workers.setdefault(part.worker.index, part.worker) is not part.worker:
                self._forget_worker(part.worker)
            self._lengths |= part.message.continued.lengths
            self._cut += part.message.continued.cut
        return super()._finish(batch, parts)

    def _forget_worker(self, successor: WorkerProxy) -> None:
        """Forget the trajectories that a lost worker has begun."""
        assert self._assembler is not None
        self._workers[successor.index] = successor
        envs = self.config.processes.envs_per_worker
        # Worker i numbers its trajectories from i * envs on, in steps of num_workers * envs.
        self._assembler.forget(lambda number: number // envs % self.num_workers == successor.index)

    def _drop(self, batch: DeliveredBatch) -> None:
        if self._assembler is not None:
            numbers = set(batch.part().data[TRAJ_IDS].unique().tolist())
            numbers.update(batch.message.continued.cut)  # those began in earlier batches
            self._assembler.forget(lambda number: number in numbers)
        super()._drop(batch)

    def _add(self, assembler: TrajectoryAssembler, batch: TensorDictBase) -> None:
        """Add a batch that :meth:`_finish` has returned."""
        lengths, self._lengths = self._lengths, {}
        cut, self._cut = set(self._cut), []
        assembler.add(batch, lengths)
        assembler.forget(lambda number: number in cut)

    def _forget_complete(self) -> None:
        if self._assembler is not None:
            self._assembler.take(self._assembler.complete)


class TrajectoryAssembler:
    """Collects the frames of batches until their trajectories have ended.

    A trajectory is complete when all its frames were added, and the last one has ``("next", "done")``.
    Complete trajectories are returned in the order in which they have ended; frames of one trajectory are in
    order of time. A trajectory is dropped if some of its frames were not added.
    """

    def __init__(self) -> None:
        self._running: dict[int, list[TensorDictBase]] = {}  # number of a trajectory -> its frames so far
        self._complete: list[TensorDictBase] = []  # of shape (steps,), oldest first

    @property
    def complete(self) -> int:
        """How many complete trajectories wait to be taken."""
        return len(self._complete)

    def add(self, batch: TensorDictBase, lengths: Mapping[int, int]) -> None:
        """Add the frames of a batch, whose last dimension is time. The frames are copied. ``lengths``: number
        of a trajectory -> how many frames it has had before this batch; 0 if it is absent."""
        frames = valid_frames(batch)
        if not len(frames):
            return  # all steps were skipped
        order = torch.argsort(frames[TRAJ_IDS], stable=True)
        numbers, counts = frames[TRAJ_IDS][order].unique_consecutive(return_counts=True)
        parts = frames[order].split(counts.tolist())
        for number, part in zip(numbers.tolist(), parts, strict=True):
            known = self._running.pop(number, []) if (before := lengths.get(number, 0)) else []
            if sum(map(len, known)) != before:
                continue
            if _has_ended(part[-1]):
                self._complete.append(torch.cat([*known, part]))
            else:
                self._running[number] = [*known, part]

    def take(self, count: int) -> list[TensorDictBase]:
        """Return and forget the oldest ``count`` complete trajectories, or all if there are fewer."""
        taken, self._complete = self._complete[:count], self._complete[count:]
        return taken

    def keep(self, which: Callable[[TensorDictBase], bool]) -> None:
        """Forget the complete trajectories for which ``which`` returns False."""
        self._complete = [trajectory for trajectory in self._complete if which(trajectory)]

    def forget(self, which: Callable[[int], bool]) -> None:
        """Forget the frames of trajectories that have not ended. ``which``: takes a trajectory's number."""
        for number in [number for number in self._running if which(number)]:
            del self._running[number]

    def state_dict(self) -> dict[str, Any]:
        """Return all trajectories."""
        running = {number: torch.cat(parts) for number, parts in self._running.items()}
        return {"running": running, "complete": list(self._complete)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what :meth:`state_dict` has returned. None: forget everything."""
        found = state or {"running": {}, "complete": []}
        self._running = {number: [frames] for number, frames in found["running"].items()}
        self._complete = list(found["complete"])


def _has_ended(frame: TensorDictBase) -> bool:
    """Return whether a frame is the last of its episode: an end at the root, or of every agent."""
    after = frame["next"]
    root = [after[name] for name in ENDS if name in after.keys()]
    if root:
        return any(bool(end.any()) for end in root)
    nested = [value for key, value in after.items(True, True) if isinstance(key, tuple) and key[-1] == "done"]
    return all(bool(end.all()) for end in nested) and bool(nested)


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
