"""Rows of figures: as a table on a terminal, and as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.meters import Spread

__all__ = ["Row", "print_rows", "progress", "write"]

Row: TypeAlias = Mapping[str, Any]
"""Figures by the names of their columns, units included."""


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Print rows of the same columns: of a spread the median, least and most; of None a dash."""
    rows = list(rows)
    table = Table(title=Text(f"\n{title}"), title_justify="left", title_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        # As Text, a bracket is a bracket and not a style.
        table.add_row(*(Text(_shown(value)) for value in row.values()))
    # A file or a pipe has no width to keep to.
    Console(width=None if Console().is_terminal else 220).print(table)


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case Spread():
            return f"{_digits(value.median)} ({_digits(value.min)}-{_digits(value.max)})"
        case float():
            return _digits(value)
    return str(value)


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write(path: Path | None, found: Row) -> None:
    """Write figures as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1, default=_as_json) + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def progress() -> Callable[[str], None]:
    """A function that prints a line, with the seconds since now, on standard error."""
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {what}", file=sys.stderr, flush=True)

    return say
