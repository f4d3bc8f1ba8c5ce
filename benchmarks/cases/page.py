"""``aiosync bench page``: runs the cases and makes docs/benchmarks.md of their figures."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness import options
from benchmarks.harness.results import say
from benchmarks.page.render import FIGURES, render
from benchmarks.page.sections import SECTIONS, Section

_NAMES = tuple(section.name for section in SECTIONS)


def page(
    only: Annotated[options.Names | None, options.names_of(_NAMES)] = None,
    render_only: Annotated[bool, typer.Option("--render", help="Run nothing.")] = False,
) -> None:
    """Run the cases one after the other, and make docs/benchmarks.md of their figures."""
    FIGURES.mkdir(exist_ok=True)
    for section in SECTIONS:
        if render_only or section.name not in (only or _NAMES):
            continue
        if section.needs_gpu and not torch.cuda.is_available():
            say(f"{section.name}: this machine has no CUDA device, so its figures stay as they are")
        else:
            say(f"=== aiosync bench {section.command}")
            _run(section)
    render()


def _run(section: Section) -> None:
    """Run a case, and keep the tables that it printed."""
    with tempfile.TemporaryDirectory(prefix="aiosync-bench-") as folder:
        written = Path(folder, "figures.json")
        command = [sys.executable, "-m", "benchmarks.cli", *section.command.split()]
        subprocess.run([*command, "--json", str(written)], check=True, cwd=FIGURES.parents[1])
        figures = json.loads(written.read_text(encoding="utf-8"))
    keep(section, figures)


def keep(section: Section, figures: dict[str, object]) -> None:
    """Write what the page needs of a run's figures."""
    kept = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": figures["machine"],
        "tables": figures["tables"],
    }
    path = FIGURES / f"{section.name}.json"
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
