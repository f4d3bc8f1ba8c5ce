"""What a run found, as plain data: for the JSON file, the tables, the picture, the check."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.meters import MemoryPeak, Spread
from benchmarks.worker import ReadCounts

__all__ = ["LIMIT", "Case", "Key", "Results", "Stall", "TornCase", "machine"]

LIMIT = "memcpy"
"""The contender that is no contender: one warm copy of the same bytes."""
SCHEMA = 1
DISTRIBUTIONS = ("torch", "tensordict", "torchrl", "aiosync", "uvloop")


@dataclass(frozen=True, slots=True)
class Key:
    """Which measurement: everything but who ran.

    Attributes:
        model: name of the model.
        scheme: backend name, ``shared`` or ``process``.
        mode: ``plain`` (the trainer's own model is sent, changed in place since the last send) or
            ``fresh`` (each send brings new tensors).
        workers: how many.
    """

    model: str
    scheme: str
    mode: str
    workers: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Lateness of a 1 ms ticker, in milliseconds, during sends (and, idle, without any)."""

    sender: Spread | None
    worker: Spread | None
    idle: Spread | None


@dataclass(slots=True)
class Case:
    """One contender in one measurement. Times are in milliseconds, memory in bytes.

    Attributes:
        key: which measurement.
        contender: who.
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


@dataclass(slots=True)
class TornCase:
    """Reads under back-to-back sends, by one contender.

    Attributes:
        sends: how many sends came in meanwhile.
        reads: the counts.
    """

    model: str
    scheme: str
    contender: str
    status: str = "ok"
    error: str = ""
    sends: int = 0
    reads: ReadCounts | None = None

    @property
    def torn_share(self) -> float | None:
        """Torn reads among all reads, 0 to 1."""
        return self.reads.torn / self.reads.reads if self.reads and self.reads.reads else None


@dataclass(slots=True)
class Results:
    """A whole run."""

    machine: dict[str, object]
    settings: dict[str, object]
    notes: list[str]
    models: dict[str, dict[str, int]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    torn: list[TornCase] = field(default_factory=list)
    checks: list[dict[str, object]] = field(default_factory=list)

    def find(self, key: Key, contender: str) -> Case | None:
        """The case of ``contender`` in the measurement ``key``, if it was taken."""
        # The limit knows no modes: it is one copy either way.
        mode = "plain" if contender == LIMIT else key.mode
        wanted = Key(key.model, key.scheme, mode, key.workers)
        for case in self.cases:
            if case.contender == contender and case.key == wanted:
                return case
        return None

    def keys(self) -> Iterator[Key]:
        """Every measurement once, in the order taken."""
        yield from dict.fromkeys(c.key for c in self.cases)

    def median(self, key: Key, contender: str) -> float | None:
        """Median send in milliseconds, or None where there is none."""
        case = self.find(key, contender)
        return case.send.median if case is not None and case.send is not None else None

    def ratio(self, key: Key, over: str, under: str) -> float | None:
        """Median of ``over`` divided by median of ``under``: how many times faster ``under`` is."""
        top, bottom = self._beside(key, over, under), self._beside(key, under, over)
        return top / bottom if top is not None and bottom else None

    def _beside(self, key: Key, contender: str, other: str) -> float | None:
        """The contender's median; for the limit, that of the copies in turn with the other."""
        case = self.find(key, other) if contender == LIMIT else None
        if case is not None and case.limit is not None:
            return case.limit.median
        return self.median(key, contender)

    def ratios(self) -> list[dict[str, object]]:
        """For every measurement: how many times faster than each other contender aiosync is."""
        rows: list[dict[str, object]] = []
        for key in self.keys():
            row: dict[str, object] = {
                f"{other}_over_aiosync": self.ratio(key, other, "aiosync")
                for other in ("torchrl", "torchrl-alias", LIMIT)
            }
            rows.append({**asdict(key), **row})
        return rows

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        data = {"schema": SCHEMA, **asdict(self), "ratios": self.ratios()}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, object]:
    """What the figures depend on, and nothing that names the machine or its owner."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_bytes": memory_total(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        **{name: _version(name) for name in DISTRIBUTIONS},
    }


def _cores() -> int | None:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def memory_total(field_name: str = "MemTotal") -> int | None:
    """A size from the system's memory table in bytes, or None where there is no such table."""
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
