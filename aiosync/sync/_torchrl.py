"""Registers the blocking twins with torchrl when a program that has imported torchrl uses them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Self

__all__ = ["KnownToTorchrl"]


class KnownToTorchrl:
    """Makes ``isinstance(twin, torchrl.weight_update.WeightSyncScheme)`` true, in either order of import.

    torchrl's classes are abstract base classes, and ``isinstance`` of such a class reads the instance's
    ``__class__`` first. The first read after torchrl's import registers the twins. Importing
    :mod:`aiosync.sync` registers nothing, because an import of aiosync changes no other library.
    """

    @property  # type: ignore[misc] # object's can be assigned
    def __class__(self) -> type[Self]:
        if "torchrl.weight_update" in sys.modules:
            import_module("aiosync.compat.torchrl")
        return type(self)
