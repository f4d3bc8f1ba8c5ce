"""Convert a model in any form to flat dotted names. The names are the same for all forms.

========================  ============================================================
form                      names
========================  ============================================================
``nn.Module``             as in ``state_dict()``: parameters and persistent buffers, a tied
                          one under each of its names
``TensorDictBase``        nested keys joined by dots
mapping                   flat dotted keys, nested mappings, or a mix
========================  ============================================================

In all forms, extra state has the path part ``__extra_state__``; torch's own ``_extra_state`` is read as the
same. The part ``_orig_mod`` that ``torch.compile`` adds is dropped.

The forms differ in non-persistent buffers: ``state_dict()`` omits them and ``TensorDict.from_module`` does
not. A module is sent without them, because their author declared them not part of its state (masks, caches,
tables). If a TensorDict has them, the sender's layout accepts them and a receiver applies them: they are
*optional* on both sides (:func:`optional_names`). Only a receiver whose non-persistent buffers are on
``meta`` requires them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from aiosync.errors import InvalidArgumentError, UnsupportedTensorError
from aiosync.weights.extra_state import flatten_extra
from aiosync.weights.peft import PeftMode, frozen_base
from aiosync.weights.tensors import check_dense, memory_key
from aiosync.weights.walk import (
    EXTRA_STATE,
    TORCH_EXTRA_STATE,
    check_unmerged,
    extra_state_owners,
    has_extra_state,
    is_extra_state,
    is_transient,
    join,
    leaves,
    modules,
    normalized,
)

if TYPE_CHECKING:
    from aiosync.weights.strategy import WeightStrategy

WeightSource: TypeAlias = "nn.Module | TensorDictBase | Mapping[str, Any]"
"""The types that weights can be given as."""


def named_tensors(
    source: WeightSource, *, strategy: WeightStrategy | None = None, peft: PeftMode = "merged"
) -> dict[str, Tensor]:
    """Return the weights as flat dotted names -> tensors, detached and not copied.

    Args:
        source: a module, a TensorDict, or a flat or nested mapping.
        strategy: a user's strategy that extracts the weights first. None: the source is used as it is.
        peft: which entries a model with adapters gives; see :class:`~aiosync.WeightStrategy`.

    Returns:
        Names in the source's order. Tied tensors appear under each name and share memory.

    Raises:
        UnsupportedTensorError: an entry is not a tensor, is uninitialised, or is on ``meta``; a module has
            further state (see :func:`check_sendable`); or its adapters are merged in place.
        InvalidArgumentError: the source has another type, a key is not a string, two keys give the same
            name, or ``peft="adapter"`` and a module has no adapters.
    """
    if strategy is not None:
        source = strategy.extract_weights(source)
    out = _Named()
    # A TensorDict of parameters is a module too; its names are those of a TensorDict.
    if isinstance(source, TensorDictBase | Mapping):
        _add_mapping(out, source, "")
    elif isinstance(source, nn.Module):
        _add_module(out, source, peft)
    else:
        raise InvalidArgumentError(
            "weights must be an nn.Module, a TensorDict or a dict of tensors, "
            f"got {type(source).__qualname__}"
        )
    return out.tensors


class _Named:
    """Collects named tensors. Two names of one tensor share one detached object."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # The original is kept too: the id of a freed tensor may be used again.
        self._detached: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, tensor: object) -> None:
        if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
            check_dense(name, tensor, allow_meta=False)
        if name in self.tensors:
            raise InvalidArgumentError(f"two keys stand for the weight {name!r}")
        assert isinstance(tensor, Tensor)
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            known = self._detached.get(id(tensor))
            if known is None:
                known = self._detached[id(tensor)] = (tensor, tensor.detach())
            tensor = known[1]
        self.tensors[name] = tensor

    def add_all(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self.add(name, tensor)


def _add_module(out: _Named, source: nn.Module, peft: PeftMode) -> None:
    left_out = frozen_base(source) if peft == "adapter" else {}
    for prefix, module in modules(source, merge=peft == "merged"):
        check_sendable(prefix, module)
        check_unmerged(prefix, module)
        for key, tensor in leaves(module):
            if not is_transient(module, key) and (name := join(prefix, key)) not in left_out:
                out.add(name, tensor)
        if has_extra_state(module):
            root = join(prefix, EXTRA_STATE)
            out.add_all(flatten_extra(root, module.get_extra_state()).items())


def check_sendable(name: str, module: nn.Module) -> None:
    """Check that all of a module's state is in parameters, buffers and extra state.

    A module that writes other entries into ``state_dict()``, such as packed or quantised weights, would be
    sent incompletely.

    The module's children are not checked.

    Raises:
        UnsupportedTensorError: the module's own ``_save_to_state_dict`` or a state-dict hook writes an entry
            that is not a parameter, a buffer or extra state.
    """
    own_way = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    hooks = module._state_dict_hooks
    if not (own_way or hooks) or isinstance(module, TensorDictBase | ScriptModule):
        return
    if type(module).__module__.startswith("torch.distributed"):
        return  # the hooks of these classes gather from other ranks
    if hooks:
        state = module.state_dict(keep_vars=True)
    else:
        module._save_to_state_dict(state := {}, "", True)
    tensors = [tensor for part in module.modules() for _, tensor in leaves(part)]
    known = {id(tensor) if is_lazy(tensor) else memory_key(tensor) for tensor in tensors}
    for key, value in state.items():
        if key.rpartition(".")[2] == TORCH_EXTRA_STATE:
            continue
        if is_lazy(value) and id(value) in known:
            continue
        if not isinstance(value, Tensor) or memory_key(value) not in known:
            raise UnsupportedTensorError(
                join(name, key),
                f"{type(module).__qualname__} writes it into its state_dict() by code of its own, and it is "
                "neither a parameter nor a buffer; register it as a buffer, or give the module "
                "get_extra_state() and set_extra_state()",
            )


def _add_mapping(out: _Named, source: Any, prefix: str) -> None:
    for key, value in source.items():
        if not isinstance(key, str):
            raise InvalidArgumentError(f"the keys of weights must be strings, got {key!r}")
        name = join(prefix, normalized(key))
        parent, _, last = name.rpartition(".")
        if last == TORCH_EXTRA_STATE:
            out.add_all(flatten_extra(join(parent, EXTRA_STATE), value).items())
        elif is_extra_state(name):
            out.add_all(flatten_extra(name, value).items())
        elif isinstance(value, TensorDictBase | Mapping):
            _add_mapping(out, value, name)
        else:
            out.add(name, value)


def optional_names(model: object) -> frozenset[str]:
    """Return the names that may be given for this model or omitted.

    For a module these are its non-persistent buffers, except those on ``meta``, which have no values; and the
    roots of its extra states, which stand for all names below them. Other models have none.
    """
    if not isinstance(model, nn.Module):
        return frozenset()
    return frozenset(transient_tensors(model).keys() | extra_state_owners(model).keys())


def transient_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the non-persistent buffers of a module, except those on ``meta``, by their names."""
    return {
        join(prefix, key): tensor
        for prefix, module in modules(model, merge=False)
        for key, tensor in leaves(module)
        if is_transient(module, key) and not tensor.is_meta
    }
