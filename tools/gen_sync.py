"""Writes the blocking twins from the asyncio classes: ``python tools/gen_sync.py [--check]``.

Each public method of an asyncio class becomes a method of the same name, signature, types and docstring,
whose body is one line that hands the call on. A method is left out if the twin's base class has the same
one: same arguments, no docstring of its own. A class joins by one line in TWINS. The imports of a file are
those of the names that its signatures use, as the asyncio classes' own modules import them. ruff sorts the
imports and formats the file.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import aiosync
from aiosync import collectors, updaters
from aiosync.schemes import distributed
from aiosync.updaters import remote

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "aiosync" / "sync"

TWINS: list[type[Any]] = [
    aiosync.WeightSyncScheme,
    aiosync.SharedMemWeightSyncScheme,
    aiosync.MultiProcessWeightSyncScheme,
    aiosync.TCPWeightSyncScheme,
    distributed.ProcessGroupScheme,
    aiosync.DistributedWeightSyncScheme,
    aiosync.RPCWeightSyncScheme,
    aiosync.RayWeightSyncScheme,
    aiosync.RayModuleTransformScheme,
    aiosync.NoWeightSyncScheme,
    aiosync.MemoryWeightSyncScheme,
]
"""Each after its base class. The twins inherit from each other as the asyncio classes do."""

UPDATER_TWINS: list[type[Any]] = [
    updaters.WeightUpdaterBase,
    updaters.VanillaWeightUpdater,
    updaters.MultiProcessedWeightUpdater,
    updaters.RemoteModuleWeightUpdater,
    remote.RemoteCollectorsUpdater,
    updaters.RayWeightUpdater,
    updaters.RPCWeightUpdater,
    updaters.DistributedWeightUpdater,
]

COLLECTOR_TWINS: list[type[Any]] = [
    collectors.MultiCollector,
    collectors.MultiSyncCollector,
    collectors.MultiAsyncCollector,
    collectors.Collector,
]

BY_HAND = {"connect", "receiving", "pinned", "from_backend", "pause"}
"""Methods that hand the call to the twin's ``_blocking_<name>``."""

REBINDING = {"model", "context"}
"""Properties whose setter may have to wait for the loop."""

OTHERS_CALL = {"_set_transform"}
"""Methods with a leading underscore that are other libraries' to call."""

ENDPOINTS = {"get_sender", "get_receiver", "create_sender", "create_receiver"}
LEFT_OUT = {"aclose", "shutdown", "async_shutdown", "iterator", *ENDPOINTS}
"""Methods that the twin has under another name, or from its base class, written by hand."""

RETURNS = {
    "receiving": "AbstractContextManager[None]",
    "pinned": "AbstractContextManager[int]",
    "from_backend": "Any",
    "pause": "AbstractContextManager[None]",
}

OWN_NAMES = {
    "AbstractContextManager": "from contextlib import AbstractContextManager",
    "Any": "from typing import Any",
    "BlockingCollector": "from aiosync.sync._bases import BlockingCollector",
    "BlockingTwin": "from aiosync.sync._twin import BlockingTwin",
    "ClassVar": "from typing import ClassVar",
    "InlineHooks": "from aiosync.sync._bases import InlineHooks",
    "aiosync": "import aiosync",
    "distributed": "from aiosync.schemes import distributed",
    "collectors": "from aiosync import collectors",
    "portal": "from aiosync.sync._portal import portal",
    "remote": "from aiosync.updaters import remote",
    "run_inline": "from aiosync.sync._bases import run_inline",
    "updaters": "from aiosync import updaters",
}
"""The names that the generator itself writes -> the statement that imports each."""


def blocking_words(text: str) -> str:
    """A docstring of a coroutine, said of a blocking call."""
    text = text.replace("async with", "with").replace("async for", "for")
    text = re.sub(r"\bawait ", "", text)
    return text.replace("aclose()", "close()").replace(":meth:`aclose`", ":meth:`close`")


def docstring(function: FunctionType, indent: str) -> str:
    """The function's docstring as source; nothing for an override that inherits it."""
    if not function.__doc__:
        return ""
    text = blocking_words(inspect.getdoc(function) or "")
    body = textwrap.indent(text, indent).strip()
    end = f"\n{indent}" if "\n" in body else ""
    return f'{indent}"""{body}{end}"""\n'


def definition(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function's syntax tree."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def handed_on(arguments: ast.arguments) -> str:
    """The call's arguments: each parameter under its own name."""
    passed = [a.arg for a in (arguments.posonlyargs + arguments.args)[1:]]
    if arguments.vararg:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs]
    if arguments.kwarg:
        passed.append(f"**{arguments.kwarg.arg}")
    return ", ".join(passed)


