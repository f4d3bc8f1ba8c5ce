"""Single tensors of a module: compare them, re-point them, write into them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from aiosync.weights.dense import memory_key
from aiosync.weights.target import overlaps_itself

__all__ = [
    "Look",
    "as_inference",
    "look_of",
    "overlapping",
    "own_copy",
    "place_of",
    "repoint",
    "write_into",
]

Look: TypeAlias = tuple[torch.dtype, torch.Size, torch.device, bool, bool]
"""The dtype, shape and device of a tensor; whether it is a parameter, and whether of inference mode."""


def look_of(tensor: Tensor) -> Look:
    """All that a binding depends on, except where the tensor lies."""
    parameter = isinstance(tensor, nn.Parameter)
    return tensor.dtype, tensor.shape, tensor.device, parameter, tensor.is_inference()


def place_of(tensor: Tensor) -> tuple[int, Look]:
    """The address of the tensor and its look."""
    return tensor.data_ptr(), look_of(tensor)


def overlapping(targets: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that share some of their memory, but not all of it: those are tied."""
    found: list[str] = []
    end, last, key = 0, "", None
    memory = {name: target for name, target in targets.items() if target.numel() and not target.is_meta}
    for name in sorted(memory, key=lambda name: memory[name].data_ptr()):
        target = memory[name]
        start, same = target.data_ptr(), memory_key(target)
        if start < end and same != key:
            found += [last, name]
        steps = zip(target.shape, target.stride(), strict=True)
        end = max(end, start + (1 + sum((size - 1) * step for size, step in steps)) * target.itemsize)
        last, key = name, same
    return found


def repoint(target: Tensor, view: Tensor) -> None:
    """Have ``target`` view the memory of ``view``."""
    target.data = as_inference(view) if target.is_inference() else view


def own_copy(target: Tensor) -> Tensor:
    """The values of ``target`` in new memory, for ``target`` to view."""
    copied = target.detach().clone()
    return as_inference(copied) if target.is_inference() else copied


def as_inference(view: Tensor) -> Tensor:
    """The same memory as a tensor of inference mode. A parameter that was made in that mode has no version
    counter, and forward passes raise where its data has one."""
    if view.is_inference():
        return view
    with torch.inference_mode():
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        storage, at = view.untyped_storage(), view.storage_offset()
        return empty.set_(storage, at, view.shape, view.stride())


def write_into(target: Tensor, view: Tensor, undo: ExitStack | None) -> None:
    """Copy ``view`` into the memory of ``target``; ``undo`` gets what takes it back."""
    # A tensor that was made in inference mode can only be written there.
    with torch.inference_mode() if target.is_inference() else nullcontext():
        if overlaps_itself(target):
            # An expanded tensor cannot be written element by element: it gets memory of its own.
            if undo is not None:
                undo.callback(setattr, target, "data", target.data)
            target.data = target.new_empty(target.shape).copy_(view)
            return
        if undo is not None:
            undo.callback(write_into, target, target.detach().clone(), None)
        target.detach().copy_(view)
