"""Putting workers' parts together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from aiosync.collectors.config import BatchConfig
from aiosync.collectors.fields import MASK, TRAJ_IDS
from aiosync.errors import InvalidArgumentError

__all__ = ["joined", "split_trajectories"]


def joined(parts: Sequence[TensorDict], config: BatchConfig) -> TensorDictBase:
    """Workers' parts as one batch, in new memory. Blocking.

    Raises:
        InvalidArgumentError: they cannot be put together as the configuration says.
    """
    if config.cat_results != "stack":
        dim = int(config.cat_results)
        return _cat(parts, dim)
    longest = max(part.shape[-1] for part in parts)
    if all(part.shape[-1] == longest for part in parts):
        return torch.stack(list(parts), 0)
    return torch.stack([_padded(part, longest) for part in parts], 0)


def _cat(parts: Sequence[TensorDict], dim: int) -> TensorDictBase:
    try:
        return torch.cat(list(parts), dim)
    except RuntimeError as exc:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise InvalidArgumentError(
            f"cat_results={dim}: the workers' parts have shapes {shapes}, which cannot be put together along "
            f"that dimension; expected cat_results=-1 or 'stack'"
        ) from exc


def _padded(part: TensorDict, length: int) -> TensorDict:
    """With zeros after its end, and a mask that says where it is."""
    steps = part.shape[-1]
    found = TensorDict({}, batch_size=(*part.shape[:-1], length))
    dim = len(part.shape) - 1
    for key, value in part.items(include_nested=True, leaves_only=True):
        padding = value.new_zeros((*value.shape[:dim], length - steps, *value.shape[dim + 1 :]))
        found.set(key, torch.cat([value, padding], dim))
    mask = torch.zeros(found.batch_size, dtype=torch.bool)
    mask[..., :steps] = True
    found.set(MASK, mask)
    return found


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """A batch as ``(trajectories, steps)``: one row each, padded with zeros, and ``("collector", "mask")``.

    Args:
        batch: of any shape whose last dimension is time, with ``("collector", "traj_ids")``.
    """
    flat = batch.reshape(-1)
    valid = flat.get(MASK, None)
    if valid is not None:
        flat = flat[valid]
    ids = flat[TRAJ_IDS]
    rows = [(ids == number).nonzero().view(-1) for number in ids.unique()]  # each in the order of time
    longest = max(len(row) for row in rows)
    return torch.stack([_padded(flat[row], longest) for row in rows], 0)
