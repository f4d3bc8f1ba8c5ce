"""The arrows of the architecture, and the shape of the public surface, read from the source."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "aiosync"

# A module may import from its own layer and from the layers before it, wherever in its code it does so.
LAYERS = (
    {"_deadline", "_extras", "_listing", "_processors", "errors", "events", "reports", "stats"},
    {"weights"},
    {"_options", "protocol"},
    {"transports"},
    {"_endpoint"},
    {"transfer"},
    {"receiver", "sender"},
    {"schemes"},
    {"relay"},
    {"collectors", "updaters"},
    {"sync"},
    {"__main__", "_demo", "_doctor", "cli", "compat", "integrations", "metrics", "ray", "timeline"},
)
APART = {"receiver": "sender", "sender": "receiver"}  # of one layer, and neither imports the other
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PUBLIC = RANK["collectors"]  # what aiosync/__init__.py may re-export

COMPAT = "aiosync.compat.torchrl"
ALLOWED = {
    ("schemes/contexts.py", COMPAT): "adapts torchrl's contexts; imported for such a context only",
    ("collectors/worker.py", COMPAT): "adds transforms to torchrl's environments; imported for these only",
    ("sync/_twin.py", COMPAT): "registers the twins with torchrl; imported after torchrl only",
}
"""(module, import through importlib) -> why it may point upwards: each imports torchrl, which is optional."""

IMPORTERS = {"__import__", "import_module"}
"""Functions that import a module by its name."""

DOTTED = re.compile(r"aiosync\.[\w.]*")
"""A module of ours, or the beginning of one, as a string."""

LOOPS = {"anyio", "asyncio", "trio", "uvloop"}
INPUT_AND_OUTPUT = LOOPS | {"select", "selectors", "socket", "ssl", "threading", "time"}
MAY_START_THREADS = {"_processors.py", "transports/_offload.py", "sync/_portal.py", "_demo.py", "_doctor.py"}
STARTS_THREADS = {
    "Thread",
    "ThreadPoolExecutor",
    "Timer",
    "run_in_executor",
    "start_blocking_portal",
    "start_new_thread",
    "to_thread",
}


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def where(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def name(self) -> str:
        """Its dotted name, ``aiosync.weights.layout``."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def top(self) -> str:
        """The part below ``aiosync`` that it belongs to; empty for the package's own file."""
        return self.name.removeprefix("aiosync").removeprefix(".").partition(".")[0]

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of what it imports when it runs; not what only a checker reads.

        An import inside a function counts like one at the top, and so does one through importlib.
        """
        for node in _running(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.where}:{node.lineno} has a relative import"
                assert node.module is not None
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"
        yield from self.imports_by_name()

    def imports_by_name(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of what it imports through importlib: the literal arguments of such calls, and
        each module of ours that it has as a string, if it imports by name at all."""
        nodes = list(_running(self.tree))
        importers = IMPORTERS | {
            alias.asname
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "importlib"
            for alias in node.names
            if alias.asname
        }
        for node in nodes:
            if isinstance(node, ast.Call) and _used(node.func) in importers:
                for given in node.args[:1]:
                    if isinstance(given, ast.Constant) and not DOTTED.fullmatch(str(given.value)):
                        yield given.lineno, str(given.value)
        if any(_used(node) in importers for node in nodes):
            for node in nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if DOTTED.fullmatch(node.value):
                        yield node.lineno, node.value

    def defined(self) -> dict[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
        """Its own classes and functions by name, without those inside others."""
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        return {node.name: node for node in self.tree.body if isinstance(node, kinds)}

    def exported(self) -> list[str] | None:
        """Its ``__all__``, or None where it has none."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    names = ast.literal_eval(value)
                    assert isinstance(names, list), f"{self.where}: __all__ is a list, literally"
                    return names
        return None


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _running(child)


def _used(node: ast.AST) -> str:
    """The name that an expression uses, or the attribute."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


MODULES = [Module(path) for path in sorted(PACKAGE.rglob("*.py")) if "_bundled" not in path.parts]
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.where)


@every_module
def test_imports_point_one_way(module: Module) -> None:
    rank = RANK[module.top] if module.top else PUBLIC
    for line, name in module.imports():
        package, _, rest = name.partition(".")
        if package != "aiosync" or (module.where, name) in ALLOWED:
            continue
        top = rest.partition(".")[0]
        if top not in RANK:  # `import aiosync` or `from aiosync import Name`: the whole library
            assert rank > PUBLIC, f"{module.where}:{line} imports all of aiosync: a cycle"
            continue
        assert RANK[top] <= rank, f"{module.where}:{line} imports upwards: {name}"
        assert APART.get(module.top) != top, f"{module.where}:{line} imports the other side: {name}"


