"""Writes what users of the package can rely on: ``python tools/record_surface.py`` into tests/surface.txt.

The file lists every public name with its signature, and what each pickled scheme contains. A change of
the file is a change that users can see. ``--print`` prints the record and leaves the file alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import aiosync
from aiosync import TLSConfig

RECORD = Path(__file__).resolve().parent.parent / "tests" / "surface.txt"

MODULES = (
    "aiosync",
    "aiosync.sync",
    "aiosync.sync.collectors",
    "aiosync.sync.updaters",
    "aiosync.collectors",
    "aiosync.updaters",
    "aiosync.metrics",
    "aiosync.ray",
)

SCHEMES: dict[str, dict[str, Any]] = {
    "SharedMemWeightSyncScheme": {},
    "MultiProcessWeightSyncScheme": {},
    "TCPWeightSyncScheme": {"address": "tcp://127.0.0.1:5000", "tls": TLSConfig()},
    "DistributedWeightSyncScheme": {"init_method": "tcp://127.0.0.1:5000"},
    "RPCWeightSyncScheme": {},
    "RayWeightSyncScheme": {},
    "RayModuleTransformScheme": {},
    "MemoryWeightSyncScheme": {},
    "NoWeightSyncScheme": {},
}


def surface() -> str:
    """The whole record."""
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines.append(f"# {name}")
        for exported in sorted(module.__all__):
            lines += _described(exported, getattr(module, exported))
        lines.append("")
    lines.append("# What a pickled scheme contains")
    for name, options in SCHEMES.items():
        lines.append(name)
        lines += _contents(getattr(aiosync, name)(**options).__getstate__(), "    ")
    return "\n".join(lines) + "\n"


def _described(name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        bases = [base for base in value.__mro__[1:] if _is_public(base)]
        inherits = f"  [{', '.join(base.__name__ for base in bases)}]" if bases else ""
        members = [
            member
            for member in sorted(dir(value))
            if not member.startswith("_") and not any(_inherits(value, member, base) for base in bases)
        ]
        return [f"{name}{_signature(value)}{inherits}", *(f"    {_member(value, each)}" for each in members)]
    return [_callable(name, value)] if callable(value) else [f"{name}: {type(value).__name__}"]


def _is_public(base: type) -> bool:
    return base is not object and not base.__name__.startswith("_") and hasattr(aiosync, base.__name__)


def _inherits(owner: type, member: str, base: type) -> bool:
    missing = object()
    return inspect.getattr_static(base, member, missing) is inspect.getattr_static(owner, member)


def _member(owner: type, name: str) -> str:
    value = inspect.getattr_static(owner, name)
    if isinstance(value, property):
        return f"{name} (property{', can be set' if value.fset is not None else ''})"
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {_callable(name, getattr(owner, name))}"
    return _callable(name, value) if inspect.isroutine(value) else name


def _callable(name: str, value: Any) -> str:
    asynchronous = inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)
    return f"{'async ' if asynchronous else ''}{name}{_signature(value)}"


def _signature(value: Any) -> str:
    """Names, kinds and defaults. Annotations are left out: they may name private types."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # of an exception that takes its arguments from BaseException, for one
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _contents(value: Any, indent: str) -> list[str]:
    """The keys and fields, each with its value if that is a plain one."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    lines = []
    for key, part in value.items():
        if dataclasses.is_dataclass(part) or (isinstance(part, dict) and part):
            lines += [f"{indent}{key}:", *_contents(part, indent + "    ")]
        elif part is None or isinstance(part, bool | int | float | str | dict | tuple):
            lines.append(f"{indent}{key} = {part!r}")
        else:
            lines.append(f"{indent}{key}: {'bytes' if isinstance(part, bytes) else 'an object'}")
    return lines


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        print(surface(), end="")
    else:
        RECORD.write_text(surface(), encoding="utf-8")
