"""Compares aiosync's public names with those of torchrl: ``python tools/parity.py [--check]``.

Every public name of torchrl's ``weight_update`` package, multi-process collectors and weight updaters gets a
row in the table of docs/migration.md: its arguments and defaults, ours, and whether ours are the same, wider
or different. A difference needs its reason in tools/parity.toml. A name that torchrl defines in a base class
has one row, with the base class; a subclass gets a row of its own only if something differs there.

With ``--check`` nothing is written. The exit status is 1 if a difference has no reason, if a reason has no
difference, or if the table in the documentation is another one.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import inspect
import sys
import textwrap
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from inspect import Parameter, getattr_static
from pathlib import Path
from typing import Any

import aiosync
from aiosync.collectors.config import CollectorConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "migration.md"
REASONS = Path(__file__).with_suffix(".toml")
BEGIN = "<!-- made by tools/parity.py: do not edit -->"
END = "<!-- end of what tools/parity.py made -->"

GROUPS = (
    ("torchrl.weight_update", None),
    (
        "torchrl.collectors",
        ["BaseCollector", "MultiCollector", "MultiSyncCollector", "MultiAsyncCollector"],
    ),
    (
        "torchrl.collectors.weight_update",
        [
            "WeightUpdaterBase",
            "VanillaWeightUpdater",
            "MultiProcessedWeightUpdater",
            "RemoteModuleWeightUpdater",
            "RayWeightUpdater",
        ],
    ),
    ("torchrl.collectors.distributed", ["DistributedWeightUpdater", "RPCWeightUpdater"]),
)
"""torchrl's modules, and the names in them; None: all that the module exports."""

HOMES = ("aiosync.sync", "aiosync.sync.collectors", "aiosync.sync.updaters", "aiosync")
"""Where the name is looked for in aiosync: the blocking classes first, because torchrl's block."""

CATCH_ALL = {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL}

RENAMED = {
    "TransportBackend": "Transport",
    "InitialSyncTransport": "Transport",
    "BaseCollector": "MultiCollector",
}


@dataclass(frozen=True)
class Row:
    """One name of torchrl, or one argument of a constructor."""

    key: str  # "MultiCollector.reset", "MultiCollector(device)"
    theirs: str
    ours: str
    differences: tuple[str, ...]  # empty: ours accept what torchrl's accept
    wider: bool = False  # ours accept more


# -- reading torchrl and aiosync ------------------------------------------------------------------------


def counterpart(name: str) -> Any:
    """Return aiosync's object of torchrl's name; None if there is none."""
    name = RENAMED.get(name, name)
    found = (getattr(importlib.import_module(home), name, None) for home in HOMES)
    return next((each for each in found if each is not None), None)


def parameters(cls: type, name: str) -> dict[str, Parameter]:
    """Return the named parameters of a method, and those that it takes by ``**kwargs``.

    The latter are those of the base class's method. torchrl also hides the arguments of
    ``init_on_sender(**kwargs)`` in ``_init_on_sender_impl``, aiosync those of a collector in the dataclasses
    of its configuration.
    """
    method = unwrapped(getattr_static(cls, name))
    every = dict(inspect.signature(method).parameters)
    kinds = {each.kind for each in every.values()}
    found = {each.name: each for each in every.values() if each.kind not in CATCH_ALL}
    found.pop("self", None)
    found.pop("cls", None)
    if not kinds & CATCH_ALL:
        return found
    if {"config", "options"} <= every.keys():
        return found | option_parameters()
    inner = behind(cls, name)
    if Parameter.VAR_POSITIONAL not in kinds:
        inner = {each: p.replace(kind=p.KEYWORD_ONLY) for each, p in inner.items()}
    return found | {each: p for each, p in inner.items() if each not in found}


def behind(cls: type, name: str) -> dict[str, Parameter]:
    """Return the parameters of the method that gets the ``*args`` and ``**kwargs`` of another one."""
    hidden = getattr_static(cls, f"_{name}_impl", None)
    if hidden is not None:
        read = {each: keyword_only(each) for each in read_from_kwargs(hidden)}
        return read | parameters(cls, f"_{name}_impl")
    source = next(each for each in cls.__mro__ if name in vars(each))
    base = next((each for each in source.__mro__[1:] if name in vars(each) and each is not object), None)
    return {} if base is None else parameters(base, name)


