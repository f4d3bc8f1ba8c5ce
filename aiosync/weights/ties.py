"""Tied tensors that come as separate memory: fine while they hold the same bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiosync.errors import LayoutMismatchError
from aiosync.weights.dense import describe, same_bits

__all__ = ["check_tied", "untied"]


_HINT = " (both names were one tensor when this model was connected; if by chance, clone() one before)"


def check_tied(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Check that tied names that come as separate memory hold the same bits.

    Args:
        tensors: names -> values; names that are not there are not looked at.
        ties: alias -> primary name, such as :attr:`Layout.aliases`.

    Raises:
        LayoutMismatchError: two values for what is one tensor here.
    """
    differing = untied(tensors, ties, {})
    if differing:
        raise LayoutMismatchError(differing=differing)


def untied(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, tuple[str, str]]:
    """The aliases whose bits differ from their primary's, as (expected, got) texts.

    Args:
        tensors: names -> values. Where the primary is not among them, the first of its aliases
            that is stands for it.
        ties: alias -> primary name.
        dtypes: alias -> dtype to compare in (what the copy will make of them); the primary's own
            where it is not said.
    """
    references: dict[str, str] = {}
    differing: dict[str, tuple[str, str]] = {}
    for alias, primary in ties.items():
        if alias not in tensors:
            continue
        name = references.setdefault(primary, primary if primary in tensors else alias)
        reference = tensors[name]
        dtype = dtypes.get(alias, reference.dtype)
        if name != alias and not same_bits(reference, tensors[alias], dtype):
            tied = f"{describe(reference)}, tied to {name!r} here"
            differing[alias] = (tied, "separate values there" + _HINT)
    return differing
