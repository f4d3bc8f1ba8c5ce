"""Check that tensors are dense, and compare tensors by memory or by bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aiosync.errors import UnsupportedTensorError
from aiosync.weights.dtypes import BY_NAME, dtype_name, spelled
from aiosync.weights.sharded import is_sharded, local_part

_PLAIN = frozenset({Tensor, nn.Parameter})
_SUPPORTED = frozenset(BY_NAME.values())


def check_dense(name: str, tensor: object, *, allow_meta: bool = True) -> None:
    """Check that ``tensor`` is a tensor with strided memory and a dtype that can be sent.

    Args:
        name: the tensor's name, for the error.
        tensor: the object to check.
        allow_meta: whether the tensor may be on ``meta``.

    Raises:
        UnsupportedTensorError: it is not. The error says what it is and what to do instead.
    """
    # The fast path for almost every weight: this function runs for each tensor on each send.
    if (
        type(tensor) in _PLAIN
        and isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.dtype in _SUPPORTED
        and not tensor.is_nested
        and not (tensor.is_meta and not allow_meta)
    ):
        return
    reason = _why_not(tensor, allow_meta=allow_meta)
    if reason is not None:
        raise UnsupportedTensorError(name, reason)


def _why_not(tensor: object, *, allow_meta: bool) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"it is a {type(tensor).__qualname__}, not a tensor; make it one or leave it out"
    if is_lazy(tensor):
        return "it is a lazy parameter without a shape; run one forward pass first"
    if tensor.is_nested:
        return "it is a nested tensor; pad it, or send its parts as entries of their own"
    if tensor.is_quantized:
        return (
            f"it is quantised ({dtype_name(tensor.dtype)}); send tensor.dequantize(), "
            "or its int_repr(), scale and zero point as entries of their own"
        )
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        return f"it has the {kind} layout; send tensor.to_dense(), or its parts as entries"
    if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
        return f"it is a {type(tensor).__qualname__}, which wraps other tensors; send the plain tensor"
    if tensor.dtype not in _SUPPORTED:
        return f"its dtype is {dtype_name(tensor.dtype)}; send it as uint8 bytes"
    if tensor.is_meta and not allow_meta:
        return "it is on the meta device and has no values; materialise the model first"
    return None


def describe(tensor: Tensor) -> str:
    """Return dtype and shape as text, such as ``float32[4, 2]``."""
    return spelled(tensor.dtype, tuple(tensor.shape))


def memory_key(tensor: Tensor) -> object:
    """Return a key that is equal for tensors over the same memory with equal shape, strides and dtype.

    The key of a tensor without memory (empty, or on ``meta``) is its id. Keep such a tensor alive while
    comparing.
    """
    if is_sharded(tensor):
        tensor = local_part(tensor)
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as 1-D ``uint8``; a view if the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors have equal bits after conversion to ``dtype``. A NaN equals itself."""
    if a is b or memory_key(a) == memory_key(b):
        return True
    if is_sharded(a) and is_sharded(b):  # comparing the whole tensors would need all ranks
        a, b = local_part(a), local_part(b)
    if a.shape != b.shape:
        return False
    return torch.equal(to_bytes(a.to(dtype)), to_bytes(b.to(device=a.device, dtype=dtype)))
