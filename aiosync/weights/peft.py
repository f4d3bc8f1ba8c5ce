"""Models with adapters, as PEFT makes them: which entries are sent, and what an update presumes of the rest.

PEFT is not imported. A layer counts as an adapter layer if its class has ``adapter_layer_names``, as PEFT's
layers do. Its child ``base_layer`` or ``original_module`` is the layer of the base model that it wraps.

An update that contains less than the whole model presumes something of the worker's model. This is sent with
the layout, as name -> text, and compared once, when a worker connects:

=====================  ==================================================================
name                   text
=====================  ==================================================================
an entry of the base   dtype, shape and digest: ``float32[4, 2] of digest 0123...``
``layer.scaling.name``  the factor of the adapter ``name`` in this layer, such as ``2.0``
=====================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.errors import DIGEST, InvalidArgumentError, LayoutMismatchError, UnsupportedTensorError
from aiosync.weights.codec import check_xxhash, checksum_of, digest_of
from aiosync.weights.sharded import is_sharded
from aiosync.weights.target import WeightTarget, receiver_tensors
from aiosync.weights.tensors import (
    DTYPES,
    FLOATING,
    convertible,
    describe,
    dtype_name,
    memory_key,
    spelled,
    to_bytes,
)
from aiosync.weights.walk import below, is_mergeable, is_tuner, join

PeftMode: TypeAlias = Literal["merged", "as_is", "adapter"]
"""How a model with adapters is sent."""

_BASE = frozenset({"base_layer", "original_module"})
"""The children of an adapter layer that belong to the base model."""

_BLOCK = 8 << 20
"""Bytes between two checks of whether a digest was cancelled. A digest depends on it."""

_NOTHING = "nothing"


class Cancelled(Exception):
    """The caller of a digest was cancelled."""


def check_mode(peft: object) -> None:
    """Raise InvalidArgumentError if it is not a :data:`PeftMode`, or needs a package that is missing."""
    if peft not in get_args(PeftMode):
        raise InvalidArgumentError(f"peft={peft!r}: expected 'merged', 'as_is' or 'adapter'")
    if peft == "adapter":
        check_xxhash("peft='adapter'")


def has_adapters(model: nn.Module) -> bool:
    """Return whether a part of the model has adapters."""
    return any(adapter or is_mergeable(part) for _, part, adapter in _walk(model, "", False))


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model with adapters that are not its adapters'.

    Raises:
        InvalidArgumentError: the model has no adapters.
    """
    if not has_adapters(model):
        raise InvalidArgumentError(
            f"peft='adapter': this {type(model).__qualname__} has no adapters; expected a model with PEFT's "
            "adapters, or peft='merged', which is the default"
        )
    return {
        join(prefix, key): parameter
        for prefix, part, adapter in _walk(model, "", False)
        if not adapter and not isinstance(part, TensorDictBase)
        for key, parameter in part._parameters.items()
        if parameter is not None
    }


def frozen_base(model: nn.Module) -> dict[str, Tensor]:
    """Return the entries that are not sent with ``peft="adapter"``: the frozen parameters of the base model.

    All else is sent: the adapters, parameters that require gradients, buffers and extra state. Raises as
    :func:`base_parameters`.
    """
    return {name: tensor for name, tensor in base_parameters(model).items() if not tensor.requires_grad}


