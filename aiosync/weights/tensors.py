"""Single tensors: which dtypes can be sent, dense memory, comparison by bits, tensors over other memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from aiosync.errors import LayoutMismatchError, UnsupportedTensorError
from aiosync.weights.sharded import is_sharded, local_part

_NAMES = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex128", "complex64", "complex32",
)  # fmt: skip

# Older torch releases lack the newest of these.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""Name without ``torch.`` -> dtype, for all dtypes that can be sent."""

# Two values share a byte in float4_e2m1fn_x2, and torch does not convert it.
FLOATING: frozenset[torch.dtype] = frozenset(
    dtype for name, dtype in DTYPES.items() if dtype.is_floating_point and not name.startswith("float4")
)
"""The floating dtypes that torch converts into one another."""

_NUMPY = {
    dtype: np.dtype(name)
    for name, dtype in DTYPES.items()
    if name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_TO_NAME = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = frozenset({Tensor, nn.Parameter})
_TIE_HINT = " (both names were one tensor when this model was connected; if by chance, clone() one before)"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``; also works for dtypes that cannot be sent."""
    return _TO_NAME.get(dtype) or str(dtype).removeprefix("torch.")


def convertible(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether two dtypes are equal or both floating, so that the copy can convert."""
    return given is wanted or (given in FLOATING and wanted in FLOATING)


def spelled(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return dtype and shape as text, such as ``float32[4, 2]``."""
    return f"{dtype_name(dtype)}{list(shape)}"


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape as text, such as ``float32[4, 2]``."""
    return spelled(tensor.dtype, tuple(tensor.shape))


# -- dense memory ------------------------------------------------------------------------------------


def check_dense(name: str, tensor: object, *, allow_meta: bool = True) -> None:
    """Check that ``tensor`` is a tensor with strided memory, or on ``meta``, of a dtype that can be sent.

    Raises:
        UnsupportedTensorError: it is not. The error says what ``name`` is and what to do instead.
    """
    # The fast path for almost every weight: this function runs for each tensor on each send.
    if (
        type(tensor) in _PLAIN
        and isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.dtype in _TO_NAME
        and not tensor.is_nested
        and not (tensor.is_meta and not allow_meta)
    ):
        return
    if reason := _why_not(tensor, allow_meta=allow_meta):
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
    if tensor.dtype not in _TO_NAME:
        return f"its dtype is {dtype_name(tensor.dtype)}; send it as uint8 bytes"
    if tensor.is_meta and not allow_meta:
        return "it is on the meta device and has no values; materialise the model first"
    return None


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements share memory, as in an expanded tensor."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as 1-D ``uint8``; a view if the tensor is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


# -- comparison --------------------------------------------------------------------------------------


def memory_key(tensor: Tensor) -> object:
    """Return a key that is equal for tensors over the same memory with equal shape, strides and dtype, and
    of which neither or both are conjugated, or negated, by a bit that is not in the memory.

    The key of a tensor without memory (empty, or on ``meta``) is its id. Keep such a tensor alive while
    comparing.
    """
    if is_sharded(tensor):
        tensor = local_part(tensor)
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    bits = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, bits)


def _same_bits(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors have equal bits after conversion to ``dtype``. A NaN equals itself."""
    if a is b or memory_key(a) == memory_key(b):
        return True
    if is_sharded(a) and is_sharded(b):  # comparing the whole tensors would need all ranks
        a, b = local_part(a), local_part(b)
    if a.shape != b.shape:
        return False
    return torch.equal(to_bytes(a.to(dtype)), to_bytes(b.to(device=a.device, dtype=dtype)))


def check_tied(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Check that tied names have equal bits. Missing names are ignored. ``ties``: alias -> primary name.

    Raises:
        LayoutMismatchError: tied names have different values.
    """
    if differing := untied(tensors, ties, {}):
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
    references, differing = dict[str, str](), dict[str, tuple[str, str]]()
    for alias, primary in ties.items():
        if alias not in tensors:
            continue
        name = references.setdefault(primary, primary if primary in tensors else alias)
        reference = tensors[name]
        if name != alias and not _same_bits(reference, tensors[alias], dtypes.get(alias, reference.dtype)):
            tied = f"{describe(reference)}, tied to {name!r} here"
            differing[alias] = (tied, "separate values there" + _TIE_HINT)
    return differing


# -- tensors over other memory -----------------------------------------------------------------------


def tensor_in(
    storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Make a contiguous tensor in a part of ``storage``, which it keeps alive, on any device.

    The tensor's own storage covers only that part, from ``offset`` bytes on.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return _tensor_of(storage[offset : offset + nbytes], shape, dtype)


def tensor_over(memory: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a contiguous tensor over all of ``memory``, to which the tensor's storage keeps a reference."""
    if not len(memory):  # frombuffer() refuses it
        return _tensor_of(torch.UntypedStorage(0, device="cpu"), shape, dtype)
    return _tensor_of(torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), shape, dtype)


def array_at(memory: Any, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Make a contiguous array in a part of an object with the buffer protocol, from ``offset`` bytes on, for
    :func:`maker_over_arrays`. If NumPy has no such dtype, the array has bytes, with one more dimension."""
    alike = _NUMPY.get(dtype)
    if alike is None:
        return np.ndarray((*shape, dtype.itemsize), np.uint8, memory, offset)
    return np.ndarray(shape, alike, memory, offset)


def maker_over_arrays(dtype: torch.dtype) -> Callable[[np.ndarray[Any, Any]], Tensor]:
    """Return what makes a tensor of this dtype over the memory of an array of :func:`array_at`. The tensor's
    storage keeps a reference to this very object."""
    if dtype in _NUMPY:
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).view(dtype).squeeze(-1)


def _tensor_of(storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    # An empty part of a storage has the address of the next tensor: torch.save would save that one's bytes.
    part = storage if storage.nbytes() else empty.untyped_storage()
    return empty.set_(part, 0, shape, ())  # no strides: contiguous
