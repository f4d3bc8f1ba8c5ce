"""Join the parts of several workers into one batch, and split a batch into trajectories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase

from aiosync.collectors.batch_buffers import BatchBuffer
from aiosync.collectors.fields import MASK, TRAJ_IDS, Specs, flatten, unflatten
from aiosync.errors import InvalidArgumentError

__all__ = ["BatchJoiner", "split_trajectories"]


class BatchJoiner:
    """Joins the parts of several workers.

    A joined batch's memory is reused once the last reference to the batch is dropped: a copy into fresh
    memory takes several times as long.

    Args:
        dim: the dimension to concatenate along; ``"stack"``: stack along a new first dimension.
    """

    def __init__(self, dim: Literal["stack"] | int) -> None:
        self._dim = dim
        self._free: list[BatchBuffer] = []

    def join(self, parts: Sequence[TensorDict]) -> TensorDictBase:
        """Return one batch. Blocking.

        Raises:
            InvalidArgumentError: the parts' shapes do not fit together along that dimension.
        """
        dim, put = 0, torch.stack
        if self._dim == "stack":
            parts = _pad_to_longest(parts)
            shape = (len(parts), *parts[0].shape)
        else:
            dim, put = self._check_dim(parts, int(self._dim)), torch.cat
            shape = tuple(parts[0].shape)
            shape = (*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :])
        each = [flatten(part) for part in parts]
        rest = len(parts[0].shape)
        specs = tuple((key, (*shape[1:], *v.shape[rest:]), v.dtype) for key, v in each[0].items())
        buffer = self._buffer(specs, shape[0])
        views = buffer.lend(functools.partial(self._free.append, buffer))
        for key, view in views.items():
            put([fields[key] for fields in each], dim, out=view[: shape[0]])
        return unflatten({key: view[: shape[0]] for key, view in views.items()}, shape)

    def _check_dim(self, parts: Sequence[TensorDict], dim: int) -> int:
        shapes = [tuple(part.shape) for part in parts]
        count = len(shapes[0])
        if -count <= dim < count:
            dim %= count
            if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1:
                return dim
        raise InvalidArgumentError(
            f"cat_results={dim}: the workers' parts have shapes {', '.join(map(str, shapes))}, which cannot "
            "be put together along that dimension; expected cat_results=-1 or 'stack'"
        )

    def _buffer(self, specs: Specs, steps: int) -> BatchBuffer:
        while self._free:  # another thread may append a buffer meanwhile
            buffer = self._free.pop()
            if buffer.holds(specs, steps):
                return buffer
        return BatchBuffer.make(specs, steps, shared=False)


def _pad_to_longest(parts: Sequence[TensorDict]) -> Sequence[TensorDict]:
    longest = max(part.shape[-1] for part in parts)
    if all(part.shape[-1] == longest for part in parts):
        return parts
    return [_pad(part, longest) for part in parts]


def _pad(part: TensorDict, length: int) -> TensorDict:
    """Return ``part`` padded with zeros to ``length`` steps, with a mask that is true for its own steps."""
    steps = part.shape[-1]
    result = TensorDict({}, batch_size=(*part.shape[:-1], length))
    dim = len(part.shape) - 1
    for key, value in part.items(include_nested=True, leaves_only=True):
        padding = value.new_zeros((*value.shape[:dim], length - steps, *value.shape[dim + 1 :]))
        result.set(key, torch.cat([value, padding], dim))
    mask = torch.zeros(result.batch_size, dtype=torch.bool, device=part.device or "cpu")
    mask[..., :steps] = part.get(MASK, True)
    result.set(MASK, mask)
    return result


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch as ``(trajectories, steps)``: one row per trajectory, padded with zeros, with
    ``("collector", "mask")``.

    Args:
        batch: of any shape whose last dimension is time, with ``("collector", "traj_ids")``.
    """
    flat = batch.reshape(-1)
    valid = flat.get(MASK, None)
    if valid is not None:
        flat = flat[valid]
    ids = flat[TRAJ_IDS]
    rows = [(ids == number).nonzero().view(-1) for number in ids.unique()]  # each in order of time
    longest = max(len(row) for row in rows)
    return torch.stack([_pad(flat[row], longest) for row in rows], 0)
