"""What import statements change in an interpreter outside aiosync: run in a fresh one, by itself.

``python -W ignore -m tests.kit.outside`` reads ``{"first": [...], "then": [[...], ...]}`` from its standard
input. It runs the statements ``first``, then each list of ``then``, and prints what each list has changed.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from types import ModuleType
from typing import Any

__all__: list[str] = []

CACHES = {
    "sys.modules": "compared by itself",
    "sys.path_importer_cache": "the import system's own",
    "re._cache": "compiled expressions, those of whatever module",
    "msgspec._core._struct_lookup_cache": "one entry for each class of messages",
    "typing._overload_registry": "what typing.overload decorates, by its module",
}
"""Containers that every program fills, each with what fills it."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


def _run(statements: list[str]) -> None:
    """Those that work: optional dependencies may be missing."""
    for statement in statements:
        with suppress(ImportError):
            exec(statement, {})


def _settings() -> dict[str, Any]:
    """Settings of the process that are no module's attribute."""
    torch: Any = sys.modules["torch"]
    return {
        "sys.getswitchinterval": sys.getswitchinterval(),
        "sys.getrecursionlimit": sys.getrecursionlimit(),
        "sys.gettrace": sys.gettrace(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "signal.set_wakeup_fd": _wakeup_descriptor(),
        "warnings.filters": list(warnings.filters),
        "os.environ": dict(os.environ),
        "the working directory": os.getcwd(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)),
        "the start method": multiprocessing.get_start_method(allow_none=True),
        "the forkserver": vars(forkserver._forkserver).copy(),
        "the event loop policy": asyncio.get_event_loop_policy(),
        "threads": threading.enumerate(),
        "descriptors": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
        "the root logger": (logging.root.level, list(logging.root.handlers), list(logging.root.filters)),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device()),
    }


def _wakeup_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


def _attributes() -> dict[str, dict[str, Any]]:
    """The attributes of modules and of their classes, and the contents of modules' containers."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "aiosync":
            found.update(_parts(name, module))
    return found


def _parts(name: str, module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    attributes = dict(vars(module))
    yield name, attributes
    for key, value in attributes.items():
        if type(value) in _CONTAINERS and f"{name}.{key}" not in CACHES:
            yield f"{name}.{key}", dict(_items(value))
        # Not isinstance: torch's deprecated names warn when their __class__ is read.
        elif issubclass(type(value), type) and value.__module__ == name:
            yield f"class {name}.{key}", dict(vars(value))


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    """Contents: of a list by position, else by the key or by which object it is."""
    for index, item in enumerate(container):
        key = index if isinstance(container, list) else item if isinstance(item, str) else id(item)
        yield f"[{key}]", container[item] if isinstance(container, dict) else item


def _differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What is another object than it was, or new, or gone; new submodules are no change."""
    missing = object()
    for where, then in before.items():
        now = after.get(where, {})
        for key in then.keys() | now.keys():
            if then.get(key, missing) is not now.get(key, missing) and f"{where}.{key}" not in sys.modules:
                yield f"{where} {key}"


def _record_callbacks(into: list[str]) -> None:
    """Note which modules register callbacks for the rest of the process; the process has no list of them."""

    def recording(register: Callable[..., Any], name: str) -> Callable[..., Any]:
        def record(*args: Any, **keywords: Any) -> Any:
            into.append(f"{sys._getframe(1).f_globals['__name__']}: {name}")
            return register(*args, **keywords)

        return record

    os.register_at_fork = recording(os.register_at_fork, "os.register_at_fork")
    atexit.register = recording(atexit.register, "atexit.register")


def _changed_by(statements: list[str], callbacks: list[str]) -> dict[str, list[str]]:
    callbacks.clear()
    known, settings, attributes = set(sys.modules), _settings(), _attributes()
    _run(statements)
    changed = [key for key, value in _settings().items() if value != settings[key]]
    changed += _differences(attributes, _attributes())
    new = sorted(name for name in set(sys.modules) - known)
    return {"changed": sorted(changed), "new modules": new, "callbacks": sorted(callbacks)}


def main() -> None:
    """See the module's docstring."""
    work = json.load(sys.stdin)
    _run(work["first"])
    callbacks: list[str] = []
    _record_callbacks(callbacks)
    json.dump([_changed_by(statements, callbacks) for statements in work["then"]], sys.stdout)


if __name__ == "__main__":
    main()