def unwrapped(found: Any) -> Any:
    """Return the function of a method, static method or class method, without decorators."""
    return inspect.unwrap(found.__func__ if isinstance(found, staticmethod | classmethod) else found)


def keyword_only(name: str, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default)


def option_parameters() -> dict[str, Parameter]:
    """Return the options of a collector as keyword parameters."""
    groups = CollectorConfig()
    found = {}
    for group in (getattr(groups, each.name) for each in fields(groups)):
        assert is_dataclass(group)
        for each in fields(group):
            assert each.default is not MISSING
            found[each.name] = keyword_only(each.name, each.default)
    return found


def read_from_kwargs(function: Any) -> Iterator[str]:
    """Yield the names that a function reads by ``kwargs.get("name")``."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get" | "pop"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def members(cls: type) -> list[str]:
    """Return the public names of a class, without those that every class or module has."""
    common = set(dir(object)) | set(dir(typing.Protocol))
    return [name for name in dir(cls) if not name.startswith("_") and name not in common]


# -- comparing --------------------------------------------------------------------------------------------


def shown(parameter: Parameter) -> str:
    """Return a parameter as it stands in a signature, without its type."""
    if parameter.default is Parameter.empty:
        return parameter.name
    return f"{parameter.name}={value(parameter.default)}"


def value(default: Any) -> str:
    return str(default) if "InteractionType" in type(default).__name__ else repr(default)


def signature(found: dict[str, Parameter]) -> str:
    """Return parameters as a signature, without types."""
    parts, star = [], False
    for each in found.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        parts.append(shown(each))
    return f"({', '.join(parts)})"


def differences(theirs: dict[str, Parameter], ours: dict[str, Parameter]) -> list[str]:
    """Return what a call of torchrl's signature may not do with ours."""
    found = []
    positions = [name for name, each in ours.items() if each.kind is not each.KEYWORD_ONLY]
    place = 0
    for name, each in theirs.items():
        mine = ours.get(name)
        if mine is None:
            found.append(f"no `{name}`")
            continue
        if each.default is not Parameter.empty and mine.default is Parameter.empty:
            found.append(f"`{name}` must be given")
        elif each.default is not Parameter.empty and value(each.default) != value(mine.default):
            found.append(f"`{name}` is {value(mine.default)} by default")
        if each.kind is not each.KEYWORD_ONLY:
            if place >= len(positions) or positions[place] != name:
                found.append(f"`{name}` is not positional argument {place + 1}")
            place += 1
    required = [name for name, each in ours.items() if each.default is Parameter.empty and name not in theirs]
    return found + [f"`{name}` must be given" for name in required]


def rows_of(name: str, theirs: Any, ours: Any) -> Iterator[Row]:
    """Compare one name that torchrl exports."""
    if not inspect.isclass(theirs):
        backends = typing.get_args(theirs)
        missing = [each for each in backends if each not in aiosync.WeightSyncScheme._registry]
        taken = f"`from_backend` takes {', '.join(sorted(aiosync.WeightSyncScheme._registry))}"
        yield Row(name, ", ".join(backends), taken, tuple(f"no `{each}`" for each in missing), wider=True)
        return
    if ours is None:
        yield Row(name, "a class", "none", ("no such class",))
        return
    if "__init__" in vars(theirs) and not getattr(theirs, "_is_protocol", False):
        yield from constructor_rows(name, parameters(theirs, "__init__"), parameters(ours, "__init__"))
    for member in members(theirs):
        yield member_row(name, member, theirs, ours)


def constructor_rows(name: str, theirs: dict[str, Parameter], ours: dict[str, Parameter]) -> Iterator[Row]:
    """Compare constructors, one argument after the other."""
    found = differences(theirs, ours)
    for each in theirs.values():
        mine = ours.get(each.name)
        own = tuple(text for text in found if f"`{each.name}`" in text)
        yield Row(f"{name}({each.name})", shown(each), shown(mine) if mine else "none", own)
    more = [each for each in ours if each not in theirs]
    if more:
        needed = tuple(text for text in found if any(f"`{each}`" in text for each in more))
        yield Row(f"{name}(...)", "", ", ".join(shown(ours[each]) for each in more), needed, wider=True)


