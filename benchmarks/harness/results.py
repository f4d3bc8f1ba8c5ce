"""What a comparison found, as plain data: for the JSON file, the tables, the picture, the targets."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import LIMIT
from benchmarks.harness.meters import MemoryPeak, Spread
from benchmarks.harness.tables import Row, print_rows, write
from benchmarks.harness.worker import ReadCounts

__all__ = ["Case", "Key", "Results", "Stall", "machine", "memory_total", "report"]

DISTRIBUTIONS = ("torch", "tensordict", "torchrl", "aiosync", "uvloop")


@dataclass(frozen=True, slots=True)
class Key:
    """Which measurement: everything but the contender.

    Attributes:
        model: name of the model.
        scheme: backend name.
        mode: what a send gets (see :data:`~benchmarks.harness.trainer.Mode`).
        workers: how many.
    """

    model: str
    scheme: str
    mode: str
    workers: int

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{self.scheme}, {self.model}, {workers}, {self.mode}"


@dataclass(frozen=True, slots=True)
class Stall:
    """Lateness of a 1 ms ticker, in milliseconds, during sends (and, idle, without any)."""

    sender: Spread | None
    worker: Spread | None
    idle: Spread | None

    def __str__(self) -> str:
        """The 99th percentiles, of the sender and of the workers."""
        return " / ".join(f"{late.p99:.1f}" for late in (self.sender, self.worker) if late)


@dataclass(slots=True)
class Case:
    """One contender in one measurement. Times are in milliseconds, memory in bytes.

    Attributes:
        key: which measurement.
        contender: its name.
        status: ``ok``, or ``failed``, ``timeout``, ``died`` with ``error`` saying how.
        turns: ``all`` contenders alive and in turn (A B C A B C), or only ``some``: where memory is
            short, the others run in a block of their own, with the limit in turn with them too.
        send: from the call of send to the last worker's acknowledgement that it has applied.
        samples: every one of those, in order.
        first: the first of each turn, right after another contender had the processor.
        limit: one warm memcpy of the same bytes, taken in turn with these.
        one_worker: the same for the same contender with one worker, taken in turn with these.
        commit: the time that the commit itself took in the workers.
        phases: median per phase as the sender reports them.
        verified: whether every worker held the sent value at the end of the rounds.
        counters: the sender's, see :meth:`~benchmarks.contenders.SenderEnd.stats`.
        suspended: sends to the other workers while one is stopped (SIGSTOP), and the sender's slots then.
        acting: whether the workers rolled out meanwhile.
    """

    key: Key
    contender: str
    status: str = "ok"
    error: str = ""
    turns: str = "all"
    send: Spread | None = None
    samples: list[float] = field(default_factory=list)
    first: Spread | None = None
    limit: Spread | None = None
    one_worker: Spread | None = None
    commit: Spread | None = None
    phases: dict[str, float] = field(default_factory=dict)
    stall: Stall | None = None
    memory: MemoryPeak | None = None
    reads: ReadCounts | None = None
    verified: bool | None = None
    counters: dict[str, int] = field(default_factory=dict)
    suspended: dict[str, Any] = field(default_factory=dict)
    acting: bool = False

    @property
    def failure(self) -> str:
        """How the contender failed, in a few words; empty if it did not."""
        last = self.error.strip().splitlines()[-1] if self.error else ""
        return "" if self.status == "ok" else f"{self.status}: {last[:60]}"


@dataclass(slots=True)
class Results:
    """A whole run of one case of the benchmarks."""

    machine: dict[str, object]
    settings: dict[str, object]
    notes: list[str] = field(default_factory=list)
    models: dict[str, dict[str, int]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    checks: list[dict[str, object]] = field(default_factory=list)

    def find(self, key: Key, contender: str) -> Case | None:
        """The case of ``contender`` in the measurement ``key``, if it was taken."""
        # The limit knows no modes: it is one copy either way.
        wanted = replace(key, mode="plain") if contender == LIMIT else key
        found = (case for case in self.cases if case.contender == contender and case.key == wanted)
        return next(found, None)

    def keys(self) -> Iterator[Key]:
        """Every measurement once, in the order taken."""
        yield from dict.fromkeys(case.key for case in self.cases)

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """Median of ``over`` divided by median of ``under``: how many times faster ``under`` is."""
        top, bottom = self._median(key, over, under), self._median(key, under, over)
        return top / bottom if top is not None and bottom else None

    def _median(self, key: Key, contender: str, other: str) -> float | None:
        """The contender's median; for the limit, that of the copies in turn with the other."""
        case = self.find(key, other if contender == LIMIT else contender)
        found = case and (case.limit if contender == LIMIT else case.send)
        return found.median if found else None

    def ratios(self) -> list[dict[str, object]]:
        """For every measurement: how many times faster than each other contender aiosync is."""
        others = ("torchrl", "torchrl-alias", LIMIT)
        return [
            {
                **asdict(key),
                **{f"{other}_over_aiosync": self.ratio(key, other, "aiosync") for other in others},
            }
            for key in self.keys()
        ]


@contextlib.contextmanager
def report(title: str, name: str, path: Path | None) -> Iterator[list[Row]]:
    """Collect rows of the case ``name``; at the end, also after an error, print and write them."""
    rows: list[Row] = []
    try:
        yield rows
    finally:
        print_rows(title, rows)
        write(path, {"machine": machine(), name: rows})


def machine() -> dict[str, object]:
    """What the figures depend on; nothing that identifies the machine or its owner."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        # In a container a process may use fewer cores than the machine has.
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": memory_total(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        **{name: _version(name) for name in DISTRIBUTIONS},
    }


def memory_total(field_name: str = "MemTotal") -> int | None:
    """A size from the system's memory table in bytes, or None if the system has no such table."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return int(sizes[field_name].split()[0]) * 1024


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