def _walk(module: nn.Module, prefix: str, adapter: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield every module with its name, and whether its own entries are an adapter's."""
    tuner = is_tuner(module)
    yield prefix, module, adapter or tuner
    for key, name, child in below(module, prefix):
        # PEFT's outer model has the prompts of prompt tuning beside the base model.
        prompts = key == "prompt_encoder" and hasattr(type(module), "peft_config")
        yield from _walk(child, name, key not in _BASE if tuner else adapter or prompts)


# -- what an update presumes --------------------------------------------------------------------------


def presumed(
    model: nn.Module, peft: PeftMode, cast: torch.dtype | None, cancelled: Callable[[], bool]
) -> dict[str, str]:
    """Return what updates of this model presume of a worker's model. Blocking; reads the whole base.

    Args:
        model: the sender's model.
        peft: how it is sent. Merged weights presume nothing.
        cast: the floating dtype in which the base is compared; None: in its own.
        cancelled: called between two blocks.

    Raises:
        InvalidArgumentError: ``peft="adapter"``, and the model has no adapters.
        UnsupportedTensorError: a tensor of the base is sharded or on ``meta``.
        Cancelled: ``cancelled()`` was true.
    """
    if peft == "merged":
        return {}
    found = dict(_scalings(model))
    if peft == "adapter":
        digests = _Digests(cancelled)
        for name, tensor in frozen_base(model).items():
            narrowed = cast is not None and tensor.dtype in FLOATING
            found[name] = digests.of(name, tensor, cast if narrowed and cast is not None else tensor.dtype)
    return found


def check_presumed(
    expected: Mapping[str, str],
    model: WeightTarget,
    sent: Collection[str],
    cancelled: Callable[[], bool],
) -> None:
    """Check a worker's model against what its sender's updates presume of it. Blocking.

    Args:
        expected: what the sender's :func:`presumed` returned; not trusted.
        model: the worker's model.
        sent: the names that updates contain.
        cancelled: called between two blocks.

    Raises:
        LayoutMismatchError: they differ. "expected" is the worker's side, "got" the sender's.
        UnsupportedTensorError: a tensor of the worker's base is on ``meta``.
        Cancelled: ``cancelled()`` was true.
    """
    tensors = receiver_tensors(model)
    mine = dict(_scalings(model)) if isinstance(model, nn.Module) else {}
    owners = {memory_key(tensor): name for name, tensor in tensors.items() if name in sent}
    digests = _Digests(cancelled)
    missing: list[str] = []
    differing: dict[str, tuple[str, str]] = {}
    for name, theirs in expected.items():
        tensor, dtype = tensors.get(name), DTYPES.get(theirs.partition("[")[0])
        if dtype is None:
            ours = mine.get(name, _NOTHING) if isinstance(model, nn.Module) else theirs
        elif tensor is None:
            missing.append(name)
            continue
        elif (tied := owners.get(memory_key(tensor))) is not None:
            ours = f"{describe(tensor)}, tied to {tied!r} here"
        elif convertible(tensor.dtype, dtype):
            ours = digests.of(name, tensor, dtype)
        else:
            ours = describe(tensor)
        if ours != theirs:
            if tensor is not None and dtype is not None and tensor.dtype is not dtype:
                ours += f", converted from {dtype_name(tensor.dtype)}"
            differing[name] = (ours, theirs)
    if missing or differing:
        raise LayoutMismatchError(unexpected=missing, differing=differing)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the names with other texts -> (before, now)."""
    both = {name: (before.get(name, _NOTHING), now.get(name, _NOTHING)) for name in {**before, **now}}
    return {name: texts for name, texts in both.items() if texts[0] != texts[1]}


def _scalings(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the factors of the adapters. They are plain numbers, which are in no entry."""
    for prefix, part, _ in _walk(model, "", False):
        known: Any = vars(part).get("scaling") if is_tuner(part) else None
        for adapter, factor in known.items() if isinstance(known, dict) else ():
            if isinstance(factor, int | float):
                yield join(prefix, f"scaling.{ascii(adapter)[1:-1]}"), repr(float(factor))


class _Digests:
    """Digests of tensors. Tied tensors are read once."""

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._known: dict[tuple[object, torch.dtype], str] = {}

    def of(self, name: str, tensor: Tensor, dtype: torch.dtype) -> str:
        """Return dtype, shape and digest of a tensor's values in ``dtype``, as text."""
        if tensor.is_meta or is_sharded(tensor):
            state = "on the meta device and has no values" if tensor.is_meta else "a DTensor"
            raise UnsupportedTensorError(
                name,
                f"it is {state}, and with peft='adapter' it is not sent but compared by its digest; "
                "load the base model first, or send all entries with peft='as_is'",
            )
        key = memory_key(tensor), dtype
        if key not in self._known:
            self._known[key] = digest_of([*self._checksums(tensor, dtype)]).hex()
        return f"{spelled(dtype, tuple(tensor.shape))}{DIGEST}{self._known[key]}"

    def _checksums(self, tensor: Tensor, dtype: torch.dtype) -> Iterator[int]:
        flat, size = tensor.detach().reshape(-1), _BLOCK // dtype.itemsize
        for start in range(0, flat.numel(), size):
            if self._cancelled():
                raise Cancelled
            block = to_bytes(flat[start : start + size].to("cpu", dtype))
            yield checksum_of(block.numpy().data)