def method(name: str, raw: object, target: str = "_async") -> str:
    """One method of a twin. ``target``: the attribute that has the asyncio object for coroutines."""
    function = raw.__func__ if isinstance(raw, classmethod) else raw
    assert isinstance(function, FunctionType)
    function = inspect.unwrap(function)
    node = definition(function)
    returns = RETURNS.get(name) or (ast.unparse(node.returns) if node.returns else "None")
    passed = handed_on(node.args)
    if name in BY_HAND:
        owner = "cls" if isinstance(raw, classmethod) else "self"
        call = f"{owner}._blocking_{name}({passed})"
    elif isinstance(node, ast.AsyncFunctionDef):
        how = "send" if name in ("send", "wait_ack") else "call"
        call = f"portal().{how}(self.{target}.{name}{', ' if passed else ''}{passed})"
    else:
        call = f"self._async.{name}({passed})"
    decorator = "    @classmethod\n" if isinstance(raw, classmethod) else ""
    line = call if returns == "None" else f"return {call}"
    head = f"    def {name}({ast.unparse(node.args)}) -> {returns}:\n"
    return decorator + head + docstring(function, " " * 8) + f"        {line}\n"


def accessor(name: str, prop: property) -> str:
    """One property of a twin, with its setter if there is one."""
    assert isinstance(prop.fget, FunctionType)
    node = definition(prop.fget)
    returns = ast.unparse(node.returns) if node.returns else "Any"
    text = f"    @property\n    def {name}(self) -> {returns}:\n"
    text += docstring(prop.fget, " " * 8) + f"        return self._async.{name}\n"
    if isinstance(prop.fset, FunctionType):
        setter = definition(prop.fset)
        value = setter.args.args[1].arg
        text += f"\n    @{name}.setter\n    def {name}({ast.unparse(setter.args)}) -> None:\n"
        rebinds = name in REBINDING
        text += f"        self.{f'_rebind({name}={value})' if rebinds else f'_async.{name} = {value}'}\n"
    return text


def base_of(cls: type[Any], twins: list[type[Any]]) -> type[Any] | None:
    """The nearest base class that has a twin."""
    return next((base for base in cls.__mro__[1:] if base in twins), None)


def members(cls: type[Any], base: type[Any] | None) -> dict[str, object]:
    """The public members that the class defines, and those of its base classes without a twin."""
    inherited = set(base.__mro__) if base else set()
    owners = [owner for owner in reversed(cls.__mro__) if owner not in inherited]
    found = {
        name: member
        for owner in owners
        if owner.__module__.startswith("aiosync.")
        for name, member in vars(owner).items()
        if (not name.startswith("_") or name in OTHERS_CALL)
        and name not in LEFT_OUT
        and isinstance(member, FunctionType | classmethod | property)
    }
    return {name: each for name, each in found.items() if base is None or not repeats(each, name, base)}


def repeats(member: object, name: str, base: type[Any]) -> bool:
    """Whether the twin's method would be the one of its base class."""
    inherited = inspect.getattr_static(base, name, None)
    if isinstance(member, property) and isinstance(inherited, property):
        member, inherited = member.fget, inherited.fget
    if not isinstance(member, FunctionType) or not isinstance(inherited, FunctionType) or member.__doc__:
        return False
    own, others = definition(member), definition(inherited)
    same = ast.unparse(own.returns or own.args) == ast.unparse(others.returns or others.args)
    return type(own) is type(others) and same and ast.dump(own.args) == ast.dump(others.args)


def module_of(cls: type[Any]) -> str:
    """The module that users import the class from."""
    packages = (aiosync, collectors, updaters)
    return next((each.__name__ for each in packages if cls.__name__ in each.__all__), cls.__module__)


def name_here(cls: type[Any]) -> str:
    """The asyncio class's name in the generated file, such as ``updaters.RayWeightUpdater``."""
    return f"{module_of(cls).rpartition('.')[2]}.{cls.__name__}"


def class_head(cls: type[Any], *bases: str) -> str:
    """The class statement, and a short docstring. `document()` adds the asyncio class's at import."""
    doc = f"The blocking twin of :class:`{module_of(cls)}.{cls.__name__}`: same arguments, same methods."
    doc = textwrap.fill(doc, 102)
    paragraph = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    summary = re.match(r".+?[.:](?=\s|$)", paragraph)
    if summary:
        doc += "\n\n" + textwrap.fill(summary[0].removesuffix(":").removesuffix(".") + ".", 102)
    doc = textwrap.indent(blocking_words(doc), "    ").strip()
    end = "\n    " if "\n" in doc else ""
    return f'class {cls.__name__}({", ".join(bases)}):\n    """{doc}{end}"""\n'


def twin(cls: type[Any], twins: list[type[Any]], root: str) -> str:
    """One scheme or collector. It defines what its asyncio class defines, and inherits the rest."""
    own, base, concrete = name_here(cls), base_of(cls, twins), not inspect.isabstract(cls)
    parts = []
    if base is None or (concrete and "__init__" in vars(cls)):
        node = definition(cls.__init__)
        made = f"self._async = self._async_class({handed_on(node.args)})"
        parts.append(f"    def __init__({ast.unparse(node.args)}) -> None:\n        {made}\n")
    for name, member in members(cls, base).items():
        if isinstance(member, property):
            parts.append(accessor(name, member))
        elif isinstance(member, FunctionType) and member.__name__ != name:
            parts.append(f"    {name} = {member.__name__}\n")
        else:
            # A collector's workers are started by the first call that needs them.
            parts.append(method(name, member, "_started" if root == "BlockingCollector" else "_async"))
    text = class_head(cls, base.__name__ if base else root) + "\n"
    text += f"    _async_class: ClassVar[type[{own}]] = {own}\n" if concrete else ""
    text += f"    _async: {own}\n" if parts else ""
    return "\n".join([text, *parts])


