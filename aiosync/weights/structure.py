"""What a module is built of, and whether that has changed since it was looked at."""

from __future__ import annotations

from operator import is_
from typing import Any

from tensordict import TensorDictBase
from torch import nn

__all__ = ["Structure"]


class Structure:
    """The parameters, buffers and submodules that a module had when this was made.

    Walking a model of two thousand tensors takes milliseconds. :meth:`unchanged` takes a tenth of that.

    Args:
        module: the module.

    Attributes:
        comparable: whether :meth:`unchanged` can tell. It cannot for a TensorDict of parameters, which has
            no registries.
    """

    def __init__(self, module: nn.Module) -> None:
        self.comparable = True
        self._registries: list[tuple[dict[str, Any], list[str], list[Any]]] = []
        self._empty: list[dict[str, Any]] = []
        for part in module.modules():
            if isinstance(part, TensorDictBase):
                self.comparable = False
                return
            # TorchScript's registries have the methods of a dict, but cannot be iterated over.
            for registry in (part._parameters, part._buffers, part._modules):
                if len(registry):
                    self._registries.append((registry, list(registry.keys()), list(registry.values())))
                else:
                    self._empty.append(registry)

    def unchanged(self) -> bool:
        """Whether the module has the same objects under the same names, and no others.

        A tensor whose ``.data`` was replaced is the same object.
        """
        if not self.comparable:
            return False
        for registry, names, parts in self._registries:
            if list(registry.keys()) != names or not all(map(is_, registry.values(), parts)):
                return False
        return not any(map(len, self._empty))
