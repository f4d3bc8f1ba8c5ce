"""``aiosync bench torn``: a million in-loop reads under back-to-back sends, and how many saw two versions."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Annotated

import typer

from benchmarks.cases.send import SCHEMES
from benchmarks.contenders import Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare
from benchmarks.harness.models import TORN_MODELS
from benchmarks.harness.results import Case, ReadCounts, Results
from benchmarks.harness.tables import Row, print_rows, say

SENDS = 20  # sends per case, at least
COMPARED = 20
"""The others are read this many times less often: their torn reads are a share, aiosync's a count."""
READING_DEADLINE = 900.0  # seconds that a million reads may take


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
    results = Results({"reads": reads, "uvloop": uvloop})
    for model, scheme, contender in product(TORN_MODELS, schemes, contenders):
        say(f"--- {model.name}, {scheme}, {contender}")
        setup = Setup(contender, scheme, model, 1, uvloop=uvloop, options={"sync": True})
        wanted = reads if contender == "aiosync" else max(1, reads // COMPARED)
        results.cases.append(asyncio.run(_measure(setup, wanted, deadline)))
    print_rows("reads under back-to-back sends", [_row(case) for case in results.cases])
    results.conclude(json, check=check)


async def _measure(setup: Setup, reads: int, deadline: float) -> Case:
    async with compare(deadline, setup) as comparison:
        (entry,) = comparison.entries
        await comparison.each("reads", [entry], timeout=READING_DEADLINE, sends=SENDS, reads=reads)
    return entry.case


def _row(case: Case) -> Row:
    found = case.reads or ReadCounts()
    row = {
        "sends": found.sends,
        "versions seen": found.versions,
        "reads": found.reads,
        "torn": found.torn,
        "share": f"{100 * found.torn / max(1, found.reads):.2f} %",
        "leaked": found.leaked,
        "pinned": found.pinned,
        "moved": found.moved,
        "skewed": found.skewed,
    }
    if case.reads is None:
        row = dict.fromkeys(row) | {"sends": case.failure}
    return {"model": case.key.model, "scheme": case.key.scheme, "contender": case.contender, **row}
