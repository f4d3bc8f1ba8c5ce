"""The tensors that weights are written to, of a module, a TensorDict or a dict, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError, UnsupportedTensorError
from aiosync.weights.extra_state import flatten_extra, typed_like
from aiosync.weights.sharded import is_sharded
from aiosync.weights.tensors import check_dense, memory_key, overlaps_itself
from aiosync.weights.walk import (
    EXTRA_STATE,
    TORCH_EXTRA_STATE,
    check_unmerged,
    is_extra_state,
    join,
    leaves,
    modules,
    normalized,
)

WeightTarget: TypeAlias = "nn.Module | TensorDictBase | MutableMapping[str, Any]"
"""The types that weights can be applied to."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a destination."""

    name: str
    tensor: Tensor  # the current parameter or buffer itself, not a copy
    register: Callable[[Tensor], None]  # replaces the tensor by another one
    rewritable: bool = True  # whether the owner has ``tensor`` itself. False for a number in a dict.


def receiver_tensors(destination: WeightTarget) -> dict[str, Tensor]:
    """Return the tensors of a receiving model by name. They may be on ``meta``.

    Unlike :func:`.flatten.named_tensors` this returns the parameters and buffers themselves, includes
    non-persistent buffers, and excludes a module's extra state.

    Raises:
        UnsupportedTensorError: a tensor is sparse, quantised, nested, wrapped or uninitialised; or a module's
            adapters are merged in place.
        InvalidArgumentError: the destination is not a module, TensorDict or dict.
    """
    return {slot.name: slot.tensor for slot in receiver_slots(destination)}


def receiver_slots(destination: WeightTarget) -> list[Slot]:
    """Return all slots of the destination, aliases included. Raises as :func:`receiver_tensors`."""
    if isinstance(destination, TensorDictBase | MutableMapping):
        slots = list(_mapping_slots(destination, ""))
    elif isinstance(destination, nn.Module):
        slots = list(_module_slots(destination))
    else:
        raise InvalidArgumentError(
            f"weights apply to an nn.Module, a TensorDict or a dict, not to {type(destination).__qualname__}"
        )
    for slot in slots:
        check_dense(slot.name, slot.tensor)
        if is_sharded(slot.tensor):
            raise UnsupportedTensorError(slot.name, "it is a DTensor here; a worker's model has to be whole")
    return slots


def _module_slots(destination: nn.Module) -> Iterator[Slot]:
    for prefix, module in modules(destination, merge=False):
        if isinstance(module, TensorDictBase):
            yield from _mapping_slots(module, prefix)
            continue
        check_unmerged(prefix, module)
        for key, tensor in leaves(module):
            # setattr and not the registry, because some modules (LSTM) update their own lists in __setattr__.
            yield Slot(join(prefix, key), tensor, partial(setattr, module, key))


def _mapping_slots(owner: Any, prefix: str) -> Iterator[Slot]:
    if isinstance(owner, LazyStackedTensorDict):
        raise UnsupportedTensorError(prefix, "it is a lazy stack; apply to stack.contiguous()")
    for key, value in owner.items():
        if not isinstance(key, str):
            raise InvalidArgumentError(f"the keys of weights must be strings, got {key!r}")
        name = join(prefix, normalized(key))
        if isinstance(value, TensorDictBase | MutableMapping):
            parts = [EXTRA_STATE if p == TORCH_EXTRA_STATE else p for p in name.split(".")]
            yield from _mapping_slots(value, ".".join(parts))
            continue
        parent, _, last = name.rpartition(".")
        if last == TORCH_EXTRA_STATE:
            name = join(parent, EXTRA_STATE)
        put = partial(_put, owner, key)
        if isinstance(value, Tensor) or not is_extra_state(name):
            yield Slot(name, value, put)
        else:
            for leaf, tensor in flatten_extra(name, value).items():
                yield Slot(leaf, tensor, partial(_put_typed, put, value), rewritable=False)


def _put(owner: Any, key: str, value: object) -> None:
    if isinstance(owner, TensorDictBase) and owner.is_locked:
        with owner.unlock_():
            owner.set(key, value)
    else:
        owner[key] = value


def _put_typed(put: Callable[[Any], None], current: object, value: Tensor) -> None:
    put(typed_like(value, current))


