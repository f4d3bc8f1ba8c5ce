"""The options of a collector that are about its batches; the checks that all options share."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tensordict import TensorDictBase

from aiosync.errors import InvalidArgumentError, OptionConflictError

TrajFormat: TypeAlias = Literal["padded", "cat"]


def check(name: str, value: object, valid: bool, expected: str) -> None:
    """Raise InvalidArgumentError unless the value is valid."""
    if not valid:
        raise InvalidArgumentError(f"{name}={value!r}: expected {expected}")


def check_positive(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless the value is a positive int."""
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    check(name, value, valid, "a positive number")


def _whole(name: str, value: object) -> int:
    """Return a number of frames as an int: 200, 2e5 or a NumPy integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name}={value!r}: expected a number of frames, or None") from None


def per_worker(name: str, given: Any, workers: int, kind: str = "one") -> list[Any]:
    """Return an option's value for each worker. ``given`` is one value, or a sequence with one per worker.

    Raises:
        OptionConflictError: the sequence has another length.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * workers
    if len(given) != workers:
        raise OptionConflictError(f"{name}: expected {kind}, or one per worker, {workers}; got {len(given)}")
    return list(given)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """What a batch consists of. A frame is one step of one environment.

    Attributes:
        frames_per_batch: frames of each batch; or a sequence: frames of each worker's part. With
            ``sync=True`` a number is rounded up to a multiple of the workers, with a warning.
        total_frames: end after this many frames, rounded up to whole batches; None or negative: never.
        max_frames_per_traj: truncate an episode after this many steps; None, 0 or negative: never.
        init_random_frames: take random actions in this many frames at the beginning; None: in none.
        reset_at_each_iter: reset the environments at the beginning of each batch.
        reset_when_done: begin a new episode after the end of one.
        set_truncated: mark the last frame of a batch as truncated, so that returns are not bootstrapped
            across batches.
        split_trajs: return batches as ``(trajectories, steps)``, padded, with ``("collector", "mask")``.
            Needs ``reset_when_done``.
        cat_results: how to join the workers' parts of a synchronous batch: the dimension to concatenate
            along, or ``"stack"``, the default: stack along a new first dimension. Needs ``sync=True``.
        preemptive_threshold: when this fraction of the workers, rounded down, has delivered, the others
            deliver the frames that they have, at least one each. In [0, 1]; None: 1. With ``sync=False`` no
            batch waits for other workers, and it has no effect.
        trajs_per_batch: return batches of so many whole trajectories, in the order in which they end. Workers
            still collect ``frames_per_batch`` frames at a time. A replay buffer gets each trajectory when it
            has ended, its frames one after the other. Trajectories that a reset cuts off are dropped.
        trajs_per_write: at most so many trajectories are written into a replay buffer at a time; None: all
            that one worker's batch has ended.
        traj_format: ``"padded"``, the default: batches of shape ``(trajs_per_batch, steps)``, padded with
            zeros, with ``("collector", "mask")``. ``"cat"``: one trajectory after the other, without padding.
        compact_obs: leave out of ``"next"`` what the next frame begins with: the observations. Those after
            the last step of an episode are lost.
        postproc: called with each batch; returns the batch that the iterator gives.
        use_buffers: batches go through reused shared memory; otherwise pickled through a pipe. None: they do
            unless a worker's environment has specs of changing size. Not with Ray.
    """

    frames_per_batch: int | Sequence[int] = 200
    total_frames: int | None = -1
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    split_trajs: bool | None = None
    cat_results: Literal["stack"] | int | None = None
    preemptive_threshold: float | None = None
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    traj_format: TrajFormat | None = None
    compact_obs: bool = False
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    use_buffers: bool | None = None

    def __post_init__(self) -> None:
        each = self.frames_per_batch
        for number in each if isinstance(each, Sequence) else [each]:
            check_positive("frames_per_batch", number)
        for name in ("total_frames", "max_frames_per_traj", "init_random_frames"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, value))
        threshold, dim = self.preemptive_threshold, self.cat_results
        valid = threshold is None or (isinstance(threshold, int | float) and 0 <= threshold <= 1)
        check("preemptive_threshold", threshold, valid, "a fraction of the workers: a number in [0, 1]")
        check("cat_results", dim, dim in ("stack", None) or isinstance(dim, int), "'stack' or a dimension")
        self._check_trajectories()

    def _check_trajectories(self) -> None:
        for name in ("trajs_per_batch", "trajs_per_write"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        layout = self.traj_format
        check("traj_format", layout, layout in ("padded", "cat", None), "'padded' or 'cat'")
        if layout == "cat" and self.trajs_per_batch is None:
            raise OptionConflictError("traj_format='cat' needs trajs_per_batch=: the trajectories of a batch")
        if self.split_trajs and self.trajs_per_batch is not None:
            raise OptionConflictError("got split_trajs=True and trajs_per_batch=: expected one of them")
        if self.trajs_per_batch is not None and not self.reset_when_done:
            raise OptionConflictError("trajs_per_batch= needs reset_when_done=True: else no episode follows")
        if self.split_trajs and not self.reset_when_done:
            raise OptionConflictError(
                "split_trajs=True with reset_when_done=False: expected reset_when_done=True, since only a "
                "reset ends a trajectory"
            )

    # What an option that may be None means.

    @property
    def frames_limit(self) -> float:
        """How many frames the iterator returns; infinity: it never ends."""
        total = self.total_frames
        return math.inf if total is None or total < 0 else total

    @property
    def step_limit(self) -> int:
        """After how many steps an episode is truncated; 0: never."""
        return max(0, self.max_frames_per_traj or 0)

    @property
    def random_frames(self) -> int:
        """In how many frames at the beginning actions are random."""
        return max(0, self.init_random_frames or 0)

    @property
    def join_dim(self) -> Literal["stack"] | int:
        """How to join the workers' parts of a synchronous batch."""
        return "stack" if self.cat_results is None else self.cat_results

    def enough_of(self, workers: int) -> int:
        """Return how many of the workers have to deliver before the others deliver what they have."""
        fraction = self.preemptive_threshold
        return workers if fraction is None else int(workers * fraction)

    def frames_of(self, worker: int, workers: int) -> int:
        """Return the frames of one worker's part of a batch that has a part from each of ``workers``."""
        each = self.frames_per_batch
        return -(-each // workers) if isinstance(each, int) else each[worker]

    def warn(self, workers: int, *, sync: bool, returned: bool) -> None:
        """Warn if more frames will be collected than were requested, or if batches will be padded.
        ``returned``: the iterator returns the batches; a replay buffer gets no padding."""
        asked = self.frames_per_batch
        parts = [self.frames_of(worker, workers if sync else 1) for worker in range(workers)]
        batch = sum(parts) if sync else parts[0]
        if sync and isinstance(asked, int) and batch != asked:
            _warn(
                f"frames_per_batch={asked} is not a multiple of {workers} workers: a batch has {batch} frames"
            )
        if sync and returned and self.join_dim == "stack" and len(set(parts)) > 1:
            _warn(
                f"frames_per_batch={asked!r}: the workers' parts differ in length, so the shorter ones are "
                "padded and masked by ('collector', 'mask'); with cat_results=-1 they are not"
            )
        if self.frames_limit < math.inf and self.frames_limit % batch:
            more = int(-self.frames_limit % batch)
            _warn(
                f"total_frames={self.total_frames} is not a multiple of the {batch} frames of a batch: "
                f"{more} more frames will be collected"
            )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # in the caller of the collector's constructor
