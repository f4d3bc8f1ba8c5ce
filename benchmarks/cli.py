"""``aiosync bench``: one command for each case."""

from __future__ import annotations

import importlib

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
    "page",
)
_MODULES = {
    "torn": "send",
    **dict.fromkeys(("network", "distributed", "ray"), "between_machines"),
    **dict.fromkeys(("delta", "relay"), "thin_links"),
}

ABOUT = "Measure aiosync beside other software and the machine's own limits, in one run and in turn."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)


def _add(name: str) -> None:
    """Make a command of the case; or one that says what the case needs."""
    module = f"benchmarks.cases.{_MODULES.get(name, name)}"
    try:
        app.command(name)(getattr(importlib.import_module(module), name))
    except ModuleNotFoundError as missing:
        error: BaseException = missing
        about = f"(needs {missing.name}, which is not installed)"
        if missing.name == module:
            why = "compares with other software: it is in aiosync's repository, and not in the installed"
            error, about = SystemExit(f"aiosync bench {name} {why} package"), "(in aiosync's repository only)"

        def refuse() -> None:
            raise error

        passed = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, help=about, context_settings=passed)(refuse)


if __name__ != "__mp_main__":  # a spawned process, which imports what it needs
    for _case in CASES:
        _add(_case)


if __name__ == "__main__":
    app()
