"""docs/benchmarks.md is made of the figures in docs/figures, and of nothing else."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.cli import app
from benchmarks.harness.meters import Spread
from benchmarks.page.render import DOCS, FIGURES, PAGE, draw, lengths, load, page
from benchmarks.page.sections import CHARTS, SECTIONS, Bars

NONE: dict[str, Any] = {section.name: None for section in SECTIONS}
SPREAD = Spread(3, 2.0, 1.0, 4.0, 3.9)


def _figures(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "a processor", "cores": 2, "python": "3.11", "torch": "2", "torchrl": None}
    return {"date": "2026-01-02", "machine": machine, "tables": [{"title": "t", "rows": list(rows)}]}


def test_the_page_has_been_made_of_the_figures_that_are_there() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(load()), "run `aiosync bench page --render`"
    known = {f"{section.name}.json" for section in SECTIONS}
    assert {path.name for path in FIGURES.iterdir()} <= known
    assert all((DOCS / f"{chart.name}.svg").exists() for chart in CHARTS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_the_command_of_a_section_is_one_that_the_command_line_takes(section: Any) -> None:
    name, *options = section.command.split()
    command: Any = typer.main.get_command(app)
    command.commands[name].make_context(name, options)


def test_a_table_has_the_cells_of_the_terminal() -> None:
    row = {
        "model": "a|b",
        "send": asdict(SPREAD),
        "workers": 4,
        "ok": True,
        "late": None,
        "first of its turn": 1,
    }
    stall = {"sender": asdict(SPREAD), "worker": asdict(SPREAD), "idle": None}
    found = page(NONE | {"send": _figures(row | {"stall\np99": stall})})
    assert "| model | send | workers | ok | late | stall p99 |" in found
    assert "| a\\|b | 2 (1-4) | 4 | yes | - | 3.9 / 3.9 |" in found
    assert "2026-01-02: a processor, 2 cores, Python 3.11, torch 2." in found
    headings = [line for line in found.splitlines() if line.startswith("## ")]
    assert headings == ["## Sends within one machine"]  # the others have no figures


def test_a_bar_is_a_row_that_counts() -> None:
    rows: list[dict[str, Any]] = [
        {"a": "x", "n": asdict(SPREAD)},
        {"a": "y", "n": 8.0},
        {"a": "x", "n": None},
    ]
    found = NONE | {"ray": _figures(*rows)}
    assert [*lengths(Bars("ray", "{a}!", "n", {"a": "x"}), found)] == [("x!", 2.0)]
    assert [*lengths(Bars("ray", "{a}", "n"), found)] == [("x", 2.0), ("y", 8.0)]
    assert [*lengths(Bars("delta", "{a}", "n"), found)] == []


def test_a_chart_is_drawn_the_same_each_time(tmp_path: Path) -> None:
    rows = [{"model": "m", "scheme": "s", "workers": 1, "times": 3.0, "of gloo": 0.9}]
    for number in range(2):
        draw(CHARTS[1], NONE | {"distributed": _figures(*rows)}, tmp_path / f"{number}.svg")
    first, second = ((tmp_path / f"{number}.svg").read_text() for number in range(2))
    assert first == second and "svg" in first
