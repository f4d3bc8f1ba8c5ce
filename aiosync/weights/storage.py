"""Tensors whose storages cover parts of a larger buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tensor_in(
    storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Make a contiguous tensor in a part of ``storage``. The tensor's own storage covers only that part.

    Args:
        storage: on any device. The tensor keeps it alive.
        offset: where the tensor starts, in bytes; a multiple of the dtype's size.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return _tensor_of(storage[offset : offset + nbytes], shape, dtype)


def tensor_over(memory: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a contiguous tensor over ``memory``. The tensor's storage keeps a reference to ``memory``.

    Args:
        memory: CPU memory with exactly as many bytes as ``shape`` and ``dtype`` take.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """
    storage = (
        torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        if len(memory)
        else torch.UntypedStorage(0, device="cpu")
    )
    return _tensor_of(storage, shape, dtype)


def _tensor_of(storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a contiguous tensor over all of ``storage``."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    # An empty part of a storage has the address of the next tensor: torch.save would save that one's bytes.
    part = storage if storage.nbytes() else empty.untyped_storage()
    return empty.set_(part, 0, shape, _strides(shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
