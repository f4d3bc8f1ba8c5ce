"""The dtypes that can be sent, their names, and which of them convert into each other."""

from __future__ import annotations

import torch

_NAMES = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex128", "complex64", "complex32",
)  # fmt: skip

# Older torch releases lack the newest of these.
BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""Name without ``torch.`` -> dtype, for all dtypes that can be sent."""

# Two values share a byte in float4_e2m1fn_x2, and torch does not convert it.
FLOATING: frozenset[torch.dtype] = frozenset(
    dtype for name, dtype in BY_NAME.items() if dtype.is_floating_point and not name.startswith("float4")
)
"""The floating dtypes that torch converts into one another."""

_TO_NAME = {dtype: name for name, dtype in BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``; also works for dtypes that cannot be sent."""
    return _TO_NAME.get(dtype) or str(dtype).removeprefix("torch.")


def convertible(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether two dtypes are equal or both floating, so that the copy can convert."""
    return given is wanted or (given in FLOATING and wanted in FLOATING)


def spelled(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return dtype and shape as text, such as ``float32[4, 2]``."""
    return f"{dtype_name(dtype)}{list(shape)}"
