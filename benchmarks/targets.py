"""The figures that aiosync is meant to reach, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.results import LIMIT, Case, Key, Results

__all__ = ["Check", "check"]

COMMIT_MS = 5.0
STALL_MS = 5.0
SHARED_MODEL_SIZES = 3.0
SLACK_BYTES = 16 << 20
"""Shared memory that is not weights: queues' semaphores, pages of the interpreter's own."""


@dataclass(frozen=True, slots=True)
class Check:
    """One figure against its target.

    Attributes:
        what: which figure.
        got: its value, or None where it could not be taken.
        want: the target, in words.
        ok: whether it was reached.
    """

    what: str
    got: float | None
    want: str
    ok: bool


@dataclass(frozen=True, slots=True)
class _Faster:
    """aiosync's median is to be at least ``times`` less than the other's."""

    model: str
    scheme: str
    mode: str
    workers: int
    other: str
    times: float


_FASTER = (
    _Faster("large", "shared", "plain", 1, LIMIT, 0.8),
    _Faster("medium", "shared", "plain", 4, "torchrl", 4.0),
    _Faster("tiny", "shared", "plain", 1, "torchrl", 2.0),
    _Faster("tiny", "shared", "plain", 4, "torchrl", 2.0),
    _Faster("medium", "process", "fresh", 1, "torchrl", 4.0),
    _Faster("medium", "process", "fresh", 4, "torchrl", 8.0),
    _Faster("large", "process", "plain", 1, "torchrl-alias", 1.0),
    _Faster("large", "process", "fresh", 1, "torchrl", 8.0),
    _Faster("tiny", "process", "plain", 1, "torchrl", 3.0),
)
SCALING = 1.15
"""Four workers of the shared scheme against one, large model, taken in turn."""


def check(results: Results) -> list[Check]:
    """Every target that this run measured, and every case of aiosync that did not end well."""
    found = [*_broken(results), *_ratios(results), *_scaling(results)]
    for case in results.cases:
        if case.contender == "aiosync" and case.status == "ok":
            found.extend(_one_case(results, case))
    found.extend(_torn(results))
    results.checks = [asdict(c) for c in found]
    return found


def _named(key: Key) -> str:
    workers = "1 worker" if key.workers == 1 else f"{key.workers} workers"
    return f"{key.scheme}, {key.model}, {workers}, {key.mode}"


def _broken(results: Results) -> Iterator[Check]:
    for case in results.cases:
        if case.contender == "aiosync" and case.status != "ok":
            last = case.error.strip().splitlines()[-1] if case.error else ""
            yield Check(f"{_named(case.key)}: {case.status}: {last}", None, "ok", ok=False)


def _ratios(results: Results) -> Iterator[Check]:
    for target in _FASTER:
        key = Key(target.model, target.scheme, target.mode, target.workers)
        ratio = results.ratio(key, target.other, "aiosync")
        if ratio is not None:
            what = f"{_named(key)}: {target.other} / aiosync, medians of send"
            yield Check(what, ratio, f">= {target.times:g}", ratio >= target.times)


def _scaling(results: Results) -> Iterator[Check]:
    case = results.find(Key("large", "shared", "plain", 4), "aiosync")
    if case is not None and case.send is not None and case.one_worker is not None:
        ratio = case.send.median / case.one_worker.median
        what = f"{_named(case.key)}: send over that of 1 worker in turn"
        yield Check(what, ratio, f"<= {SCALING:g}", ratio <= SCALING)


def _one_case(results: Results, case: Case) -> Iterator[Check]:
    name = _named(case.key)
    if case.verified is not None:
        yield Check(f"{name}: every worker holds what was sent", case.verified, "true", case.verified)
    if case.reads is not None:
        bad = case.reads.torn + case.reads.leaked + case.reads.moved
        yield Check(f"{name}: torn, leaked or moved reads", bad, "0", bad == 0)
    if case.commit is not None and case.key.scheme == "shared":
        pause = case.commit.max
        what = f"{name}: longest commit pause, ms"
        yield Check(what, pause, f"<= {COMMIT_MS:g}", pause <= COMMIT_MS)
    if case.key.model != "large":
        return
    if case.stall is not None:
        for side, late in (("sender", case.stall.sender), ("worker", case.stall.worker)):
            if late is not None:
                what = f"{name}: event-loop stall p99 at the {side}, ms"
                yield Check(what, late.p99, f"<= {STALL_MS:g}", late.p99 <= STALL_MS)
    if case.memory is not None:
        nbytes = results.models[case.key.model]["nbytes"]
        sizes = max(0, case.memory.shared - SLACK_BYTES) / nbytes
        what = f"{name}: shared memory in all, model sizes"
        yield Check(what, sizes, f"<= {SHARED_MODEL_SIZES:g}", sizes <= SHARED_MODEL_SIZES)


def _torn(results: Results) -> Iterator[Check]:
    for case in results.torn:
        if case.contender != "aiosync":
            continue
        name = f"{case.scheme}, {case.model}"
        if case.reads is None:
            last = case.error.strip().splitlines()[-1] if case.error else ""
            yield Check(f"{name}: torn reads: {case.status}: {last}", None, "ok", ok=False)
            continue
        bad = case.reads.torn + case.reads.moved
        yield Check(f"{name}: torn reads of {case.reads.reads}", bad, "0", bad == 0)
        leaked = case.reads.leaked
        yield Check(f"{name}: reads that saw a change never sent", leaked, "0", leaked == 0)
