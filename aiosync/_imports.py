"""Call a function once another module has been imported, by any code at any time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeAlias

__all__ = ["when_imported"]

_Then: TypeAlias = Callable[[], object]


def when_imported(name: str, then: _Then) -> None:
    """Call ``then`` when the module ``name`` has been imported; now if it has been."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder):
    """Waits for one import."""

    def __init__(self, name: str, then: _Then) -> None:
        self._name = name
        self._then = then
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the others find it, with a loader that tells us."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        # Not when it is looked for: some only ask whether there is such a module, and an import can fail.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


class _Telling(Loader):
    """Loads as another does, and then says so."""

    def __init__(self, loader: Loader, then: _Then) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other does, whose module it is from now on."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
