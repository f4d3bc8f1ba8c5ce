"""``aiosync bench torn``: a million in-loop reads under back-to-back sends, and how many saw two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import Setup
from benchmarks.harness.comparison import Comparison, Entry
from benchmarks.harness.models import TORN_MODELS
from benchmarks.harness.results import Case, Results, machine
from benchmarks.harness.tables import Row, print_rows, progress, write
from benchmarks.harness.targets import check, print_checks

__all__ = ["run"]

SENDS = 20
"""Sends per case, at least."""
COMPARED = 20
"""The others are read this many times less often: their torn reads are a share, ours a count."""
READING_DEADLINE = 900.0
"""Seconds that a million reads may take."""


def run(
    schemes: tuple[str, ...],
    contenders: tuple[str, ...],
    reads: int,
    uvloop: bool,
    deadline: float,
    json: Path | None,
    *,
    show_targets: bool,
) -> int:
    """Measure, print, write; returns how many targets were missed.

    Args:
        schemes: backend names.
        contenders: their names.
        reads: how many reads of aiosync's worker per case.
        uvloop: whether to run on uvloop.
        deadline: seconds that one step may take, except for the reading itself.
        json: where the figures go.
        show_targets: whether to print the targets.
    """
    settings: dict[str, Any] = {
        "schemes": schemes,
        "contenders": contenders,
        "reads": reads,
        "uvloop": uvloop,
    }
    results = Results(machine(), settings)
    say = progress()
    for model in TORN_MODELS.values():
        for scheme in schemes:
            for contender in contenders:
                say(f"torn reads: {model.name}, {scheme}, {contender}")
                setup = Setup(contender, scheme, model, 1, uvloop, {"sync": True})
                wanted = reads if contender == "aiosync" else max(1, reads // COMPARED)
                results.cases.append(asyncio.run(_measure(setup, wanted, deadline, say)))
    print_rows("reads under back-to-back sends", [_row(case) for case in results.cases])
    checks = check(results)
    if show_targets:
        print_checks(checks)
    write(json, asdict(results))
    return sum(not c.ok for c in checks)


async def _measure(setup: Setup, reads: int, deadline: float, say: Callable[[str], None]) -> Case:
    async with Comparison(say, deadline) as comparison:
        entry = comparison.add(setup, "plain")
        await comparison.start()
        read = partial(Entry.read, sends=SENDS, reads=reads, timeout=READING_DEADLINE)
        await comparison.each("reads", read, [entry])
        await comparison.end()
    return entry.case


def _row(case: Case) -> Row:
    row = {"model": case.key.model, "scheme": case.key.scheme, "contender": case.contender}
    reads = case.reads
    if reads is None:
        return {**row, "sends": case.failure}
    return {
        **row,
        "sends": reads.sends,
        "versions seen": reads.versions,
        "reads": reads.reads,
        "torn": reads.torn,
        "share": f"{100 * reads.torn / max(1, reads.reads):.2f} %",
        "leaked": reads.leaked,
        "pinned": reads.pinned,
        "moved": reads.moved,
        "skewed": reads.skewed,
    }
