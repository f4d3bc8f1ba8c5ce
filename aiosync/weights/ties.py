"""Check tied tensors that were given as separate memory: their bits must be equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aiosync.errors import LayoutMismatchError
from aiosync.weights.dense import describe, same_bits

_HINT = " (both names were one tensor when this model was connected; if by chance, clone() one before)"


def check_tied(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Check that tied names have equal bits.

    Args:
        tensors: names -> values. Missing names are ignored.
        ties: alias -> primary name, such as :attr:`Layout.aliases`.

    Raises:
        LayoutMismatchError: tied names have different values.
    """
    differing = untied(tensors, ties, {})
    if differing:
        raise LayoutMismatchError(differing=differing)


def untied(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, tuple[str, str]]:
    """Return the aliases whose bits differ from their primary's -> (expected, got) as texts.

    Args:
        tensors: names -> values. If the primary is missing, its first given alias takes its place.
        ties: alias -> primary name.
        dtypes: alias -> dtype in which to compare, which the copy converts to. Default: the primary's dtype.
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
