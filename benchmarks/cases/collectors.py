"""``aiosync bench collectors``: aiosync's collectors beside torchrl's; or its schemes inside torchrl's.

A turn is a process of its own, with processes of workers; turns of the two libraries follow each other.
"""

from __future__ import annotations

import json as jsons
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.collectors_turn import Task, Turn
from benchmarks.harness import options
from benchmarks.harness.meters import summary
from benchmarks.harness.results import Row, report, say

ROOT = Path(__file__).parents[2]
ENVS = options.Names(("cartpole", "pixels"))
LIBRARIES = ("aiosync", "torchrl")
HOSTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("sync", "async", "single", "evaluator", "server"), ("shared", "process", "tcp")),
    **{name: (name,) for name in ("distributed", "rpc", "ray")},
}
"""torchrl's collectors, and aiosync's schemes for each. torchrl has no TCP: its queues stand beside that."""
OWN_HOSTS = ("sync", "async")
MEASURES = (
    ("frames/s", "frames", 1, 1.5),
    ("update, ms", "update", 1e3, 3.0),
    ("first batch, s", "first", 1, 1 / 0.7),
    ("memory, MiB", "memory", 1 / (1 << 20), 1.0),
)
"""The name of each figure, its field of a turn, the factor to the unit of the name, and how many times better
aiosync's own collectors have to be. Of frames more is better, of the others less."""


def collectors(
    inside_torchrl: Annotated[bool, typer.Option("--inside-torchrl", help="torchrl's collectors.")] = False,
    models: Annotated[options.Names | None, options.names_of(ENVS)] = None,
    schemes: Annotated[options.Names | None, options.names_of(HOSTS)] = None,
    parameters: Annotated[options.Numbers | None, options.numbers("Added to a small policy.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library.")] = 3,
    frames: Annotated[int, typer.Option(min=1, help="Frames in each batch.")] = 200,
    total: Annotated[int, typer.Option(min=0, help="Frames of each turn.  [0: 50 or 100 batches]")] = 0,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """aiosync's collectors beside torchrl's; or, inside torchrl's collectors, the schemes of both."""
    own = not inside_torchrl
    if own and not set(schemes or ()) <= set(OWN_HOSTS):
        raise typer.BadParameter(f"expected some of {', '.join(OWN_HOSTS)}, or --inside-torchrl")
    sizes = parameters or ((0,) if own else (1_000, 25_000_000))
    envs = models or (ENVS if own else ENVS[:1])
    batches = -(-total // frames) or (100 if own else 50)
    tasks = [
        Task("", own, host, scheme, env, size, frames, batches, warm_up=10 if own else 5)
        for env, host in product(envs, schemes or (OWN_HOSTS if own else HOSTS))
        for scheme, size in product(("shared",) if own else HOSTS[host], sizes)
    ]
    found: list[Row] = []
    title = "aiosync and torchrl (medians; least - most), 2 workers"
    with report(title, "collectors", json, found) as rows:
        for task in tasks:
            say(f"--- {task.env}, {task.host}, {task.scheme}, {task.parameters} further parameters")
            taken: dict[str, list[Turn]] = {library: [] for library in LIBRARIES}
            for _, library in product(range(rounds), LIBRARIES):
                taken[library].append(_take(replace(task, library=library)))
            rows += _rows(task, taken)
            found.append({**asdict(task), **taken})
    if check and any(row["wanted"] and row["ok"] is False for row in rows):
        raise typer.Exit(1)


def _take(task: Task) -> Turn:
    """Take a turn in a process of its own, whose last line of output is the turn as JSON."""
    program = "from benchmarks.cases import collectors_turn; collectors_turn.main()"
    command = [sys.executable, "-c", program, jsons.dumps(asdict(task))]
    # Where no name server answers, torch.distributed is not to wait for one.
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{task} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return Turn(**jsons.loads(lines[-1]))


def _rows(task: Task, taken: Mapping[str, Sequence[Turn]]) -> Iterator[Row]:
    what = {"environment": task.env, "collector": task.host, "scheme": task.scheme}
    what["parameters"] = f"{task.parameters / 1e6:.3g} M"
    for name, field, scale, target in MEASURES if task.own else MEASURES[:2]:
        ours, theirs = (
            summary([getattr(turn, field) for turn in taken[library]], scale) for library in LIBRARIES
        )
        better = ours.median / theirs.median if field == "frames" else theirs.median / ours.median
        yield {
            **what,
            "figure": name,
            "aiosync": ours,
            "torchrl": theirs,
            "times better": better,
            **({"wanted": target, "ok": better >= target} if task.own else {"wanted": None, "ok": None}),
        }
    wrong = {
        library: f"{sum(turn.wrong for turn in turns)} of {sum(turn.total for turn in turns)}"
        for library, turns in taken.items()
    }
    right = not any(turn.wrong for turn in taken["aiosync"])
    yield {**what, "figure": "wrong frames", **wrong, "times better": None, "wanted": "0", "ok": right}
