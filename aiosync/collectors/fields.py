"""Frames as dicts of plain tensors.

A key is a string, or a tuple of strings for a nested entry, as in TensorDict. Environments, policies and
buffers exchange these dicts. A TensorDict is made once per batch, and where a policy takes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = [
    "MASK",
    "TRAJ_IDS",
    "Fields",
    "Key",
    "Specs",
    "flatten",
    "under",
    "unflatten",
]

Key: TypeAlias = str | tuple[str, ...]
Fields: TypeAlias = dict[Key, Tensor]
Specs: TypeAlias = tuple[tuple[Key, tuple[int, ...], torch.dtype], ...]
"""Key, shape of one frame, dtype; one entry per field."""

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def flatten(data: TensorDictBase) -> Fields:
    """Return the leaves of a TensorDict."""
    return dict(data.items(include_nested=True, leaves_only=True))


def unflatten(fields: Mapping[Key, Tensor], shape: Iterable[int]) -> TensorDict:
    """Return a TensorDict of batch size ``shape`` with these leaves."""
    found = TensorDict({}, batch_size=torch.Size(shape))
    for key, value in fields.items():
        found.set(key, value)
    return found


def under(first: str, key: Key) -> tuple[str, ...]:
    """Return ``key`` nested one level deeper, below ``first``."""
    return (first, key) if isinstance(key, str) else (first, *key)
