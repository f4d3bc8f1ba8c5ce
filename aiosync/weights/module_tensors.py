"""Compare, re-point and write single tensors of a module."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from aiosync.weights.dense import memory_key
from aiosync.weights.target import overlaps_itself

Look: TypeAlias = tuple[torch.dtype, torch.Size, torch.device, bool, bool]
"""A tensor's dtype, shape and device; whether it is a parameter; whether it was made in inference mode."""


def look_of(tensor: Tensor) -> Look:
    """Return the properties of a tensor that a binding depends on, without its address."""
    parameter = isinstance(tensor, nn.Parameter)
    return tensor.dtype, tensor.shape, tensor.device, parameter, tensor.is_inference()


def place_of(tensor: Tensor) -> tuple[int, Look]:
    """Return the tensor's address and its properties."""
    return tensor.data_ptr(), look_of(tensor)


def overlapping(targets: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose memory overlaps but is not the same. (Tensors over the same memory
    are tied.)"""
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
    """Point ``target`` at the memory of ``view``."""
    target.data = as_inference(view) if target.is_inference() else view


def own_copy(target: Tensor) -> Tensor:
    """Return a copy of ``target`` in new memory that ``target`` can be pointed at."""
    copied = target.detach().clone()
    return as_inference(copied) if target.is_inference() else copied


def as_inference(view: Tensor) -> Tensor:
    """Return a tensor of inference mode over the same memory.

    A parameter made in inference mode has no version counter. A forward pass raises if its data has one.
    """
    if view.is_inference():
        return view
    with torch.inference_mode():
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        storage, at = view.untyped_storage(), view.storage_offset()
        return empty.set_(storage, at, view.shape, view.stride())


def write_into(target: Tensor, view: Tensor, undo: ExitStack | None) -> None:
    """Copy ``view`` into the memory of ``target``.

    Args:
        target: a tensor of a module.
        view: a tensor of the same shape.
        undo: gets a callback that restores ``target``; None: nothing is saved.
    """
    # A tensor made in inference mode can be written only in that mode.
    with torch.inference_mode() if target.is_inference() else nullcontext():
        if overlaps_itself(target):
            # An expanded tensor cannot be written element by element, so it gets its own memory.
            if undo is not None:
                undo.callback(setattr, target, "data", target.data)
            target.data = target.new_empty(target.shape).copy_(view)
            return
        if undo is not None:
            undo.callback(write_into, target, target.detach().clone(), None)
        target.detach().copy_(view)
