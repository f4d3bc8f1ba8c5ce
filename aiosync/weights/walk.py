"""Walk a model's modules with the names that its state dict gives them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.jit import ScriptModule

from aiosync.weights.names import COMPILED, EXTRA_STATE, join


def modules(module: nn.Module, *, merge: bool, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its dotted name. A shared module is yielded under each of its names.

    Args:
        module: the model. ``torch.compile``'s wrapper adds no part to the names.
        merge: whether to replace each adapter model (one with ``merge_and_unload``, as in PEFT) by a merged
            copy. The model itself is not changed.
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
    # hasattr() on a plain layer is slow if the attribute is missing, and a layer without children cannot
    # delegate.
    if not module._modules and not hasattr(type(module), "merge_and_unload"):
        return False
    method = getattr(module, "merge_and_unload", None)
    if not callable(method):
        return False
    # A wrapper that delegates unknown attributes to the wrapped module (TensorDictModule) has the method too,
    # but merging through the wrapper would lose its own part of the names. PEFT's outer model delegates to
    # its "base_model", and there the whole outer model is to be replaced.
    owner = getattr(method, "__self__", module)
    return owner is module or owner is module._modules.get("base_model", module)


def leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this module's own parameters and buffers, without its children's.

    For a TensorDict of parameters the names are dotted.
    """
    if isinstance(module, TensorDictBase):
        yield from tensordict_leaves(module)
        return
    for registry in (module._parameters, module._buffers):
        for key, tensor in registry.items():
            if tensor is not None:
                yield key, tensor


def tensordict_leaves(td: TensorDictBase, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every leaf of a TensorDict with its dotted name."""
    for key, value in td.items():
        name = join(prefix, key)
        if isinstance(value, TensorDictBase):
            yield from tensordict_leaves(value, name)
        else:
            yield name, value


def is_transient(module: nn.Module, key: str) -> bool:
    """Return whether a buffer is not part of state dicts (``persistent=False``)."""
    return key in module._non_persistent_buffers_set


def has_extra_state(module: nn.Module) -> bool:
    """Return whether the module's class overrides ``get_extra_state``."""
    # TorchScript replaces the inherited method by one that raises.
    own = type(module).get_extra_state is not nn.Module.get_extra_state
    return own and not isinstance(module, ScriptModule)


def extra_state_owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the names of the extra states in a model -> the modules that have them."""
    return {
        join(prefix, EXTRA_STATE): part
        for prefix, part in modules(module, merge=False)
        if has_extra_state(part)
    }
