"""Imports tensordict, and leaves torch's compiler until it is used.

tensordict tells the compiler of some of its functions as it is imported, and that imports the compiler: most
of the time that it takes, in every worker, though few compile anything. Here what it tells is kept until
something imports the compiler, as ``torch.compile`` and the first optimizer do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch.compiler

from aiosync._imports import when_imported

__all__: list[str] = []

_Tell: TypeAlias = Callable[[Any], Any]

_COMPILER = "torch._dynamo"
_TELLS = ("allow_in_graph", "assume_constant_result")
"""Functions of :mod:`torch.compiler` that give back what they are given."""


def _import_tensordict() -> None:
    told: list[tuple[_Tell, Any]] = []

    def later(tell: _Tell) -> _Tell:
        def keep(function: Any) -> Any:
            if _COMPILER in sys.modules:
                return tell(function)
            told.append((tell, function))
            return function

        return keep

    def now() -> None:
        for tell, function in told:
            tell(function)
        told.clear()

    when_imported(_COMPILER, now)
    tells = {name: getattr(torch.compiler, name) for name in _TELLS}
    for name, tell in tells.items():
        setattr(torch.compiler, name, later(tell))
    try:
        import_module("tensordict.nn")
    finally:
        for name, tell in tells.items():
            setattr(torch.compiler, name, tell)


if "tensordict" not in sys.modules and _COMPILER not in sys.modules:
    _import_tensordict()
