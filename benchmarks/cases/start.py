"""``aiosync bench start``: the time until a collector's first batch, beside the imports of a worker."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.cases.start_turn import StartTask, StartTurn
from benchmarks.harness import options
from benchmarks.harness.meters import Spread, summary
from benchmarks.harness.results import Row, report, say
from benchmarks.harness.turns import take

WORKERS = 2
COLLECTORS = 4
"""Collectors of one program, of which the first finds no server to fork workers from."""
IMPORTS = "import torch, tensordict, gymnasium"
MORE = 0.3
"""Seconds that the first batch may take more than a process with these imports."""
WARM = 0.5
"""Seconds that the first batch of a further collector may take."""


def start(
    rounds: Annotated[int, typer.Option(min=1, help="Programs.")] = 5,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """The time until a collector's first batch: the first collector of a program, and further ones."""
    imports: list[float] = []
    turns: list[StartTurn] = []
    found: list[Row] = []
    title = f"Seconds until the first batch, {WORKERS} workers (medians; least - most)"
    with report(title, "start", json, found) as rows:
        for number in range(rounds):
            say(f"--- round {number + 1}")
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", IMPORTS], check=True)
            imports.append(time.perf_counter() - begun)
            turns.append(StartTurn(**take(StartTask(COLLECTORS, WORKERS), "start_turn")))
        limit = summary(imports, 1)
        cold = summary([turn.seconds[0] for turn in turns], 1)
        warm = summary([each for turn in turns for each in turn.seconds[1:]], 1)
        rows.append(_row("first collector of a program", cold, limit, limit.median + MORE))
        rows.append(_row("further collectors", warm, None, WARM))
        found += [{"imports": imports, "turns": [asdict(turn) for turn in turns]}]
    if check and not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _row(what: str, took: Spread, limit: Spread | None, most: float) -> Row:
    return {
        "collector": what,
        "first batch, s": took,
        "a process with the imports, s": limit,
        "at most": most,
        "ok": took.median <= most,
    }
