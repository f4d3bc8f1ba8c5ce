"""For the reference of the documentation: links in docstrings, and lists of inherited members.

A griffe extension; see mkdocs.yml. Docstrings have Sphinx's roles (:meth:`connect`), which editors show. Here
they become links, if the reference has an entry of that name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import griffe

_logger = logging.getLogger("mkdocs.plugins.docs_roles")  # a strict build fails on its warnings

API = Path(__file__).resolve().parent.parent / "docs" / "api.md"

_ROLE = re.compile(r":(meth|class|func|attr|mod|data|exc|doc):`(~?)([\w.]+)`")
_ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def entries() -> list[str]:
    """Return the paths of the objects that the reference lists."""
    return _ENTRY.findall(API.read_text(encoding="utf-8"))


def public_members(cls: griffe.Class | griffe.Alias) -> dict[str, Any]:
    """Return the documented members of a class, inherited ones too."""
    return {
        name: member
        for name, member in cls.all_members.items()
        if not name.startswith("_") and not member.is_module and member.has_docstring
    }


class Roles(griffe.Extension):
    """Rewrites the docstrings once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._package = pkg
        self._known: dict[str, str] = {}  # canonical path -> the path that has the entry
        listed = [(path, self._get(path)) for path in entries()]
        for path, entry in listed:
            self._known[entry.canonical_path] = path
            members = self._exported(entry) if entry.is_module else {path: entry}
            for inner, member in members.items():
                self._known.setdefault(member.canonical_path, inner)
                if member.is_class:
                    for name, each in public_members(member).items():
                        self._known.setdefault(each.canonical_path, f"{inner}.{name}")
        self._classes = [
            (inner, member)
            for path, entry in listed
            for inner, member in (self._exported(entry) if entry.is_module else {path: entry}).items()
            if member.is_class
        ]
        done: set[int] = set()
        for owner in self._walk(pkg):
            if owner.docstring is not None and id(owner) not in done:
                done.add(id(owner))
                owner.docstring.value = _ROLE.sub(partial(self._link, owner), owner.docstring.value)
        for path, cls in self._classes:
            self._list_inherited(path, cls)

    def _get(self, path: str) -> Any:
        found: Any = self._package
        for part in path.split(".")[1:]:
            found = found[part]
        return found.final_target if found.is_alias else found

    def _exported(self, module: Any) -> dict[str, Any]:
        names = [str(name) for name in module.exports or ()]
        return {f"{module.path}.{name}": self._get(f"{module.path}.{name}") for name in names}

    def _walk(self, owner: Any) -> Iterator[Any]:
        yield owner
        for member in owner.members.values():
            if not member.is_alias:
                yield from self._walk(member)

    def _link(self, owner: Any, found: re.Match[str]) -> str:
        role, short, target = found.groups()
        name = target.rpartition(".")[2] if short or target.startswith("aiosync.") else target
        text = f"`{name}()`" if role in ("meth", "func") else f"`{name}`"
        try:
            path = self._find(owner, target)
        except KeyError:
            path = self._find_in_heirs(owner, target)
            if path is None and owner.canonical_path in self._known:
                _logger.warning("%s: its docstring names %s, which is not there", owner.path, found.group())
        return text if path is None else f"[{text}][{path}]"

    def _find(self, owner: Any, target: str) -> str | None:
        """Return the entry of an object; None: it has none, or is another package's.

        Raises:
            KeyError: there is no such object.
        """
        if target.startswith("aiosync."):
            try:
                return self._entry(self._get(target))
            except KeyError:
                head, _, member = target.rpartition(".")
                return self._entry(self._get(head).all_members[member])
        first, *rest = target.split(".")
        scope = owner
        while scope is not None:
            members = scope.all_members if scope.is_class else scope.members
            if first in members:
                found = members[first]
                try:
                    for part in rest:
                        found = (found.final_target if found.is_alias else found).all_members[part]
                    return self._entry(found)
                except griffe.AliasResolutionError:
                    return None
            scope = scope.parent
        raise KeyError(target)

    def _find_in_heirs(self, owner: Any, target: str) -> str | None:
        """Find a member that the class of a docstring gets from its public subclasses."""
        for _, heir in self._classes:
            if owner.parent is not None and owner.parent.path in {base.path for base in heir.mro()}:
                member = heir.all_members.get(target)
                if member is not None and (entry := self._entry(member)) is not None:
                    return entry
        return None

    def _entry(self, found: Any) -> str | None:
        try:
            return self._known.get(found.canonical_path)
        except griffe.AliasResolutionError:
            return None

    def _list_inherited(self, path: str, cls: Any) -> None:
        """List what a class has from classes that have an entry of their own."""
        inherited: dict[str, list[str]] = {}
        for name, member in public_members(cls).items():
            link = self._known[member.canonical_path]
            owner = link.rpartition(".")[0]
            if owner != path:
                call = "()" if member.is_function else ""
                inherited.setdefault(owner, []).append(f"[`{name}{call}`][{link}]")
        if inherited and cls.docstring is not None:
            lines = [
                f"Inherited from [`{entry.rpartition('.')[2]}`][{entry}]: {', '.join(members)}."
                for entry, members in inherited.items()
            ]
            cls.docstring.value += "\n\n" + "\n\n".join(lines)