def write(pairs: list[tuple[Slot, Tensor]], *, inplace: bool) -> None:
    """Write values that were checked before: dtypes are convertible, shapes equal, tied slots have equal
    values.

    All memory is allocated before anything is changed. Parameters stay the same objects. Those on ``meta``
    are allocated on the value's device, and stay the same objects if torch can do that. Values are only read,
    and not kept.

    Args:
        pairs: (slot, value).
        inplace: whether to write into the existing memory. If not, each tensor is pointed at new memory, and
            code that keeps the old memory sees the old values.
    """
    # Tied slots are written once, and stay tied when they get new memory.
    groups: dict[object, list[Slot]] = {}
    values: dict[object, Tensor] = {}
    for slot, value in pairs:
        key = memory_key(slot.tensor)
        groups.setdefault(key, []).append(slot)
        values.setdefault(key, value)
    with torch.no_grad():
        copies: list[tuple[Tensor, Tensor]] = []
        moves: list[Callable[[], None]] = []
        for key, slots in groups.items():
            first, value = slots[0].tensor, values[key]
            if not slots[0].rewritable:
                moves.append(partial(slots[0].register, value))
            elif inplace and not first.is_meta and not overlaps_itself(first):
                copies.append((first, value))
            else:
                device = value.device if first.is_meta else first.device
                fresh = torch.empty_like(first, device=device, requires_grad=False).detach().copy_(value)
                moves.append(partial(_materialize if first.is_meta else _point_at, slots, fresh))
        sources = _unaliased(copies)
        for move in moves:
            move()
        # Tensors made in inference mode can be written only in that mode. inference_mode(False) instead of no
        # context would turn gradients on again.
        inference = any(destination.is_inference() for destination, _ in copies)
        with torch.inference_mode() if inference else nullcontext():
            if copies:
                torch._foreach_copy_([destination for destination, _ in copies], sources)


def _point_at(slots: list[Slot], fresh: Tensor) -> None:
    for slot in slots:
        slot.tensor.data = fresh


def _materialize(slots: list[Slot], fresh: Tensor) -> None:
    # Tied slots on meta have one object: without memory, two objects cannot be tied.
    old, new = slots[0].tensor, fresh
    if isinstance(old, nn.Parameter):
        new = torch.Tensor._make_subclass(type(old), fresh, old.requires_grad)
    new.__dict__.update(old.__dict__)
    try:
        # Keeps the object, so that an optimizer or a list that refers to it sees the new values.
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        # There is a weak reference to the object, as in an LSTM: a new object replaces it.
        for slot in slots:
            slot.register(new)


def _unaliased(copies: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    # A value in the memory of another destination would be overwritten before it is read.
    written = {dst.untyped_storage().data_ptr() for dst, _ in copies} - {0}
    sources = []
    for dst, value in copies:
        shared = value.untyped_storage().data_ptr() in written
        sources.append(value.clone() if shared and value.data_ptr() != dst.data_ptr() else value)
    return sources


# -- single tensors of a module ---------------------------------------------------------------------

Look: TypeAlias = tuple[torch.dtype, torch.Size, torch.device, bool, bool]
"""A tensor's dtype, shape and device; whether it is a parameter; whether it was made in inference mode."""


def look_of(tensor: Tensor) -> Look:
    """Return the properties of a tensor that a binding depends on, without its address."""
    parameter = isinstance(tensor, nn.Parameter)
    return tensor.dtype, tensor.shape, tensor.device, parameter, tensor.is_inference()


def overlapping(targets: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose memory overlaps but is not the same (those are tied)."""
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


def data_for(target: Tensor, view: Tensor) -> Tensor:
    """Return a tensor over the memory of ``view`` that ``target.data`` may become.

    A parameter made in inference mode has no version counter. A forward pass raises if its data has one.
    """
    if view.is_inference() or not target.is_inference():
        return view
    with torch.inference_mode():
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        storage, at = view.untyped_storage(), view.storage_offset()
        return empty.set_(storage, at, view.shape, view.stride())


def write_into(target: Tensor, view: Tensor, undo: ExitStack | None) -> None:
    """Copy ``view`` into the memory of ``target``, which has the same shape.

    ``undo`` gets a callback that restores ``target``; None: nothing is saved.
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
