"""``aiosync bench collectors``: aiosync's collectors beside torchrl's; or its schemes inside torchrl's.

A turn is a process of its own, with processes of workers; turns of the two libraries follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from json import dumps
from typing import Annotated

import typer

from benchmarks.cases.collectors_hosts import Task
from benchmarks.cases.collectors_turn import Turn
from benchmarks.harness import options
from benchmarks.harness.meters import Spread, summary
from benchmarks.harness.process import run_turn
from benchmarks.harness.results import machine
from benchmarks.harness.tables import Row, print_rows, progress, write

__all__ = ["HOSTS", "run"]

ENVS = options.Names(("cartpole", "pixels"))
LIBRARIES = ("aiosync", "torchrl")
HOSTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("sync", "async", "single", "evaluator", "server"), ("shared", "process", "tcp")),
    "distributed": ("distributed",),
    "rpc": ("rpc",),
    "ray": ("ray",),
}
"""torchrl's collectors, and aiosync's schemes for each. torchrl has no TCP: its queues stand beside that."""
OWN_HOSTS = ("sync", "async")
QUICK_LOOKUP = "timeout:1 attempts:1"
"""The resolver's options: where no name server answers, torch.distributed is not to wait for one."""


@dataclass(frozen=True)
class _Measure:
    """One figure of a turn.

    Attributes:
        name: with its unit.
        of: the figure.
        scale: from the turn's unit to that of the name.
        target: what the ratio has to be at least, of aiosync's own collectors.
        less: less is better.
    """

    name: str
    of: Callable[[Turn], float]
    scale: float
    target: float
    less: bool = True

    def ratio(self, ours: Spread, theirs: Spread) -> float:
        """How much better ``ours`` is."""
        return theirs.median / ours.median if self.less else ours.median / theirs.median


MEASURES = (
    _Measure("frames/s", lambda turn: turn.frames, 1, 1.5, less=False),
    _Measure("update, ms", lambda turn: turn.update, 1e3, 3.0),
    _Measure("first batch, s", lambda turn: turn.first, 1, 1 / 0.7),
    _Measure("memory, MiB", lambda turn: turn.memory, 1 / (1 << 20), 1.0),
)


def run(
    inside_torchrl: Annotated[
        bool, typer.Option("--inside-torchrl", help="torchrl's collectors, with either library's schemes.")
    ] = False,
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
    say = progress()
    found: list[Row] = []
    rows: list[Row] = []
    try:
        for task in tasks:
            say(f"--- {task.env}, {task.host}, {task.scheme}, {task.parameters} further parameters")
            taken: dict[str, list[Turn]] = {library: [] for library in LIBRARIES}
            for _, library in product(range(rounds), LIBRARIES):
                taken[library].append(_take(replace(task, library=library)))
            rows += _rows(task, taken)
            turns = {library: [asdict(turn) for turn in each] for library, each in taken.items()}
            found.append({**asdict(task), **turns})
    finally:
        print_rows("aiosync and torchrl (medians; least - most), 2 workers", rows)
        write(json, {"machine": machine(), "collectors": found})
    if check and any(row["wanted"] and row["ok"] is False for row in rows):
        raise typer.Exit(1)


def _take(task: Task) -> Turn:
    module = "benchmarks.cases.collectors_turn"
    return Turn(**run_turn(module, dumps(asdict(task)), RES_OPTIONS=QUICK_LOOKUP))


def _rows(task: Task, taken: Mapping[str, Sequence[Turn]]) -> Iterator[Row]:
    what = {
        "environment": task.env,
        "collector": task.host,
        "scheme": task.scheme,
        "parameters": f"{task.parameters / 1e6:.3g} M",
    }
    for measure in MEASURES if task.own else MEASURES[:2]:
        ours, theirs = (
            summary([measure.of(turn) for turn in taken[library]], measure.scale) for library in LIBRARIES
        )
        ratio = measure.ratio(ours, theirs)
        yield {
            **what,
            "figure": measure.name,
            "aiosync": ours,
            "torchrl": theirs,
            "times better": ratio,
            "wanted": measure.target if task.own else None,
            "ok": ratio >= measure.target if task.own else None,
        }
    wrong = {library: sum(turn.wrong for turn in turns) for library, turns in taken.items()}
    texts = {
        library: f"{wrong[library]} of {sum(turn.total for turn in turns)}"
        for library, turns in taken.items()
    }
    yield {
        **what,
        "figure": "wrong frames",
        **texts,
        "times better": None,
        "wanted": "0",
        "ok": not wrong["aiosync"],
    }
