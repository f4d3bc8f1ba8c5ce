"""``aiosync bench torn``: a million in-loop reads under back-to-back sends, and how many saw two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from typing import Annotated

import typer

from benchmarks.cases.send import SCHEMES
from benchmarks.contenders import Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.models import TORN_MODELS
from benchmarks.harness.results import Case, Results, machine
from benchmarks.harness.tables import Row, print_rows, progress
from benchmarks.harness.targets import conclude

__all__ = ["run"]

SENDS = 20
"""Sends per case, at least."""
COMPARED = 20
"""The others are read this many times less often: their torn reads are a share, aiosync's a count."""
READING_DEADLINE = 900.0
"""Seconds that a million reads may take."""


def run(
    schemes: Annotated[options.Names, options.names_of(SCHEMES)] = SCHEMES,
    contenders: options.Contenders = options.INSTALLED,
    reads: Annotated[int, typer.Option(min=1, help="Reads of aiosync's worker, per case.")] = 1_000_000,
    uvloop: options.Uvloop = False,
    deadline: options.Deadline = 120.0,
    json: options.Json = None,
    check: options.Check = False,
) -> None:
    """Reads of the model under back-to-back sends: how many saw two versions at once."""
    results = Results(machine(), {"reads": reads, "uvloop": uvloop})
    say = progress()
    for model, scheme, contender in product(TORN_MODELS.values(), schemes, contenders):
        say(f"--- {model.name}, {scheme}, {contender}")
        setup = Setup(contender, scheme, model, 1, uvloop, {"sync": True})
        wanted = reads if contender == "aiosync" else max(1, reads // COMPARED)
        results.cases.append(asyncio.run(_measure(setup, wanted, deadline, say)))
    print_rows("reads under back-to-back sends", [_row(case) for case in results.cases])
    conclude(results, json, check=check)


async def _measure(setup: Setup, reads: int, deadline: float, say: Callable[[str], None]) -> Case:
    async with Comparison(say, deadline) as comparison:
        entry = comparison.add(setup, "plain")
        await comparison.start()
        await comparison.each("reads", [entry], timeout=READING_DEADLINE, sends=SENDS, reads=reads)
        await comparison.end()
    return entry.case


def _row(case: Case) -> Row:
    row = {"model": case.key.model, "scheme": case.key.scheme, "contender": case.contender}
    found = case.reads
    return {
        **row,
        "sends": found.sends if found else case.failure,
        "versions seen": found and found.versions,
        "reads": found and found.reads,
        "torn": found and found.torn,
        "share": f"{100 * found.torn / max(1, found.reads):.2f} %" if found else None,
        "leaked": found and found.leaked,
        "pinned": found and found.pinned,
        "moved": found and found.moved,
        "skewed": found and found.skewed,
    }
