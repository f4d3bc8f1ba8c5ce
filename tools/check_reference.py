"""Compare the built documentation with the package: ``python tools/check_reference.py SITE``.

Every name in ``__all__`` of the public modules has an entry. So has every public member of every public
class: its own, or one of the class that it comes from.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = (
    "aiosync",
    "aiosync.collectors",
    "aiosync.errors",
    "aiosync.integrations.asgi",
    "aiosync.metrics",
    "aiosync.timeline",
    "aiosync.updaters",
)

_ANCHOR = re.compile(r'\bid="(aiosync[\w.]*)"')
_ROLE = re.compile(r":(?:meth|class|func|attr|mod|data|exc):")


def public() -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of each public name."""
    for name in MODULES:
        module = importlib.import_module(name)
        for member in module.__all__:
            found = getattr(module, member)
            if not member.startswith("__") and (inspect.isclass(found) or inspect.isroutine(found)):
                yield f"{name}.{member}", found


def problems(page: str) -> Iterator[str]:
    """Yield what the page of the reference lacks."""
    anchors = set(_ANCHOR.findall(page))
    known = dict(public())
    # By identity: a name may be in several modules, and a member in several classes.
    described = {id(found) for path, found in known.items() if path in anchors}
    classes = {path: found for path, found in known.items() if inspect.isclass(found)}
    described |= {
        id(member)
        for path, cls in classes.items()
        for name, member in _members(cls)
        if f"{path}.{name}" in anchors
    }
    yield from (f"{path} has no entry" for path, found in known.items() if id(found) not in described)
    for path, cls in classes.items():
        yield from (
            f"{path}.{name} has no entry" for name, each in _members(cls) if id(each) not in described
        )
    for role in sorted(set(_ROLE.findall(page))):
        yield f"{role}: a role that is not rendered"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that aiosync defines and describes."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("aiosync"):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if (inspect.isroutine(member) or isinstance(member, property)) and member.__doc__:
            yield name, member


def main() -> None:
    """Check the site in the folder of the command line."""
    page = (Path(sys.argv[1]) / "api" / "index.html").read_text(encoding="utf-8")
    found = list(problems(page))
    for each in found:
        print(each)
    if found:
        raise SystemExit(f"the reference lacks {len(found)} entries: see docs/api.md and tools/docs_roles.py")


if __name__ == "__main__":
    main()
