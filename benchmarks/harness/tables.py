"""Rows of figures: as a table on a terminal, and as JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.meters import Spread, in_bytes, proc

DISTRIBUTIONS = ("torch", "tensordict", "torchrl", "aiosync", "uvloop")
START = time.monotonic()

Row: TypeAlias = Mapping[str, Any]
"""Figures by the names of their columns, units included."""


def say(what: str) -> None:
    """Print a line, with the seconds since the start, on standard error."""
    print(f"[{time.monotonic() - START:6.1f} s] {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def report(title: str, name: str, path: Path | None) -> Iterator[list[Row]]:
    """Collect rows of the case ``name``; at the end, also after an error, print and write them."""
    rows: list[Row] = []
    try:
        yield rows
    finally:
        print_rows(title, rows)
        write(path, {"machine": machine(), name: rows})


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
            return f"{_shown(value.median)} ({_shown(value.min)}-{_shown(value.max)})"
        case float():
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def write(path: Path | None, found: Row) -> None:
    """Write figures, dataclasses among them, as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1, default=asdict) + "\n", encoding="utf-8")


def machine() -> dict[str, object]:
    """What the figures depend on; nothing that identifies the machine or its owner."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": proc("cpuinfo").get("model name", platform.processor()),
        # In a container a process may use fewer cores than the machine has.
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": in_bytes(proc("meminfo"), "MemTotal") or None,
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        **{name: _version(name) for name in DISTRIBUTIONS},
    }


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None
