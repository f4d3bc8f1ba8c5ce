"""``aiosync bench fanout``: a small model to many receivers over TCP, beside bare sockets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Annotated

import typer

from benchmarks.cases.fanout_turn import FanoutTask, FanoutTurn
from benchmarks.harness import options
from benchmarks.harness.meters import Spread, summary
from benchmarks.harness.results import Row, report, say
from benchmarks.harness.turns import take

CONTENDERS = ("aiosync", "sockets")
WANTED = {256: 70.0}
"""Receivers -> microseconds of the sender's processor time that one of them may take."""
GROWTH = 1.2
"""How many times as much a receiver may take with the most receivers as with the fewest."""

_SECONDS = 240.0


def fanout(
    receivers: Annotated[options.Numbers | None, options.numbers("Receivers.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    sends: Annotated[int, typer.Option(min=5, help="Sends in each turn.")] = 30,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """What one receiver of a small model costs the sender over TCP, with few and with many receivers."""
    counts = receivers or (64, 256, 1000)
    taken: dict[tuple[int, str], list[FanoutTurn]] = {}
    found: list[Row] = []
    title = "Sends of 50 KB over TCP: the sender's processor time per receiver, in µs (medians; least - most)"
    with report(title, "fanout", json, found) as rows:
        for number, count, contender in product(range(rounds), counts, CONTENDERS):
            say(f"--- round {number + 1}, {count} receivers, {contender}")
            turn = take(FanoutTask(contender, count, sends), "fanout_turn", _SECONDS)
            taken.setdefault((count, contender), []).append(FanoutTurn(**turn))
        fewest = _cpu(taken[min(counts), "aiosync"]).median
        for count in counts:
            ours, bare = (taken[count, contender] for contender in CONTENDERS)
            cpu = _cpu(ours)
            wanted = WANTED.get(count, GROWTH * fewest if count > min(counts) else None)
            rows.append(
                {
                    "receivers": count,
                    "aiosync": cpu,
                    "bare sockets": _cpu(bare),
                    "send, ms": summary([statistics.median(turn.seconds) for turn in ours], 1e3),
                    "bare, ms": summary([statistics.median(turn.seconds) for turn in bare], 1e3),
                    "wanted": wanted,
                    "ok": None if wanted is None else cpu.median <= wanted,
                }
            )
            found += [
                {"receivers": count, "contender": contender, "turns": [asdict(turn) for turn in turns]}
                for contender, turns in zip(CONTENDERS, (ours, bare), strict=True)
            ]
    if check and any(row["ok"] is False for row in rows):
        raise typer.Exit(1)


def _cpu(turns: Sequence[FanoutTurn]) -> Spread:
    return summary([statistics.median(turn.cpu) for turn in turns], 1e6)
