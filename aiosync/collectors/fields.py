"""Steps as plain tensors by name, and slots of shared memory that hold many of them.

A name is a string, or a tuple of strings for what is nested, as TensorDict has it. Between an environment,
a policy and a slot these stay what they are: a TensorDict is made once per batch, and where a policy wants
one.
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
"""Name, shape of one step's, dtype."""

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def flatten(data: TensorDictBase) -> Fields:
    """The leaves of a TensorDict."""
    return dict(data.items(include_nested=True, leaves_only=True))


def unflatten(fields: Mapping[Key, Tensor], shape: Iterable[int]) -> TensorDict:
    """A TensorDict of batch size ``shape`` with these leaves."""
    found = TensorDict({}, batch_size=torch.Size(shape))
    for key, value in fields.items():
        found.set(key, value)
    return found


def under(first: str, key: Key) -> tuple[str, ...]:
    """A name, one level further down."""
    return (first, key) if isinstance(key, str) else (first, *key)
