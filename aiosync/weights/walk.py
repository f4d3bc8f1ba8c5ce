"""Going through a model's modules under the names that its state dict would give them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.jit import ScriptModule

from aiosync.weights.names import COMPILED, EXTRA_STATE, join

__all__ = ["extra_state_owners", "has_extra_state", "is_transient", "leaves", "modules"]


def modules(module: nn.Module, *, merge: bool, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with its dotted name; a shared one comes once under each of its names.

    Args:
        module: the model. ``torch.compile``'s wrapper adds no name of its own.
        merge: put a merged copy in place of each adapter model (one with ``merge_and_unload``, as
            PEFT has it). The live model is not touched.
        prefix: the name of ``module`` itself.
    """
    if merge and _is_adapter(module):
        with torch.no_grad():
            module = copy.deepcopy(module).merge_and_unload()  # type: ignore[operator]
    yield prefix, module
    if isinstance(module, TensorDictBase):
        return
    for key, child in module._modules.items():
        if child is not None:
            below = prefix if key == COMPILED else join(prefix, key)
            yield from modules(child, merge=merge, prefix=below)


def _is_adapter(module: nn.Module) -> bool:
    # Asking a plain layer for what it lacks is slow, and a layer without children cannot forward.
    if not module._modules and not hasattr(type(module), "merge_and_unload"):
        return False
    method = getattr(module, "merge_and_unload", None)
    if not callable(method):
        return False
    # A wrapper that hands unknown attributes on to what it wraps (TensorDictModule) answers here
    # too, but merging through it would lose its own part of the names. PEFT's outer model hands on
    # to its "base_model", and there the whole of it is to go.
    owner = getattr(method, "__self__", module)
    return owner is module or owner is module._modules.get("base_model", module)


def leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This module's own parameters and buffers, not its children's; dotted where it is a
    TensorDict of parameters.
    """
    if isinstance(module, TensorDictBase):
        yield from tensordict_leaves(module)
        return
    for registry in (module._parameters, module._buffers):
        for key, tensor in registry.items():
            if tensor is not None:
                yield key, tensor


def tensordict_leaves(td: TensorDictBase, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every leaf of a TensorDict under its dotted name."""
    for key, value in td.items():
        name = join(prefix, key)
        if isinstance(value, TensorDictBase):
            yield from tensordict_leaves(value, name)
        else:
            yield name, value


def is_transient(module: nn.Module, key: str) -> bool:
    """Whether a buffer is left out of state dicts (``persistent=False``)."""
    return key in module._non_persistent_buffers_set


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's class defines ``get_extra_state`` (every module inherits one)."""
    # TorchScript puts a method that raises in the place of the inherited one.
    own = type(module).get_extra_state is not nn.Module.get_extra_state
    return own and not isinstance(module, ScriptModule)


def extra_state_owners(module: nn.Module) -> dict[str, nn.Module]:
    """The names of the extra states in a model -> the modules that hold them."""
    return {
        join(prefix, EXTRA_STATE): part
        for prefix, part in modules(module, merge=False)
        if has_extra_state(part)
    }
