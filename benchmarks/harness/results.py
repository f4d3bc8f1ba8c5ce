"""What a comparison found, as tables on a terminal and as JSON, and the figures that aiosync is to reach."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json as jsons
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.contenders import LIMIT
from benchmarks.harness.meters import MemoryPeak, Spread, in_bytes, proc, times

START = time.monotonic()

Row: TypeAlias = Mapping[str, Any]
"""Figures by the names of their columns, units included."""

WIDTH = 100
"""Columns of a table's text where the output is no terminal."""

_printed: list[dict[str, Any]] = []
"""The tables that this process has printed. The JSON of a case has them too."""


def say(what: str) -> None:
    """Print a line, with the seconds since the start, on standard error."""
    print(f"[{time.monotonic() - START:6.1f} s] {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def report(title: str, name: str, path: Path | None, figures: Any = None) -> Iterator[list[Row]]:
    """Collect rows of the case ``name``; at the end, also after an error, print them and write ``figures``,
    by default the rows."""
    rows: list[Row] = []
    try:
        yield rows
    finally:
        print_rows(title, rows)
        write(path, {"machine": machine(), name: rows if figures is None else figures})


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Print rows of the same columns, as several tables if they are too wide for one."""
    rows = list(rows)
    _printed.append({"title": title, "rows": rows})
    console = Console(width=None if Console().is_terminal else WIDTH)
    parts = list(_side_by_side(rows, console.width))
    for number, columns in enumerate(parts, 1):
        # As Text, a bracket is a bracket and not a style.
        heading = f"\n{title}" + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
        table = Table(title=Text(heading), title_justify="left", title_style="bold")
        for name in columns:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            table.add_row(*(Text(shown(row[name])) for name in columns))
        console.print(table)


def _side_by_side(rows: Sequence[Row], width: int) -> Iterator[list[str]]:
    """Yield the columns of each table of at most this width. Each begins with those that name the row."""
    if not rows:
        yield []
        return
    lines = {name: [*name.splitlines(), *(shown(row[name]) for row in rows)] for name in rows[0]}
    widths = {name: 3 + max(map(len, found)) for name, found in lines.items()}  # with its border
    keys: list[str] = []
    if 1 + sum(widths.values()) > width:
        keys = list(takewhile(lambda name: all(isinstance(row[name], str | int) for row in rows), lines))
    if sum(widths[name] for name in keys) > width // 2:
        keys = keys[:1]
    part: list[str] = []
    for name in list(lines)[len(keys) :]:
        if part and 1 + sum(widths[each] for each in (*keys, *part, name)) > width:
            yield [*keys, *part]
            part = []
        part.append(name)
    yield [*keys, *part]


def shown(value: Any) -> str:
    """A cell: of a spread the median, least and most; of None a dash."""
    if isinstance(value, Spread):
        return f"{shown(value.median)} ({shown(value.min)}-{shown(value.max)})"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def write(path: Path | None, found: Row) -> None:
    """Write figures, dataclasses among them, and the tables as JSON, if a path is given."""
    if path is not None:
        found = {**found, "tables": _printed}
        path.write_text(jsons.dumps(found, indent=1, default=asdict) + "\n", encoding="utf-8")


def machine() -> dict[str, object]:
    """What the figures depend on; nothing that identifies the machine or its owner."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": proc("cpuinfo").get("model name", platform.processor()),
        # In a container a process may use fewer cores than the machine has.
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_bytes": in_bytes(proc("meminfo"), "MemTotal") or None,
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        **{name: _version(name) for name in ("torch", "tensordict", "torchrl", "aiosync", "uvloop")},
    }


def _version(distribution: str) -> str | None:
    found = importlib.metadata.distributions(name=distribution)
    return next((each.version for each in found), None)


