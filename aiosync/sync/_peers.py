"""Libraries with schemes of their own, which the twins are to count as, as soon as they are there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["watch"]


def watch(peer: str, compat: str) -> None:
    """Import ``compat``, which brings the two together, when ``peer`` is imported; now if it has been."""
    if peer in sys.modules:
        importlib.import_module(compat)
    else:
        sys.meta_path.insert(0, _Watch(peer, compat))


class _Watch(MetaPathFinder):
    """Waits for one import."""

    def __init__(self, peer: str, compat: str) -> None:
        self._peer = peer
        self._compat = compat

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the others find it, with a loader that tells us."""
        if fullname != self._peer:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._compat)
        return spec


class _Telling(Loader):
    """Loads as another does, and then says so."""

    def __init__(self, loader: Loader, compat: str) -> None:
        self._loader = loader
        self._compat = compat

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other does, whose module it is from now on."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        importlib.import_module(self._compat)
