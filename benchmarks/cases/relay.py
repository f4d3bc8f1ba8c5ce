"""``aiosync bench relay``: a trainer, two relays, eight workers; beside eight workers of the trainer's own.

Every link has the same rate, a network's: the way that the bytes take is compared, and not the cores of the
one machine on which all processes run.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from benchmarks.contenders import Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare
from benchmarks.harness.meters import times
from benchmarks.harness.models import ModelSpec
from benchmarks.harness.results import Case
from benchmarks.harness.tables import report

WORKERS, RELAYS, WARM_UP = 8, 2, 2
DEADLINE = 300.0


def run(
    mib: Annotated[int, typer.Option(min=1, help="Size of the model in MiB.")] = 256,
    mbit: Annotated[float, typer.Option(min=0, help="Megabits per second of a link; 0: unlimited.")] = 1000.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed sends of each way.")] = 5,
    json: options.Json = None,
) -> None:
    """A trainer, two relays and eight workers, beside eight workers of the trainer's own."""
    rate = f"{mbit:g} Mbit/s" if mbit else "as fast as they go"
    title = f"{mib} MiB to {WORKERS} workers, links {rate}: median (least - most)"
    flat = None
    with report(title, "relay", json) as rows:
        for relays in (0, RELAYS):
            case, copies = asyncio.run(_measure(relays, mib, mbit, rounds))
            flat = flat or case.send
            longer = times(case.send, flat)
            rows.append(
                {
                    "way": f"1 - {relays} - {WORKERS}" if relays else f"1 - {WORKERS}",
                    "copies sent by the trainer": f"{copies:.3f}",
                    "send, ms": case.failure or case.send,
                    "added by the level": longer - 1 if relays and longer else None,
                }
            )


async def _measure(relays: int, mib: int, mbit: float, rounds: int) -> tuple[Case, float]:
    """One way's sends, and how many models the trainer sent for each."""
    setup = Setup(
        "aiosync", "tcp", ModelSpec(f"{mib} MiB", mib=mib), WORKERS, modes=("still",),
        options={"timeout": 120.0}, extras={"relays": relays, "mbit": mbit},
    )  # fmt: skip
    sent: list[int] = []
    async with compare(DEADLINE, setup) as comparison:
        (entry,) = comparison.entries
        for turns in (WARM_UP, rounds):
            await comparison.take_turns(turns, warm_up=0)
            await comparison.each("counters", [entry])
            sent.append(entry.case.counters.get("wire_nbytes", 0))
    return entry.finish(), (sent[1] - sent[0]) / rounds / (mib << 20)
