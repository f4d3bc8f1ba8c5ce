"""``aiosync bench serving``: requests to a policy behind HTTP while its weights are updated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.cases.serving_turn import ServingTask, ServingTurn
from benchmarks.harness import options
from benchmarks.harness.meters import summary
from benchmarks.harness.results import Row, report, say
from benchmarks.harness.turns import take

RATE = 50e6
LIMITED = f"aiosync, max_receive_rate={RATE:g}"
WAYS = ("aiosync", LIMITED, "load_state_dict under a lock")
MORE = 1.2
"""How many times as long the 99th percentile of a request may take while updates arrive at that rate."""


def serving(
    seconds: Annotated[float, typer.Option(min=1, help="Of requests in one turn.")] = 5.0,
    mebibytes: Annotated[int, typer.Option(min=1, help="Size of the policy.")] = 50,
    clients: Annotated[int, typer.Option(min=1, help="That ask at a time.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 5,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """Requests to a policy behind HTTP, without and with updates that follow each other without a pause."""
    turns: dict[tuple[str, bool], list[ServingTurn]] = {}
    found: list[Row] = []
    title = f"A policy of {mebibytes} MiB behind HTTP, {clients} clients (medians of {rounds}; least - most)"
    with report(title, "serving", json, found) as rows:
        for number in range(rounds):
            for way in WAYS:
                for updated in (False, True):
                    say(f"--- round {number + 1}, {way}, {'with' if updated else 'without'} updates")
                    rate = RATE if way == LIMITED else None
                    task = ServingTask(way != WAYS[-1], rate, updated, seconds, mebibytes, clients)
                    turns.setdefault((way, updated), []).append(ServingTurn(**take(task, "serving_turn")))
        for way in WAYS:
            calm, busy = turns[way, False], turns[way, True]
            ratio = summary([b.p99 / c.p99 for b, c in zip(busy, calm, strict=True)], 1)
            rows.append(
                {
                    "way": way,
                    "p50, ms": summary([turn.p50 for turn in calm], 1e3),
                    "p99, ms": summary([turn.p99 for turn in calm], 1e3),
                    "p50 with updates, ms": summary([turn.p50 for turn in busy], 1e3),
                    "p99 with updates, ms": summary([turn.p99 for turn in busy], 1e3),
                    "times p99": ratio,
                    "updates/s": summary([turn.updates for turn in busy], 1),
                    "wanted": MORE if way == LIMITED else None,
                    "ok": ratio.median <= MORE if way == LIMITED else None,
                }
            )
        found += [{"way": way, "updated": updated, "turns": [asdict(turn) for turn in of]}
                  for (way, updated), of in turns.items()]  # fmt: skip
    if check and not rows[WAYS.index(LIMITED)]["ok"]:
        raise typer.Exit(1)
