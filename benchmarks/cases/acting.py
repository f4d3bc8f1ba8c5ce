"""``aiosync bench acting``: blocking sends to workers that act as fast as they can, beside torchrl's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated

import typer

from benchmarks.cases.acting_turn import ActingTask, ActingTurn
from benchmarks.harness import options
from benchmarks.harness.meters import Spread, summary
from benchmarks.harness.results import Row, report, say
from benchmarks.harness.turns import take

SCHEMES = ("shared", "process")
LIBRARIES = ("aiosync", "torchrl")
WANTED = 1.5
"""How many times less time than torchrl's the median and the 95th percentile of aiosync's sends may take."""

_SECONDS = 120.0
"""The longest time of a turn. torchrl's workers and trainer may wait for each other for ever."""


def acting(
    schemes: Annotated[options.Names | None, options.names_of(SCHEMES)] = None,
    workers: Annotated[options.Numbers | None, options.numbers("Worker processes.")] = None,
    threads: Annotated[
        str, typer.Option(help="torch's threads in each process: 1, default or both.")
    ] = "both",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library.")] = 5,
    sends: Annotated[int, typer.Option(min=20, help="Sends in each turn.")] = 100,
    every: Annotated[
        float,
        typer.Option(
            min=0,
            help="Milliseconds from the start of a send to that of the next, so that all send as often; "
            "0: a pause of 10 ms after each send.",
        ),
    ] = 0.0,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """Sends to workers that act as fast as they can, on fewer processors than processes."""
    counts = {"1": (1,), "default": (0,), "both": (1, 0)}.get(threads)
    if counts is None:
        raise typer.BadParameter(f"--threads: expected 1, default or both, got {threads!r}")
    found: list[Row] = []
    title = "Blocking sends of 1 MB to acting workers (medians; least - most)"
    with report(title, "acting", json, found) as rows:
        for scheme, each, number in product(schemes or SCHEMES, counts, workers or (2, 4)):
            say(f"--- {scheme}, {each or 'default'} threads, {number} workers")
            task = ActingTask("", scheme, each, number, sends, every / 1e3)
            taken: dict[str, list[ActingTurn]] = {library: [] for library in LIBRARIES}
            for _, library in product(range(rounds), LIBRARIES):
                turn = take(replace(task, library=library), "acting_turn", _SECONDS)
                taken[library].append(ActingTurn(**turn))
            rows += _rows(task, taken)
            found.append({**asdict(task), **taken})
    if check and not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _percentile(turns: Sequence[ActingTurn], percent: int) -> Spread:
    """The spread of a percentile over the turns, in milliseconds."""
    return summary([statistics.quantiles(turn.seconds, n=100)[percent - 1] for turn in turns], 1e3)


def _rows(task: ActingTask, taken: dict[str, list[ActingTurn]]) -> Iterator[Row]:
    what = {"scheme": task.scheme, "threads": task.threads or "default", "workers": task.workers}
    if task.every:
        what["sends"] = f"every {1e3 * task.every:g} ms"
    for percent in (50, 95):
        ours, theirs = (_percentile(taken[library], percent) for library in LIBRARIES)
        better = theirs.median / ours.median
        figures = {"aiosync": ours, "torchrl": theirs, "times better": better}
        yield {**what, "figure": f"send p{percent}, ms", **figures, "wanted": WANTED, "ok": better >= WANTED}
    ours, theirs = (summary([turn.forwards for turn in taken[library]], 1) for library in LIBRARIES)
    better = ours.median / theirs.median
    figures = {"aiosync": ours, "torchrl": theirs, "times better": better}
    yield {**what, "figure": "forwards/s", **figures, "wanted": 1.0, "ok": better >= 1}
    behind = {library: sum(turn.behind for turn in turns) for library, turns in taken.items()}
    ok = not behind["aiosync"]
    yield {
        **what,
        "figure": "workers behind at the end",
        **behind,
        "times better": None,
        "wanted": 0,
        "ok": ok,
    }
