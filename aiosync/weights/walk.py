"""A model's modules: the names of their entries, a walk through them, and whether any was replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.jit import ScriptModule

from aiosync.errors import UnsupportedTensorError

EXTRA_STATE = "__extra_state__"
"""The path part of a module's ``get_extra_state()``."""

TORCH_EXTRA_STATE = "_extra_state"
"""The path part that torch's ``state_dict()`` uses for extra state."""

_COMPILED = "_orig_mod"
"""The path part that ``torch.compile`` adds to a module's names."""


def join(prefix: str, name: str) -> str:
    """Return ``prefix.name``, or ``name`` if the prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def is_extra_state(name: str) -> bool:
    """Return whether this entry is part of a module's extra state, and not a parameter or buffer."""
    return EXTRA_STATE in name and EXTRA_STATE in name.split(".")


def extra_state_root(name: str) -> str:
    """Return the name up to the extra-state part: ``net.__extra_state__`` for ``net.__extra_state__.mean``.

    A name without such a part is returned unchanged.
    """
    parts = name.split(".")
    if EXTRA_STATE not in parts:
        return name
    return ".".join(parts[: parts.index(EXTRA_STATE) + 1])


def normalized(name: str) -> str:
    """Return the name without the part that ``torch.compile`` adds: compiled and plain models have the same
    names."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def modules(module: nn.Module, *, merge: bool, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its dotted name. A shared module is yielded under each of its names.

    Args:
        module: the model. ``torch.compile``'s wrapper adds no part to the names.
        merge: whether to replace each adapter model (one with ``merge_and_unload``, as in PEFT) by a merged
            copy. The model itself is not changed.
        prefix: the name of ``module`` itself.
    """
    if merge and is_mergeable(module):
        with torch.no_grad():
            module = copy.deepcopy(module).merge_and_unload()  # type: ignore[operator]
    yield prefix, module
    for _, name, child in below(module, prefix):
        yield from modules(child, merge=merge, prefix=name)


def below(module: nn.Module, prefix: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the key, the dotted name and the module of each child of the module ``prefix``."""
    if isinstance(module, TensorDictBase):
        return
    for key, child in module._modules.items():
        if child is not None:
            yield key, prefix if key == _COMPILED else join(prefix, key), child


def is_tuner(module: nn.Module) -> bool:
    """Return whether this layer adds adapters to the layer that it wraps, as PEFT's layers do."""
    return hasattr(type(module), "adapter_layer_names")


def check_unmerged(prefix: str, module: nn.Module) -> None:
    """Check that a layer computes with its adapters' entries.

    Raises:
        UnsupportedTensorError: its adapters were merged into the base in place, as by ``merge_adapter()``.
    """
    if merged := vars(module).get("merged_adapters"):
        raise UnsupportedTensorError(
            prefix,
            f"its adapters {merged} are merged into its base, so that it does not compute with the adapters' "
            "own entries; call unmerge_adapter() before",
        )


def is_mergeable(module: nn.Module) -> bool:
    """Return whether :func:`modules` with ``merge`` replaces this module by a merged copy."""
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
        yield from _tensordict_leaves(module)
        return
    for registry in (module._parameters, module._buffers):
        for key, tensor in registry.items():
            if tensor is not None:
                yield key, tensor


def _tensordict_leaves(td: TensorDictBase, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in td.items():
        name = join(prefix, key)
        if isinstance(value, TensorDictBase):
            yield from _tensordict_leaves(value, name)
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


class Structure:
    """A record of a module's parameters, buffers and submodules, to detect that any was replaced.

    Walking a model of two thousand tensors takes milliseconds. :meth:`unchanged` takes a tenth of that.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        # A TensorDict of parameters has no registries, and those of TorchScript are not dicts.
        self.comparable = not any(isinstance(part, TensorDictBase | ScriptModule) for part in parts)
        if not self.comparable:
            return
        # The parts themselves are not kept: an object with a weak reference to the module keeps this record.
        self._owners = [(vars(part), part._parameters, part._buffers, part._modules) for part in parts]
        registries: list[dict[str, Any]] = []
        for part in parts:
            registries += (part._parameters, part._buffers, part._modules)
        self._registries = registries
        self._sizes = [*map(len, registries)]
        self._entries = [
            (registry, name, value) for registry in registries for name, value in registry.items()
        ]
        self._hidden = [part._non_persistent_buffers_set for part in parts if part._buffers]
        self._hidden_before = [frozenset(names) for names in self._hidden]
        # The adapter layers. A layer whose adapters are merged does not compute with their entries.
        self._tuners = [vars(part) for part in parts if "merged_adapters" in vars(part)]

    def unchanged(self) -> bool:
        """Return whether the module has exactly the same objects under the same names, in any order.

        A tensor whose ``.data`` was replaced counts as the same object. False if not :attr:`comparable`.
        """
        if not self.comparable:
            return False
        # Plain loops: between two updates other code fills the processor's caches, and each C function called
        # here would have to be loaded from memory first. The registries themselves are compared too: deleting
        # from a ModuleList, for example, replaces its registry.
        for owner, parameters, buffers, modules in self._owners:
            if (
                owner["_parameters"] is not parameters
                or owner["_buffers"] is not buffers
                or owner["_modules"] is not modules
            ):
                return False
        if [*map(len, self._registries)] != self._sizes:
            return False
        try:
            for registry, name, value in self._entries:
                if registry[name] is not value:
                    return False
        except KeyError:
            return False
        for tuner in self._tuners:
            if tuner["merged_adapters"]:
                return False
        return self._hidden == self._hidden_before