def member_row(name: str, member: str, theirs: type, ours: type) -> Row:
    """Compare a method, property or class attribute."""
    key, static = f"{name}.{member}", getattr_static(theirs, member)
    is_method = inspect.isroutine(unwrapped(static))
    expected = parameters(theirs, member) if is_method else {}
    described = signature(expected) if is_method else "an attribute"
    mine = getattr_static(ours, member, None)
    shows_options = {"config", "options"} <= inspect.signature(ours).parameters.keys()
    if mine is None and shows_options and member in option_parameters():
        return Row(key, described, "an attribute", ())
    if mine is None and member not in getattr(ours, "__annotations__", {}):
        return Row(key, described, "none", (f"no `{member}`",))
    if not is_method or not inspect.isroutine(unwrapped(mine)):
        kinds = is_method == inspect.isroutine(unwrapped(mine))
        other = "a method" if inspect.isroutine(unwrapped(mine)) else "an attribute"
        return Row(key, described, other, () if kinds else (f"{other}",))
    found = parameters(ours, member)
    wider = any(each not in expected for each in found)
    return Row(key, described, signature(found), tuple(differences(expected, found)), wider)


def compare() -> Iterator[tuple[str, list[Row]]]:
    """Yield torchrl's names with their rows. A subclass has only the rows that no base class has."""
    said: dict[str, set[Row]] = {}
    for module_name, chosen in GROUPS:
        module = importlib.import_module(module_name)
        for name in chosen or module.__all__:
            theirs = getattr(module, name)
            rows = list(rows_of(name, theirs, counterpart(name)))
            bases = [base.__name__ for base in getattr(theirs, "__mro__", ())[1:]]
            inherited = set().union(*(said.get(base, set()) for base in bases))
            said[name] = {replace(row, key=row.key.removeprefix(name)) for row in rows}
            yield name, [row for row in rows if replace(row, key=row.key.removeprefix(name)) not in inherited]


# -- the table ----------------------------------------------------------------------------------------------


def reasons() -> dict[str, str]:
    """Return pattern of a row's key -> why ours is different."""
    return {pattern: " ".join(why.split()) for pattern, why in tomllib.loads(REASONS.read_text()).items()}


def table(compared: list[tuple[str, list[Row]]], why: dict[str, str]) -> str:
    """Return the tables in Markdown, one per class of torchrl."""
    parts = []
    for name, rows in compared:
        if not rows:
            continue
        parts.append(f"\n### {name}\n\n| torchrl {version('torchrl')} | aiosync | |\n|---|---|---|")
        for row in rows:
            reason = next((text for pattern, text in why.items() if matches(row, pattern)), "")
            verdict = f"different: {reason}" if row.differences else "wider" if row.wider else "same"
            label = row.key.removeprefix(f"{name}.").removeprefix(name) or name
            cells = f"{label}{row.theirs}" if row.theirs.startswith("(") else row.theirs
            theirs = f"`{cells}`" if row.theirs.startswith("(") or label.startswith("(") else f"`{label}`"
            theirs = "" if not row.theirs else theirs
            ours = row.ours if " " in row.ours and not row.ours.startswith("(") else f"`{row.ours}`"
            parts.append(f"| {theirs} | {ours} | {verdict} |")
    return "\n".join(parts) + "\n"


def matches(row: Row, pattern: str) -> bool:
    return bool(row.differences) and fnmatch.fnmatchcase(row.key, pattern)


def main(arguments: list[str]) -> int:
    """Write the table or check it."""
    check = arguments == ["--check"]
    if arguments and not check:
        print(f"expected no argument or --check, got {' '.join(arguments)}")
        return 2
    why, compared = reasons(), list(compare())
    rows = [row for _, found in compared for row in found]
    unexplained = [row for row in rows if row.differences and not any(matches(row, each) for each in why)]
    for row in unexplained:
        print(f"{row.key}: {'; '.join(row.differences)}: mend it, or say why in {REASONS.name}")
    stale = [pattern for pattern in why if not any(matches(row, pattern) for row in rows)]
    for pattern in stale:
        print(f"{pattern}: nothing is different there: remove it from {REASONS.name}")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    made = f"{before}{BEGIN}\n{table(compared, why)}\n{END}{rest.split(END)[1]}"
    if check and made != page:
        print(f"{PAGE.name} has another table: run python tools/parity.py")
    elif not check:
        PAGE.write_text(made)
    same = sum(not row.differences for row in rows)
    print(f"{len(rows)} names and arguments of torchrl: {same} same or wider, {len(rows) - same} different")
    return 1 if unexplained or stale or (check and made != page) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
