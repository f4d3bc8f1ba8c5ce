"""Joining the parts of several workers into one batch, padding, splitting trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, pad

from aiosync.collectors.batch_buffers import BatchBuffer, Part
from aiosync.collectors.env import MASK, TRAJ_IDS, Fields, Nested, Specs, assemble
from aiosync.errors import InvalidArgumentError
from aiosync.weights.segment import Segment

_MAX_BUFFERS = 32
"""Batches in the caller's hands whose memory is reused once they are dropped. That of older ones is freed."""


class _JoinedBatch(NamedTuple):
    """A batch whose frames are still to be written."""

    shape: tuple[int, ...]
    specs: Specs  # of the entries of its first dimension
    nested: Nested
    fields: Fields
    data: TensorDict


class BatchJoiner:
    """Joins the parts of several workers.

    A joined batch's memory is reused once the last reference to the batch is dropped: a copy into fresh
    memory takes several times as long. ``dim`` is the option ``cat_results``. ``may_differ``: parts may
    differ in length, so every stacked batch has ``("collector", "mask")``.
    """

    def __init__(self, dim: Literal["stack"] | int, *, may_differ: bool = False) -> None:
        self._dim = dim
        self._may_differ = may_differ
        self._buffers: list[BatchBuffer] = []  # also those that the caller holds
        self._next: _JoinedBatch | None = None  # the memory of the next batch

    def prepare(self, first: Part, count: int, nested: Nested) -> None:
        """Make memory for a batch of so many parts that are all as the first one. Optional: :meth:`join` then
        has less to do when the last part has come."""
        if first.fields:
            shape, _ = self._shape_of([first.data.shape] * count)
            self._next = self._make(_specs_of(first, shape), shape, nested)

    def join(self, parts: Sequence[Part], nested: Nested) -> TensorDictBase:
        """Return one batch. ``nested``: the batch dimensions that nested entries have beside those of the
        parts. Blocking. InvalidArgumentError: the parts' shapes do not fit together."""
        made, self._next = self._next, None
        shapes = [part.data.shape for part in parts]
        stacked = self._dim == "stack"
        if stacked:
            longest = max(shape[-1] for shape in shapes)
            if self._may_differ or any(shape[-1] != longest for shape in shapes):
                parts = [Part.of(pad_steps(part.data, longest, no_trajectory=-1)) for part in parts]
                shapes = [part.data.shape for part in parts]
        shape, dim = self._shape_of(shapes)
        first, *others = (part.specs for part in parts)
        if not first or any(other != first for other in others):
            return _join_frames([part.data for part in parts], None if stacked else dim)
        specs, put = _specs_of(parts[0], shape), torch.stack if stacked else torch.cat
        if made is None or (made.shape, made.specs, made.nested) != (shape, specs, nested):
            made = self._make(specs, shape, nested)
        for key, view in made.fields.items():
            put([part.fields[key] for part in parts], dim, out=view)
        return made.data

    def _shape_of(self, shapes: Sequence[torch.Size]) -> tuple[tuple[int, ...], int]:
        """Return a batch's shape, of parts of these shapes, and the dimension that they are joined along."""
        if self._dim == "stack":
            return (len(shapes), *shapes[0]), 0
        dim = self._check_dim(shapes, int(self._dim))
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :]), dim

    def _make(self, specs: Specs, shape: tuple[int, ...], nested: Nested) -> _JoinedBatch:
        buffer = self._buffer(specs, shape[0])
        fields = buffer.lend(shape[0])
        return _JoinedBatch(shape, specs, nested, fields, assemble(fields, shape, nested))

    def _check_dim(self, shapes: Sequence[torch.Size], dim: int) -> int:
        count = len(shapes[0])
        if -count <= dim < count:
            dim %= count
            if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1:
                return dim
        found = ", ".join(str(tuple(shape)) for shape in shapes)
        raise InvalidArgumentError(
            f"cat_results={dim}: the workers' parts have shapes {found}, which cannot be put together along "
            "that dimension; expected cat_results=-1 or 'stack'"
        )

    def _buffer(self, specs: Specs, steps: int) -> BatchBuffer:
        for buffer in self._buffers:
            if not buffer.is_lent and buffer.fits(specs, steps):
                return buffer
        held = [buffer for buffer in self._buffers if buffer.is_lent]
        made = BatchBuffer(specs, steps, Segment.private)
        self._buffers = [*held[-_MAX_BUFFERS:], made]
        return made


def _specs_of(part: Part, shape: tuple[int, ...]) -> Specs:
    """Return the specs of a batch of this shape that has the fields of ``part``."""
    return tuple((key, (*shape[1:], *inner), dtype) for key, (inner, dtype) in part.specs.items())


def _join_frames(parts: Sequence[TensorDictBase], dim: int | None) -> TensorDictBase:
    """Join parts that have fields which are no tensors, or whose frames differ: then into a lazy stack.
    ``dim``: the dimension to concatenate along; None: stack along a new first dimension."""
    lazy = any(isinstance(part, LazyStackedTensorDict) for part in parts)
    if dim is None:
        return LazyStackedTensorDict.lazy_stack(list(parts), 0) if lazy else torch.stack(list(parts), 0)
    if not lazy:
        return torch.cat(list(parts), dim)
    last = parts[0].batch_dims - 1
    if dim != last:
        raise InvalidArgumentError(
            f"cat_results={dim}: the shapes of fields differ from step to step: expected cat_results=-1 or "
            "'stack'"
        )
    return LazyStackedTensorDict.lazy_stack([frame for part in parts for frame in part.unbind(last)], last)


def pad_steps(part: TensorDictBase, length: int, *, no_trajectory: int = 0) -> TensorDictBase:
    """Return ``part`` padded with zeros to ``length`` steps, with a mask that is true for its own steps.
    ``no_trajectory``: the trajectory number of the padding."""
    *batch, steps = part.shape
    result = pad(part, [0, 0] * len(batch) + [0, length - steps])
    mask = torch.zeros(result.batch_size, dtype=torch.bool, device=part.device or "cpu")
    mask[..., :steps] = part.get(MASK, True)
    if no_trajectory:
        result[TRAJ_IDS][..., steps:] = no_trajectory
    result.set(MASK, mask)
    return result


def valid_frames(batch: TensorDictBase) -> TensorDictBase:
    """Return the frames of a batch in one dimension, without those that its mask excludes."""
    flat = batch.reshape(-1)
    valid = flat.get(MASK, None)
    return flat if valid is None else flat[valid]


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch, whose last dimension is time, as ``(trajectories, steps)``: one row per trajectory,
    padded with zeros, with ``("collector", "mask")``: those of the first environment first, as in torchrl."""
    flat = valid_frames(batch)
    ids = flat[TRAJ_IDS]
    rows = [(ids == number).nonzero().view(-1) for number in dict.fromkeys(ids.tolist())]  # in order of time
    if not rows:  # all steps were skipped
        return pad_steps(flat, 1).unsqueeze(0)[:0]
    longest = max(len(row) for row in rows)
    return torch.stack([pad_steps(flat[row], longest) for row in rows], 0)
