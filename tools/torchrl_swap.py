"""Puts aiosync's blocking twins in the place of torchrl's schemes, in the process that calls :func:`install`.

The swap happens as soon as ``torchrl.weight_update`` has been imported, before any other module can import a
name from it. So each of these gives the twin, in test modules and in torchrl's collectors, which make default
schemes by these names: ``from torchrl.weight_update import X``, ``from torchrl.weight_update._shared import
X``, ``torchrl.weight_update.X``, ``WeightSyncScheme.from_backend(name)``.

Not swapped: ``WeightSyncScheme``, the base class, which counts the twins as its own; strategies; transports.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "torchrl.weight_update"

_KEPT = {
    # The server makes no scheme. It asks isinstance(scheme, SharedMemWeightSyncScheme), to know whether
    # updates arrive without a call. All twins are registered with torchrl's class, as such.
    "torchrl.modules.inference_server._server": "SharedMemWeightSyncScheme",
    # Here only the publication from learner ranks uses the name, and it calls private methods of the scheme.
    # The collector imports its default scheme in a function: that one is a twin.
    "torchrl.collectors.distributed.ray": "RayWeightSyncScheme",
}
"""module -> the name that keeps meaning torchrl's own class there."""

_originals: dict[str, type] = {}
"""torchrl's own classes, by name."""


def install() -> None:
    """Swap the schemes now if torchrl has been imported, else when it is imported; idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if _PACKAGE in sys.modules:
        _swap_all()
        for name in _KEPT.keys() & sys.modules.keys():
            _keep(sys.modules[name])


def _twins() -> dict[str, type]:
    """Name -> twin, for each scheme that both libraries have under this name."""
    sync: Any = importlib.import_module("aiosync.sync")
    return {
        name: getattr(sync, name)
        for name in sync.__all__
        if name.endswith("Scheme") and name != "WeightSyncScheme" and hasattr(sys.modules[_PACKAGE], name)
    }


def _swap_all(_: ModuleType | None = None) -> None:
    if _originals:
        return
    # The adapter registers the twins with torchrl's own classes, so it is imported while these are in place.
    importlib.import_module("aiosync.compat.torchrl")
    twins = _twins()
    _originals.update({name: getattr(sys.modules[_PACKAGE], name) for name in twins})
    for module in [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "torchrl"]:
        for name, twin in twins.items():
            if vars(module).get(name) is _originals[name]:
                setattr(module, name, twin)
    schemes: Any = importlib.import_module(f"{_PACKAGE}.weight_sync_schemes")
    by_backend = getattr(schemes, "_WEIGHT_SYNC_SCHEMES", {})
    for backend, scheme in list(by_backend.items()):
        if scheme in _originals.values():
            by_backend[backend] = twins[scheme.__name__]


def _keep(module: ModuleType) -> None:
    name = _KEPT[module.__name__]
    if name in vars(module):
        setattr(module, name, _originals[name])


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {_PACKAGE: _swap_all, **dict.fromkeys(_KEPT, _keep)}


class _Finder(MetaPathFinder):
    """Finds the modules of ``_AFTER_IMPORT`` as the other finders do; they are changed after their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _AFTER_IMPORT:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _AFTER_IMPORT[module.__name__](module)
