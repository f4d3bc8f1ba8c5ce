"""What a comparison found, as plain data, and the figures that aiosync is meant to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from benchmarks.contenders import LIMIT
from benchmarks.harness.meters import MemoryPeak, Spread, times
from benchmarks.harness.tables import machine, print_rows, write


@dataclass(frozen=True, slots=True)
class Key:
    """Which measurement: everything but the contender."""

    model: str
    scheme: str
    mode: str  # what a send gets, see benchmarks.contenders.Mode
    workers: int

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{self.scheme}, {self.model}, {workers}, {self.mode}"


@dataclass(frozen=True, slots=True)
class Stall:
    """Lateness of a 1 ms ticker, in milliseconds, during sends (and, idle, without any)."""

    sender: Spread | None
    worker: Spread | None = None
    idle: Spread | None = None

    def __str__(self) -> str:
        """The 99th percentiles, of the sender and of the workers."""
        return " / ".join(f"{late.p99:.1f}" for late in (self.sender, self.worker) if late)


@dataclass(slots=True)
class ReadCounts:
    """In-loop reads of the model while updates arrive."""

    reads: int = 0
    torn: int = 0  # saw elements of more than one version
    leaked: int = 0  # saw a change which the trainer made and never sent
    skewed: int = 0  # whole reads of another version than the receiver said was in service
    versions: int = 0  # different versions that were seen whole
    pinned: int = 0  # the second read inside ``pinned()``
    moved: int = 0  # pinned reads that saw another version than the pin had promised
    sends: int = 0  # updates that were sent meanwhile


@dataclass(slots=True)
class Case:
    """One contender in one measurement. Times are in milliseconds, memory in bytes."""

    key: Key
    contender: str
    status: str = "ok"  # or "failed", "timeout", "died", with ``error`` saying how
    error: str = ""
    # "all" contenders alive and in turn (A B C A B C), or only "some": where memory is short, the others
    # run in a block of their own, with the limit in turn with them too.
    turns: str = "all"
    # From the call of send to the last worker's acknowledgement that it has applied.
    send: Spread | None = None
    samples: list[float] = field(default_factory=list)  # every one of those, in order
    first: Spread | None = None  # the first of each turn, right after another contender had the processor
    limit: Spread | None = None  # one warm memcpy of the same bytes, taken in turn with these
    one_worker: Spread | None = None  # the same contender with one worker, taken in turn with these
    commit: Spread | None = None  # the commit itself, in the workers
    phases: dict[str, float] = field(default_factory=dict)  # medians, as the sender reports them
    stall: Stall | None = None
    memory: MemoryPeak | None = None
    reads: ReadCounts | None = None
    verified: bool | None = None  # whether every worker held the sent value at the end of the rounds
    counters: dict[str, int] = field(default_factory=dict)  # see benchmarks.contenders.SenderEnd.stats
    # Sends to the other workers while one is stopped (SIGSTOP), and the sender's slots then.
    suspended: dict[str, Any] = field(default_factory=dict)
    acting: bool = False  # whether the workers rolled out meanwhile

    @property
    def failure(self) -> str:
        """How the contender failed, in a few words; empty if it did not."""
        last = self.error.strip().splitlines()[-1] if self.error else ""
        return "" if self.status == "ok" else f"{self.status}: {last[:60]}"


@dataclass(frozen=True, slots=True)
class Check:
    """One figure against its target."""

    what: str
    got: float | None  # None if it could not be taken
    want: str
    ok: bool


@dataclass(slots=True)
class Results:
    """A whole run of one case of the benchmarks."""

    settings: dict[str, object]
    notes: list[str] = field(default_factory=list)
    machine: dict[str, object] = field(default_factory=machine)
    models: dict[str, dict[str, int]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def find(self, key: Key, contender: str) -> Case | None:
        """The case of ``contender`` in the measurement ``key``, if it was taken."""
        # The limit knows no modes: it is one copy either way.
        wanted = replace(key, mode="plain") if contender == LIMIT else key
        found = (case for case in self.cases if case.contender == contender and case.key == wanted)
        return next(found, None)

    def keys(self) -> dict[Key, None]:
        """Every measurement once, in the order taken."""
        return dict.fromkeys(case.key for case in self.cases)

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """Median of ``over`` divided by median of ``under``: how many times faster ``under`` is."""
        return times(self._send(key, over, under), self._send(key, under, over))

    def _send(self, key: Key, contender: str, other: str) -> Spread | None:
        """The contender's sends; for the limit, the copies in turn with the other."""
        case = self.find(key, other if contender == LIMIT else contender)
        if case is None:
            return None
        return case.limit if contender == LIMIT else case.send

    def conclude(self, json: Path | None, *, check: bool) -> None:
        """Write the results; with ``check``, print every target and exit with 1 if one was missed."""
        self.checks = list(check_targets(self))
        others = ("torchrl", "torchrl-alias", LIMIT)
        ratios = [
            {
                **asdict(key),
                **{f"{other}_over_aiosync": self.ratio(key, other, "aiosync") for other in others},
            }
            for key in self.keys()
        ]
        write(json, {**asdict(self), "ratios": ratios})
        if check:
            marks = {True: "ok", False: "MISSED"}
            rows = [{"": marks[c.ok], "figure": c.what, "got": c.got, "want": c.want} for c in self.checks]
            print_rows("targets", rows)
            if not all(c.ok for c in self.checks):
                raise typer.Exit(1)