@dataclass(frozen=True, slots=True)
class Key:
    """Which measurement: everything but the contender."""

    model: str
    scheme: str
    mode: str  # what a send gets, see benchmarks.contenders.Mode
    workers: int

    @property
    def count(self) -> str:
        """How many workers, in words."""
        return "1 worker" if self.workers == 1 else f"{self.workers} workers"

    def __str__(self) -> str:
        return f"{self.scheme}, {self.model}, {self.count}, {self.mode}"


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
    # "all" contenders took turns; or only "some": where memory is short, each is alone with the limit.
    turns: str = "all"
    send: Spread | None = None  # until the last worker has acknowledged that it has applied
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
    suspended: dict[str, Any] = field(default_factory=dict)  # see benchmarks.harness.trainer.Trainer
    acting: bool = False  # whether the workers rolled out meanwhile

    @property
    def failure(self) -> str:
        """How the contender failed, in a few words; empty if it did not."""
        last = self.error.strip().splitlines()[-1] if self.error else ""
        return "" if self.status == "ok" else f"{self.status}: {last[:60]}"

    @property
    def outcome(self) -> str | Spread | None:
        """The sends, or how the contender failed."""
        return self.failure or self.send


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
        return next((case for case in self.cases if (case.contender, case.key) == (contender, wanted)), None)

    def keys(self) -> dict[Key, None]:
        """Every measurement once, in the order taken."""
        return dict.fromkeys(case.key for case in self.cases)

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """How many times less the median of ``under`` is. The limit's is that in turn with the other."""
        slow, fast = self.find(key, over), self.find(key, under)
        if slow is None or fast is None:
            return None
        return times(fast.limit if over == LIMIT else slow.send, slow.limit if under == LIMIT else fast.send)

    def conclude(self, json: Path | None, *, check: bool) -> None:
        """Write the results; with ``check``, print every target and exit with 1 if one was missed."""
        self.checks = list(check_targets(self))
        others = ("torchrl", "torchrl-alias", LIMIT)
        ratios = [
            asdict(key) | {f"{other}_over_aiosync": self.ratio(key, other, "aiosync") for other in others}
            for key in self.keys()
        ]
        write(json, {**asdict(self), "ratios": ratios})
        if check:
            marks = {True: "ok", False: "MISSED"}
            rows = [{"": marks[c.ok], "figure": c.what, "got": c.got, "want": c.want} for c in self.checks]
            print_rows("targets", rows)
            if not all(c.ok for c in self.checks):
                raise typer.Exit(1)


SLACK_BYTES = 16 << 20  # of shared memory that is not weights: semaphores, pages of the interpreter's own
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
        if (ratio := results.ratio(key, other, "aiosync")) is not None:
            what = f"{key}: {other} / aiosync, medians of send"
            yield Check(what, ratio, f">= {least:g}", ratio >= least)
    for case in (case for case in results.cases if case.contender == "aiosync"):
        if case.failure:
            yield Check(f"{case.key}: {case.failure}", None, "ok", ok=False)
            continue
        if (held := case.verified) is not None:
            yield Check(f"{case.key}: every worker holds what was sent", held, "true", held)
        for what, got, most in _limits(results, case):
            yield Check(f"{case.key}: {what}", got, f"<= {most:g}", got <= most)


def _limits(results: Results, case: Case) -> Iterator[tuple[str, float, float]]:
    """Figures of a case of aiosync, and what each may be at most."""
    key = case.key
    if key == Key("large", "shared", "plain", 4) and case.send and case.one_worker:
        yield "send over that of 1 worker in turn", case.send.median / case.one_worker.median, 1.15
    if reads := case.reads:
        yield f"torn or moved reads of {reads.reads}", reads.torn + reads.moved, 0
        yield "reads that saw a change never sent", reads.leaked, 0
    if case.commit and key.scheme == "shared":
        yield "longest commit pause, ms", case.commit.max, 5.0
    if case.stall and key.model == "large":
        for side, late in (("sender", case.stall.sender), ("worker", case.stall.worker)):
            if late:
                yield f"event-loop stall p99 at the {side}, ms", late.p99, 5.0
    if case.memory and key.model == "large":
        shared = max(0, case.memory.shared - SLACK_BYTES) / results.models[key.model]["nbytes"]
        yield "shared memory in all, model sizes", shared, 3.0
