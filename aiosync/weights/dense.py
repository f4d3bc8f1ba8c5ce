"""What counts as a dense tensor, and when two tensors are the same memory or the same bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aiosync.errors import UnsupportedTensorError
from aiosync.weights.dtypes import BY_NAME, dtype_name, spelled
from aiosync.weights.sharded import is_sharded, local_part

__all__ = ["check_dense", "describe", "memory_key", "same_bits", "to_bytes"]

_PLAIN = frozenset({Tensor, nn.Parameter})
_SUPPORTED = frozenset(BY_NAME.values())


def check_dense(name: str, tensor: object, *, allow_meta: bool = True) -> None:
    """Refuse what has no strided bytes of a dtype that can travel.

    Raises:
        UnsupportedTensorError: says what it is and what to do instead.
    """
    # Almost every weight leaves by this line: it runs for each tensor on each send.
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
    """Dtype and shape as text, such as ``float32[4, 2]``."""
    return spelled(tensor.dtype, tuple(tensor.shape))


def memory_key(tensor: Tensor) -> object:
    """Equal keys mean the same memory seen the same way. A tensor without memory (empty, or on
    ``meta``) is only the same as itself; keep it alive while comparing.
    """
    if is_sharded(tensor):
        tensor = local_part(tensor)
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def to_bytes(tensor: Tensor) -> Tensor:
    """The elements as 1-D ``uint8``, a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors hold the same bits once both are of ``dtype``; a NaN equals itself."""
    if a is b or memory_key(a) == memory_key(b):
        return True
    if is_sharded(a) and is_sharded(b):  # to compare the whole would take all ranks
        a, b = local_part(a), local_part(b)
    if a.shape != b.shape:
        return False
    return torch.equal(to_bytes(a.to(dtype)), to_bytes(b.to(device=a.device, dtype=dtype)))
