"""``aiosync bench``: one command for each case."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

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


def _about(name: str) -> str:
    """Return what a case is, from its source: to import it takes seconds."""
    spec = importlib.util.find_spec(_module(name))
    if spec is None or spec.origin is None:
        return "(in aiosync's repository only)"
    source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_docstring(functions[0]) or ""


def _add(name: str) -> None:
    """Make a command of the case."""

    def run(context: typer.Context) -> None:
        try:
            case = importlib.import_module(_module(name))
        except ModuleNotFoundError as missing:
            if missing.name != _module(name):
                raise
            why = "compares with other software: it is in aiosync's repository, and not in the installed"
            raise SystemExit(f"aiosync bench {name} {why} package") from None
        program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        program.command()(getattr(case, name))
        program(context.args, prog_name=f"aiosync bench {name}")

    passed = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=_about(name), add_help_option=False, context_settings=passed)(run)


if __name__ != "__mp_main__":  # a spawned process, which imports what it needs
    for _case in CASES:
        _add(_case)


if __name__ == "__main__":
    app()