COMMIT_MS = 5.0
STALL_MS = 5.0
SHARED_MODEL_SIZES = 3.0
SLACK_BYTES = 16 << 20
"""Shared memory that is not weights: queues' semaphores, pages of the interpreter's own."""
SCALING = 1.15  # four workers of the shared scheme against one, large model, taken in turn
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


def check_targets(results: Results) -> Iterator[Check]:
    """Every target that this run measured, and every case of aiosync that failed."""
    for key, other, least in FASTER:
        ratio = results.ratio(key, other, "aiosync")
        if ratio is not None:
            what = f"{key}: {other} / aiosync, medians of send"
            yield Check(what, ratio, f">= {least:g}", ratio >= least)
    for case in results.cases:
        if case.contender != "aiosync":
            continue
        if case.failure:
            yield Check(f"{case.key}: {case.failure}", None, "ok", ok=False)
            continue
        if case.verified is not None:
            what = f"{case.key}: every worker holds what was sent"
            yield Check(what, case.verified, "true", case.verified)
        for what, got, most in _limits(results, case):
            yield Check(f"{case.key}: {what}", got, f"<= {most:g}", got <= most)


def _limits(results: Results, case: Case) -> Iterator[tuple[str, float, float]]:
    """Figures of a case of aiosync, and what each may be at most."""
    key = case.key
    if key == Key("large", "shared", "plain", 4) and case.send and case.one_worker:
        ratio = case.send.median / case.one_worker.median
        yield "send over that of 1 worker in turn", ratio, SCALING
    if case.reads:
        reads = case.reads
        yield f"torn or moved reads of {reads.reads}", reads.torn + reads.moved, 0
        yield "reads that saw a change never sent", reads.leaked, 0
    if case.commit and key.scheme == "shared":
        yield "longest commit pause, ms", case.commit.max, COMMIT_MS
    if case.stall and key.model == "large":
        for side, late in (("sender", case.stall.sender), ("worker", case.stall.worker)):
            if late:
                yield f"event-loop stall p99 at the {side}, ms", late.p99, STALL_MS
    if case.memory and key.model == "large":
        shared = max(0, case.memory.shared - SLACK_BYTES) / results.models[key.model]["nbytes"]
        yield "shared memory in all, model sizes", shared, SHARED_MODEL_SIZES
