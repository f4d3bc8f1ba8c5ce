"""``aiosync bench collectors``: aiosync's collectors beside torchrl's or beside a plain loop; or its schemes
inside torchrl's collectors.

A turn is a process of its own, with processes of workers; turns of the two libraries follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases.collectors_turn import Task, Turn
from benchmarks.cases.plain_loop import PlainTask, PlainTurn
from benchmarks.harness import options
from benchmarks.harness.meters import summary
from benchmarks.harness.results import Row, report, say
from benchmarks.harness.turns import take

ENVS = options.Names(("cartpole", "pixels"))
GYM_ENVS = ("gymenv-acrobot", "gymenv-pendulum")  # torchrl's GymEnv
PLAIN_ENVS = {"cartpole": "CartPole-v1", "acrobot": "Acrobot-v1"}
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
TWO_LOOPS = "two plain loops"
PLAIN_FRAMES = 1024  # in a batch
PLAIN_WANTED = {"single": 0.8, "sync": 1.4, "async": 1.7}
"""How many times the frames/s of the plain loop, which is one process, the collectors have to reach."""


def collectors(
    inside_torchrl: Annotated[bool, typer.Option("--inside-torchrl", help="torchrl's collectors.")] = False,
    against: Annotated[
        options.Against, typer.Option(help="torchrl's collectors, or a plain loop.")
    ] = options.Against.TORCHRL,
    models: Annotated[options.Names | None, options.names_of((*ENVS, *GYM_ENVS, "acrobot"))] = None,
    schemes: Annotated[options.Names | None, options.names_of(HOSTS)] = None,
    parameters: Annotated[options.Numbers | None, options.numbers("Added to a small policy.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library.")] = 3,
    frames: Annotated[int, typer.Option(min=1, help="Frames in each batch.")] = 200,
    total: Annotated[int, typer.Option(min=0, help="Frames of each turn.  [0: 50 or 100 batches]")] = 0,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """aiosync's collectors beside torchrl's or a plain loop; or, inside torchrl's, the schemes of both."""
    if against is options.Against.PLAIN:
        return _against_plain(models, rounds, total, json, check)
    own = not inside_torchrl
    if not set(models or ()) <= {*ENVS, *GYM_ENVS}:
        raise typer.BadParameter(f"expected some of {', '.join((*ENVS, *GYM_ENVS))}, or --against plain")
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
                taken[library].append(Turn(**take(replace(task, library=library), "collectors_turn")))
            rows += _rows(task, taken)
            found.append({**asdict(task), **taken})
    if check and any(row["wanted"] and row["ok"] is False for row in rows):
        raise typer.Exit(1)


def _against_plain(
    models: options.Names | None, rounds: int, total: int, json: Path | None, check: bool
) -> None:
    if not set(models or ()) <= set(PLAIN_ENVS):
        raise typer.BadParameter(f"expected some of {', '.join(PLAIN_ENVS)} with --against plain")
    batches = -(-total // PLAIN_FRAMES) or 100
    cases = [(name, 8) for name in models or PLAIN_ENVS] + [("cartpole", 0)] * (not models)
    title = "Frames/s beside a plain loop in one process (medians; least - most)"
    with report(title, "collectors-plain", json) as rows:
        for name, width in cases:
            wanted = PLAIN_WANTED if width else {"single": 0.6}
            say(f"--- {name}, {width or 1} environments in a process")
            task = PlainTask("plain", PLAIN_ENVS[name], width, PLAIN_FRAMES, batches, warm_up=10)
            taken: dict[str, list[PlainTurn]] = {contender: [] for contender in ("plain", TWO_LOOPS, *wanted)}
            for _, contender in product(range(rounds), taken):
                if contender == TWO_LOOPS:
                    taken[contender].append(_two_loops(task))
                    continue
                found = take(replace(task, contender=contender), "plain_loop")
                taken[contender].append(PlainTurn(**found))
            rows += _rows_against_plain(name, width, taken, wanted)
    if check and not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _two_loops(task: PlainTask) -> PlainTurn:
    """Two plain loops at a time: what the processors give to two workers that wait for nothing."""
    with ThreadPoolExecutor(2) as threads:
        turns = [PlainTurn(**found) for found in threads.map(take, [task] * 2, ["plain_loop"] * 2)]
    return PlainTurn(sum(turn.frames for turn in turns), sum(turn.switches for turn in turns) / 2)


def _rows_against_plain(
    name: str, width: int, taken: Mapping[str, Sequence[PlainTurn]], wanted: Mapping[str, float]
) -> Iterator[Row]:
    plain, two = (summary([turn.frames for turn in taken[loops]], 1) for loops in ("plain", TWO_LOOPS))
    for contender, least in wanted.items():
        ours = summary([turn.frames for turn in taken[contender]], 1)
        ratios = [a.frames / b.frames for a, b in zip(taken[contender], taken["plain"], strict=True)]
        ratio = summary(ratios, 1)
        yield {
            "environment": f"{name}, {width or 1} per process",
            "collector": contender,
            "plain loop": plain,
            "two at a time": two,
            "aiosync": ours,
            "times the plain loop": ratio,
            "of two at a time": None if contender == "single" else ours.median / two.median,
            "wanted": least,
            "ok": ratio.median >= least,
            "switches per batch": summary([turn.switches for turn in taken[contender]], 1),
        }


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
