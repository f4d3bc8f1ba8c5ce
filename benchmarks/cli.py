"""``aiosync bench``: one command for each case."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

CASES = (
    "send",
    "torn",
    "network",
    "delta",
    "relay",
    "distributed",
    "ray",
    "collectors",
    "blocking",
    "acting",
    "fanout",
    "start",
    "serving",
    "cuda",
    "page",
)
_MODULES = {
    "torn": "send",
    **dict.fromkeys(("network", "distributed", "ray"), "between_machines"),
    **dict.fromkeys(("delta", "relay"), "thin_links"),
}

ABOUT = "Measure aiosync beside other software and the machine's own limits, in one run and in turn."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)


def _module(name: str) -> str:
    return f"benchmarks.cases.{_MODULES.get(name, name)}"


def _source(name: str) -> ast.Module | None:
    """Return the source of a case's module: to import it takes seconds. None: it is not installed."""
    spec = importlib.util.find_spec(_module(name))
    if spec is None or spec.origin is None:
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _about(name: str) -> str:
    source = _source(name)
    if source is None:
        return "(in aiosync's repository only)"
    return ast.get_docstring(_function(source, name)) or ""


def _function(source: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _with_late_import(source: ast.Module, name: str) -> Callable[..., None]:
    """Return a function with the case's options that imports the case when it is called.

    So a wrong option is refused before torch is imported. Of the module only the imports and constants that
    the options need are run.
    """
    function = _function(source, name)
    about = ast.Expr(ast.Constant(ast.get_docstring(function)))
    function.body = [about, *ast.parse(f"_case_of({name!r})(**locals())").body]
    kept: list[ast.stmt] = [function]
    wanted = {node.id for node in ast.walk(function.args) if isinstance(node, ast.Name)}
    for node in reversed(source.body):
        match node:
            case ast.Import() | ast.ImportFrom():
                names = {alias.asname or alias.name for alias in node.names}
            case ast.Assign(targets=[ast.Name(found)]):
                names = {found}
            case ast.AnnAssign(target=ast.Name(found)):
                names = {found}
            case _:
                continue
        if names & wanted or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            kept.insert(0, node)
            wanted |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    namespace: dict[str, Any] = {"_case_of": _case_of, "__name__": __name__}
    module = ast.fix_missing_locations(ast.Module(kept, []))
    exec(compile(module, _module(name), "exec"), namespace)
    made: Callable[..., None] = namespace[name]
    return made


def _case_of(name: str) -> Callable[..., None]:
    case: Callable[..., None] = getattr(importlib.import_module(_module(name)), name)
    return case


def _add(name: str) -> None:
    """Make a command of the case."""

    def run(context: typer.Context) -> None:
        source = _source(name)
        if source is None:
            why = "compares with other software: it is in aiosync's repository, and not in the installed"
            raise SystemExit(f"aiosync bench {name} {why} package")
        program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        program.command()(_with_late_import(source, name))
        program(context.args, prog_name=f"aiosync bench {name}")

    passed = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=_about(name), add_help_option=False, context_settings=passed)(run)


if __name__ != "__mp_main__":  # a spawned process, which imports what it needs
    for _case in CASES:
        _add(_case)


if __name__ == "__main__":
    app()
