"""``aiosync bench``: one command for each case."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import typer

__all__ = ["CASES", "app", "main"]

CASES = ("send", "torn", "network", "delta", "relay", "distributed", "ray", "collectors", "blocking")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure aiosync beside other software and the machine's own limits, in one run and in turn.",
)


def _in_the_repository(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise SystemExit(
            f"aiosync bench {name} compares with other software: it is in aiosync's repository, and not in "
            "the installed package"
        )

    return refuse


def _add(name: str) -> None:
    """Make a command of the case's ``run``."""
    module = f"benchmarks.cases.{name}"
    try:
        app.command(name)(importlib.import_module(module).run)
    except ModuleNotFoundError as missing:
        if missing.name != module:
            raise
        about = "(in aiosync's repository only)"
        passed = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, help=about, context_settings=passed)(_in_the_repository(name))


if __name__ != "__mp_main__":  # a spawned process, which imports what it needs
    for _case in CASES:
        _add(_case)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
