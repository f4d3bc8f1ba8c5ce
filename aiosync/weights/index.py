"""The tensors of a module by name, cached until the module's structure changes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.weights.dense import check_dense
from aiosync.weights.fit import KnownTensors
from aiosync.weights.flatten import check_sendable, named_tensors
from aiosync.weights.names import join
from aiosync.weights.replaced_layers import Structure
from aiosync.weights.sharded import reshard
from aiosync.weights.walk import has_extra_state, is_transient, leaves, modules


class _Index:
    """The result of a walk through a module, and the structure for which it is valid."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = KnownTensors()
        self.spread = reshard(module)
        self.structure = Structure(module)
        self.reusable = self.structure.comparable
        own = {id(part) for part in module.modules()}
        for prefix, part in modules(module, merge=True) if self.reusable else ():
            # An adapter's merged copy is not a part of the module, and is made again at each walk.
            if id(part) not in own or isinstance(part, TensorDictBase) or has_extra_state(part):
                self.reusable = False
                return
            check_sendable(prefix, part)
            for key, tensor in leaves(part):
                if not is_transient(part, key):
                    name = join(prefix, key)
                    check_dense(name, tensor, allow_meta=False)
                    self.tensors[name] = tensor


_known: WeakKeyDictionary[nn.Module, _Index] = WeakKeyDictionary()


def known_tensors(module: nn.Module) -> KnownTensors | None:
    """Return the cached result of :func:`module_tensors`; None: there is none, or it is no longer valid."""
    index = _known.get(module)
    if index is None:
        return None
    if index.spread:
        reshard(module)
    return index.tensors if index.structure.unchanged() else None


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's names -> tensors, as :func:`named_tensors`.

    If the result can be cached, the tensors are the parameters themselves, not detached.

    Raises:
        As :func:`named_tensors`.
    """
    tensors = known_tensors(module)
    if tensors is not None:
        return tensors
    index = _Index(module)
    if not index.reusable:
        _known.pop(module, None)
        return named_tensors(module)
    _known[module] = index
    return index.tensors
