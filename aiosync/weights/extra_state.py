"""Convert extra state (``get_extra_state`` / ``set_extra_state``) to named tensors, and back.

A module's extra state may be a tensor, a number, or nested mappings of those. Its names have the path part
``__extra_state__`` below the module's name. Numbers are sent as scalar tensors. They become numbers again if
the receiving module's own state has a number there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from aiosync.errors import UnsupportedTensorError
from aiosync.weights.tensors import convertible
from aiosync.weights.walk import extra_state_owners, extra_state_root, is_extra_state

_Path: TypeAlias = "tuple[str, ...]"


def flatten_extra(root: str, state: object) -> dict[str, Tensor]:
    """Return the named tensors of an extra state with the name ``root``, such as ``net.__extra_state__``.

    None and empty mappings give no tensors.

    Raises:
        UnsupportedTensorError: a value is not a tensor, a number or a mapping of those.
    """
    return {
        ".".join((root, *path)): _tensor(root, path, value)
        for path, value in _leaves(root, (), state)
        if value is not None
    }


def _leaves(root: str, path: _Path, state: object) -> Iterator[tuple[_Path, object]]:
    if isinstance(state, Mapping | TensorDictBase):
        for key, value in state.items():
            if not isinstance(key, str):
                raise UnsupportedTensorError(".".join((root, *path)), f"its key {key!r} is not a string")
            yield from _leaves(root, (*path, key), value)
    else:
        yield path, state


def _tensor(root: str, path: _Path, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, bool):
        return torch.tensor(value, device="cpu")
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return torch.tensor(value, dtype=torch.int64, device="cpu")
    raise UnsupportedTensorError(
        ".".join((root, *path)),
        f"extra state of type {type(value).__qualname__}; only tensors, bools, 64-bit integers, "
        "floats and mappings of them travel",
    )


def typed_like(value: Tensor, current: object) -> Any:
    """Copy a value into the receiver's form: a number, or a tensor on the receiver's device.

    If the type of the receiver's number cannot represent the value, the value's own type is used. Without
    ``current`` a scalar stays a tensor, because it may have been one.
    """
    if isinstance(current, bool | int | float) and value.dim() == 0:
        number = value.item()
        kept = type(current)(number) if number == number else number
        return kept if kept == number else number
    if isinstance(current, Tensor):
        floating = convertible(value.dtype, current.dtype)
        dtype = current.dtype if floating else value.dtype
        device = value.device if current.is_meta else current.device
        return value.detach().to(device=device, dtype=dtype, copy=True)
    return value.detach().clone()


def restored(root: str, values: Mapping[str, Tensor], current: object, *, merge: bool) -> Any:
    """Build the argument of ``set_extra_state`` from named tensors. It shares no memory with ``values``.

    A key with dots is recognised if the receiver's ``current`` state has the same key. Otherwise each dot
    starts a nested mapping.

    Args:
        root: the extra state's name.
        values: ``root`` itself, or names below it -> tensors.
        current: the receiving module's own state, for types and keys.
        merge: whether to keep values of ``current`` that are not in ``values``.
    """
    known = {".".join((root, *path)): (path, v) for path, v in _leaves(root, (), current)}
    if root in values:
        return typed_like(values[root], known[root][1] if root in known else None)
    given: dict[_Path, Any] = {}
    for name, value in values.items():
        path, own = known.get(name) or (tuple(name[len(root) + 1 :].split(".")), None)
        given[path] = typed_like(value, own)
    # None is not sent, so a None of the receiver stays.
    kept = [(path, v) for path, v in known.values() if path and (merge or v is None)]
    nested: dict[str, Any] = {}
    for path, value in (*given.items(), *kept):
        _nest(nested, path, value)
    return TensorDict(nested) if isinstance(current, TensorDictBase) else nested


def _nest(nested: dict[str, Any], path: _Path, value: object) -> None:
    for part in path[:-1]:
        inner = nested.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        nested = inner
    nested.setdefault(path[-1], value)


@contextmanager
def applying_extra_state(
    module: nn.Module, values: Mapping[str, Tensor], *, merge: bool = False
) -> Iterator[None]:
    """Set the submodules' extra state on entry. Restore the old one if the body or a ``set_extra_state``
    raises.

    Args:
        module: the model whose submodules the names refer to.
        values: named tensors. Names that are not extra state, or of a submodule without extra state, are
            ignored.
        merge: for an update of some names only: whether to keep the other parts of a state.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, value in values.items():
        if is_extra_state(name):
            groups.setdefault(extra_state_root(name), {})[name] = value
    owners = extra_state_owners(module) if groups else {}
    with ExitStack() as undo:
        for root, group in groups.items():
            owner = owners.get(root)
            if owner is None:
                continue
            current = copy.deepcopy(owner.get_extra_state())
            state = restored(root, group, current, merge=merge)
            undo.callback(owner.set_extra_state, current)
            owner.set_extra_state(state)
        yield
        undo.pop_all()
