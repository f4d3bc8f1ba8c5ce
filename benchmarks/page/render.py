"""Makes docs/benchmarks.md and its charts of the figures in docs/figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.harness.meters import Spread
from benchmarks.harness.results import Stall, shown
from benchmarks.page.sections import CHARTS, SECTIONS, Bars, Chart, Section

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures"
PAGE = DOCS / "benchmarks.md"

_INTRODUCTION = """\
# Benchmarks

<!-- Made by `python -m nox -s bench`. Change benchmarks/page, not this file. -->

Each table is one run of one command, on the machine that is named below it. The contenders take turns in that
run (A B A B), each in processes of its own. A cell is a median, with the least and the most in parentheses.
Machines differ, and so do runs: compare only figures of one table. Where a table has a figure that was
*wanted*, *ok* says whether it was reached.

```bash
python -m nox -s bench                  # everything, and this page: about two hours
python -m nox -s bench -- page --only send,fanout
aiosync bench                           # lists the cases; each has --help
aiosync bench send --json figures.json
```

An installed package has the cases that measure aiosync on your own machine: `send`, `torn`, `delta`, `relay`
and `blocking`. The comparisons with other software run in a checkout of the repository.
"""
_GREY = "#808080"  # can be read on white and on black
_BLUE = "#0072b2"


def render() -> None:
    """Write the page and the charts of the figures that there are."""
    found = load()
    PAGE.write_text(page(found), encoding="utf-8")
    for chart in CHARTS:
        draw(chart, found, DOCS / f"{chart.name}.svg")


def load() -> dict[str, dict[str, Any] | None]:
    """The figures of each section; None: it was not run."""
    return {section.name: _figures(section) for section in SECTIONS}


def _figures(section: Section) -> dict[str, Any] | None:
    path = FIGURES / f"{section.name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def page(found: dict[str, dict[str, Any] | None]) -> str:
    """The page's Markdown."""
    parts = [_INTRODUCTION]
    parts += [f"![{chart.about}]({chart.name}.svg)\n" for chart in CHARTS if chart.on_page]
    for section in SECTIONS:
        figures = found[section.name]
        if figures is not None:
            parts += _section(section, figures)
    return "\n".join(parts)


def _section(section: Section, figures: dict[str, Any]) -> Iterator[str]:
    yield f"## {section.heading}\n"
    yield f"```bash\naiosync bench {section.command}\n```\n"
    yield f"{section.about}\n"
    for table in figures["tables"]:
        yield from _table(table["rows"], section.left_out)
    if section.after:
        yield f"{section.after}\n"
    machine = figures["machine"]
    names = ("torch", "tensordict", "torchrl", "aiosync")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    made = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}"
    if machine.get("gpu"):
        made = f"{machine['gpu']}, {made}"
    yield f"<small>{figures['date']}: {made}.</small>\n"


def _table(rows: list[dict[str, Any]], left_out: Any) -> Iterator[str]:
    if not rows:
        return
    names = [name for name in rows[0] if name not in left_out]
    yield _line([name.replace("\n", " ") for name in names])
    yield "|" + "---|" * len(names)
    for row in rows:
        yield _line([shown(restored(row[name])) for name in names])
    yield ""


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def restored(value: Any) -> Any:
    """What a cell was before it was written as JSON."""
    if isinstance(value, dict) and "median" in value:
        return Spread(**value)
    if isinstance(value, dict) and "sender" in value:
        return Stall(**{name: restored(late) for name, late in value.items()})
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


# -- the charts --------------------------------------------------------------------------------------


def lengths(bars: Bars, found: dict[str, dict[str, Any] | None]) -> Iterator[tuple[str, float]]:
    """The label and the length of each bar."""
    figures = found[bars.section]
    for table in figures["tables"] if figures is not None else ():
        for row in table["rows"]:
            value = restored(row.get(bars.column))
            value = value.median if isinstance(value, Spread) else value
            if value is not None and all(row.get(name) == wanted for name, wanted in bars.where.items()):
                yield bars.label.format(**row), value


def draw(chart: Chart, found: dict[str, dict[str, Any] | None], path: Path) -> None:
    """Write a chart as SVG, with no background, in colours for light and dark pages."""
    all_bars = [bar for bars in chart.bars for bar in lengths(bars, found)]
    with rc_context({"svg.hashsalt": chart.name, "text.color": _GREY, "font.size": 9}):
        figure = Figure(figsize=(8, 0.8 + 0.24 * len(all_bars)), layout="constrained")
        ax = figure.subplots()
        labels, values = zip(*reversed(all_bars), strict=True) if all_bars else ((), ())
        places = range(len(values))
        ax.barh(places, values, color=_BLUE, height=0.7)
        across = ax.get_yaxis_transform()
        for place, value in zip(places, values, strict=True):  # inside, where the line crosses none
            ax.text(0.008, place, f"{value:.3g}", color="white", va="center_baseline", transform=across)
        ax.axvline(1, color=_GREY, linewidth=0.8)
        ax.set_yticks(places, labels)
        ax.set(xscale="log" if chart.logarithmic else "linear")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
        ax.set_title(chart.title, loc="left", color=_GREY)
        ax.tick_params(colors=_GREY)
        ax.margins(x=0.12, y=0.01)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(_GREY)
        figure.savefig(path, transparent=True, metadata={"Date": None})
