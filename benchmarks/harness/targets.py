"""The figures that aiosync is meant to reach, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from benchmarks.contenders import LIMIT
from benchmarks.harness.results import Case, Key, Results
from benchmarks.harness.tables import print_rows, write

__all__ = ["Check", "check_targets", "conclude"]

COMMIT_MS = 5.0
STALL_MS = 5.0
SHARED_MODEL_SIZES = 3.0
SLACK_BYTES = 16 << 20
"""Shared memory that is not weights: queues' semaphores, pages of the interpreter's own."""
SCALING = 1.15
"""Four workers of the shared scheme against one, large model, taken in turn."""
FASTER = (
    (Key("large", "shared", "plain", 1), LIMIT, 0.8),
    (Key("medium", "shared", "plain", 4), "torchrl", 4.0),
    (Key("tiny", "shared", "plain", 1), "torchrl", 2.0),
    (Key("tiny", "shared", "plain", 4), "torchrl", 2.0),
    (Key("medium", "process", "fresh", 1), "torchrl", 4.0),
    (Key("medium", "process", "fresh", 4), "torchrl", 8.0),
    (Key("large", "process", "plain", 1), "torchrl-alias", 1.0),
    (Key("large", "process", "fresh", 1), "torchrl", 8.0),
    (Key("tiny", "process", "plain", 1), "torchrl", 3.0),
)
"""How many times less than another contender's aiosync's median has to be."""


@dataclass(frozen=True, slots=True)
class Check:
    """One figure against its target.

    Attributes:
        what: which figure.
        got: its value, or None if it could not be taken.
        want: the target, in words.
        ok: whether it was reached.
    """

    what: str
    got: float | None
    want: str
    ok: bool


def _at_least(what: object, got: float, least: float) -> Check:
    return Check(str(what), got, f">= {least:g}", got >= least)


def _at_most(what: object, got: float, most: float) -> Check:
    return Check(str(what), got, f"<= {most:g}", got <= most)


def check_targets(results: Results) -> list[Check]:
    """Every target that this run measured, and every case of aiosync that failed."""
    found = []
    for key, other, times in FASTER:
        ratio = results.ratio(key, other, "aiosync")
        if ratio is not None:
            found.append(_at_least(f"{key}: {other} / aiosync, medians of send", ratio, times))
    for case in results.cases:
        if case.contender == "aiosync":
            found.extend(_checks_of(results, case))
    results.checks = [asdict(c) for c in found]
    return found


def _checks_of(results: Results, case: Case) -> Iterator[Check]:
    key = case.key
    if case.failure:
        yield Check(f"{key}: {case.failure}", None, "ok", ok=False)
        return
    if key == Key("large", "shared", "plain", 4) and case.send is not None and case.one_worker is not None:
        ratio = case.send.median / case.one_worker.median
        yield _at_most(f"{key}: send over that of 1 worker in turn", ratio, SCALING)
    if case.verified is not None:
        yield Check(f"{key}: every worker holds what was sent", case.verified, "true", case.verified)
    if case.reads is not None:
        yield _at_most(
            f"{key}: torn or moved reads of {case.reads.reads}", case.reads.torn + case.reads.moved, 0
        )
        yield _at_most(f"{key}: reads that saw a change never sent", case.reads.leaked, 0)
    if case.commit is not None and key.scheme == "shared":
        yield _at_most(f"{key}: longest commit pause, ms", case.commit.max, COMMIT_MS)
    if key.model != "large":
        return
    if case.stall is not None:
        for side, late in (("sender", case.stall.sender), ("worker", case.stall.worker)):
            if late is not None:
                yield _at_most(f"{key}: event-loop stall p99 at the {side}, ms", late.p99, STALL_MS)
    if case.memory is not None:
        sizes = max(0, case.memory.shared - SLACK_BYTES) / results.models[key.model]["nbytes"]
        yield _at_most(f"{key}: shared memory in all, model sizes", sizes, SHARED_MODEL_SIZES)


def conclude(results: Results, json: Path | None, *, check: bool) -> None:
    """Write the results; with ``check``, print every target and exit with 1 if one was missed."""
    found = check_targets(results)
    write(json, {**asdict(results), "ratios": results.ratios()})
    if check:
        marks = {True: "ok", False: "MISSED"}
        rows = [{"": marks[c.ok], "figure": c.what, "got": c.got, "want": c.want} for c in found]
        print_rows("targets", rows)
        if not all(c.ok for c in found):
            raise typer.Exit(1)