def updater_twin(cls: type[Any], twins: list[type[Any]], root: str) -> str:
    """One updater. It defines the methods that block, and inherits the others."""
    own, base = name_here(cls), base_of(cls, twins)
    text = class_head(cls, base.__name__ if base else root, own)
    for key, member in vars(cls).items():
        if not inspect.iscoroutinefunction(member) or (key.startswith("_") and key != "__call__"):
            continue
        node = definition(member)
        blocking = "close" if key == "aclose" else key
        passed = "".join(f", {part}" for part in [handed_on(node.args)] if part)
        ignored = "  # type: ignore[override]\n" if blocking == key else ""
        text += f"\n    def {blocking}({ignored}{ast.unparse(node.args)}) -> None:\n"
        text += docstring(member, " " * 8) + f"        run_inline({own}.{key}(self{passed}))\n"
    return text


# -- whole files ---------------------------------------------------------------------------------------


def imports_of(module_name: str) -> dict[str, str]:
    """Each name of a module -> the statement that imports it elsewhere."""
    module = sys.modules[module_name]
    found = {name: f"from {module_name} import {name}" for name in vars(module)}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                renamed = f" as {alias.asname}" if alias.asname else ""
                found[alias.asname or alias.name] = f"{source}import {alias.name}{renamed}"
    return found


def used_names(classes: list[ast.stmt]) -> Iterator[str]:
    """The global names that classes use: their bases, and their methods' signatures and bodies."""

    def names(*nodes: ast.AST | None) -> set[str]:
        walked = (part for node in nodes if node is not None for part in ast.walk(node))
        return {part.id for part in walked if isinstance(part, ast.Name)}

    for cls in classes:
        assert isinstance(cls, ast.ClassDef)
        yield from names(*cls.bases)
        for node in cls.body:
            if isinstance(node, ast.AnnAssign):
                yield from names(node.annotation, node.value)
            elif isinstance(node, ast.FunctionDef):
                yield from names(node.args, node.returns)
                parameters = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
                yield from names(*node.body) - parameters


def import_block(text: str, twins: list[type[Any]]) -> str:
    """The statements that import what the classes of the file use."""
    classes = ast.parse(text).body
    needed = set(used_names(classes)) - {cls.__name__ for cls in twins} - set(vars(builtins))
    modules = {owner.__module__ for cls in twins for owner in cls.__mro__}
    known = [imports_of(name) for name in sorted(modules) if name.startswith("aiosync.")]
    statements = set()
    for name in sorted(needed):
        found = {OWN_NAMES[name]} if name in OWN_NAMES else {each[name] for each in known if name in each}
        assert len(found) == 1, f"{name} is imported in several ways, or in none: {found}"
        statements |= found
    return "\n".join(sorted(statements))


def whole_file(
    kind: str, twins: list[type[Any]], write_twin: Callable[[type[Any], list[type[Any]], str], str], root: str
) -> str:
    """The file of one kind of classes, formatted. ``root``: the base class of the first twins."""
    classes = "\n\n".join(write_twin(cls, twins, root) for cls in twins)
    head = f'"""The blocking twins of the {kind}. Generated by tools/gen_sync.py: do not edit."""'
    imports = f"from __future__ import annotations\n{import_block(classes, twins)}"
    return formatted("\n\n".join((head, imports, classes)))


def formatted(text: str) -> str:
    """What ruff makes of a source, by the project's settings."""
    for command in (["check", "--select=I", "--fix", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={FOLDER / 'generated.py'}", "-"]
        ran = subprocess.run(ruff, input=text, stdout=subprocess.PIPE, cwd=ROOT, text=True, check=True)
        text = ran.stdout
    return text


def generated() -> dict[str, str]:
    """The generated files: name -> text."""
    return {
        "_generated_schemes.py": whole_file("schemes", TWINS, twin, "BlockingTwin"),
        "_generated_updaters.py": whole_file("updaters", UPDATER_TWINS, updater_twin, "InlineHooks"),
        "_generated_collectors.py": whole_file("collectors", COLLECTOR_TWINS, twin, "BlockingCollector"),
    }


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Write the files, or compare them with what would be written."""
    return max(write(folder / name, text, "--check" in arguments) for name, text in generated().items())


def write(path: Path, text: str, check: bool) -> int:
    """Write a file, or compare it; 1 if it differs."""
    if not check:
        path.write_text(text)
        return 0
    known = path.read_text() if path.exists() else ""
    if known == text:
        return 0
    lines = difflib.unified_diff(known.splitlines(), text.splitlines(), "committed", "generated", lineterm="")
    print("\n".join(lines))
    print(f"{path.name} is not current: run python tools/gen_sync.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