@every_module
def test_nothing_below_the_twins_imports_us_by_name(module: Module) -> None:
    if not module.top or RANK[module.top] >= RANK["sync"]:
        return
    for line, name in module.imports_by_name():
        ours = name.partition(".")[0] == "aiosync"
        assert not ours or (module.where, name) in ALLOWED, (
            f"{module.where}:{line} imports {name} by its name"
        )


def test_the_package_has_nothing_but_source() -> None:
    files = {
        path.name for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert files == {"py.typed"}


def test_what_is_allowed_is_needed() -> None:
    used = {(module.where, name) for module in MODULES for _, name in module.imports_by_name()}
    assert ALLOWED.keys() <= used


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from aiosync.sync import _portal",
        "def f():\n    import aiosync.sync._portal",
        "import importlib\nimportlib.import_module('aiosync.sync._portal')",
        "from importlib import import_module as load\nload('aiosync.sync._portal')",
        "from importlib import import_module\nlater = partial(import_module, 'aiosync.sync._portal')",
        "import importlib\nname = 'aiosync.sync._portal'\nimportlib.import_module(name)",
        "__import__('aiosync.sync._portal')",
        "import importlib\nimportlib.import_module(f'aiosync.{name}')",
    ],
)
def test_an_import_upwards_is_found(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "aiosync" / "weights"
    folder.mkdir(parents=True)
    (folder / "upwards.py").write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "aiosync")
    with pytest.raises(AssertionError, match=r"weights/upwards.py:[123] imports (upwards|all of aiosync)"):
        test_imports_point_one_way(Module(folder / "upwards.py"))


@every_module
def test_weights_and_protocol_know_no_event_loop(module: Module) -> None:
    banned = {"weights": LOOPS, "protocol": INPUT_AND_OUTPUT}.get(module.top, set())
    for line, name in module.imports():
        assert name.partition(".")[0] not in banned, f"{module.where}:{line} imports {name}"


@every_module
def test_only_the_compat_module_imports_torchrl(module: Module) -> None:
    if module.where == "compat/torchrl.py":
        return
    for line, name in module.imports():
        assert name.partition(".")[0] != "torchrl", f"{module.where}:{line} imports {name}"


@every_module
def test_threads_start_in_few_places(module: Module) -> None:
    if module.where in MAY_START_THREADS:
        return
    for node in _running(module.tree):
        line = getattr(node, "lineno", 0)
        assert _used(node) not in STARTS_THREADS, f"{module.where}:{line} starts a thread: {_used(node)}"


@every_module
def test_modules_say_what_they_are_and_what_they_export(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.where} has no docstring"
    exported = module.exported()
    if exported is None:  # an internal module: a leading underscore says what is private
        empty = len(module.tree.body) == 1
        assert empty or module.path.stem != "__init__", f"{module.where} has no __all__"
    else:
        assert len(set(exported)) == len(exported), f"{module.where}: a name twice in __all__"
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            private = node.name.startswith("_") if exported is None else node.name not in exported
            documented = private or ast.get_docstring(node)
            assert documented, f"{module.where}: {node.name} has no docstring"


@every_module
def test_exported_names_exist(module: Module) -> None:
    if module.where == "compat/torchrl.py":
        pytest.importorskip("torchrl")
    imported = importlib.import_module(module.name)
    missing = [name for name in module.exported() or () if name not in dir(imported)]
    assert not missing, f"{module.where}: __all__ has {missing}, which do not exist"


def _public_members() -> Iterator[tuple[str, object]]:
    library = importlib.import_module("aiosync")
    for name in library.__all__:
        thing = getattr(library, name)
        yield name, thing
        if inspect.isclass(thing) and thing.__module__.startswith("aiosync"):
            for member in dir(thing):
                value = inspect.getattr_static(thing, member)
                ours = inspect.isroutine(value) or isinstance(value, property)
                if ours and not member.startswith("_"):
                    yield f"{name}.{member}", getattr(thing, member)


def test_every_public_name_has_a_docstring() -> None:
    bare = [
        name
        for name, thing in _public_members()
        if (inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, property))
        and not inspect.getdoc(thing)
    ]
    assert not bare, f"without a docstring: {bare}"
