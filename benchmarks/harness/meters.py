"""Spreads of samples, the memcpy limit, a ticker for event-loop stalls, figures from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

TICK = 0.001  # seconds between two ticks of :func:`ticking`


@dataclass(frozen=True, slots=True)
class Spread:
    """A set of samples in numbers. The unit is the samples' own (milliseconds, where not said)."""

    count: int
    median: float
    min: float
    max: float
    p99: float


def spread(samples: Sequence[float], scale: float = 1e3) -> Spread | None:
    """Summarise ``samples`` times ``scale`` (by default seconds to ms); None for no sample."""
    if not samples:
        return None
    quantiles: list[float] = (np.quantile(samples, (0.5, 0, 1, 0.99)) * scale).tolist()
    return Spread(len(samples), *quantiles)


def summary(samples: Sequence[float], scale: float = 1e3) -> Spread:
    """:func:`spread` of at least one sample."""
    if (found := spread(samples, scale)) is None:
        raise ValueError("nothing was measured")
    return found


def times(other: Spread | None, ours: Spread | None) -> float | None:
    """How many times less the median of ``ours`` is than that of ``other``."""
    return other.median / ours.median if other and ours else None


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Run a task that wants to wake every millisecond; yields by how many seconds each wake-up was late.

    asyncio's selector loop rounds timers up to whole milliseconds: up to 0.001 is not a stall.
    """
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            late.append(max(0.0, time.perf_counter() - due))

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)  # the first deadline is set before the caller continues
    try:
        yield late
    finally:
        # A loop that was blocked to the end has a tick outstanding: let it record how late.
        await asyncio.sleep(2 * TICK)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Memcpy:
    """The physical limit: ``numel`` fp32 elements from one warm buffer into another."""

    def __init__(self, numel: int) -> None:
        self._source = torch.ones(numel)
        self._target = torch.zeros(numel)

    def take(self, value: int) -> float:
        """Change the source (not timed), copy it (timed); returns seconds."""
        self._source.fill_(float(value))
        start = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - start


def proc(path: str) -> dict[str, str]:
    """The lines ``name: value`` of a file below ``/proc``; empty where it cannot be read."""
    try:
        lines = Path("/proc", path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    parts = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in parts}


def in_bytes(table: dict[str, str], name: str) -> int:
    """The size ``name`` (``12 kB``) of such a file, or 0."""
    return int(table.get(name, "0").split()[0]) * 1024


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak resident memory while sends were in progress, in bytes. PSS counts a page shared by k processes as
    1/k in each. A process grows over what it held before it connected, with the model in memory."""

    sender: int  # PSS
    worker: int  # the largest PSS of any one worker
    sender_growth: int
    worker_growth: int  # the largest of any one worker
    shared: int  # shared memory of all processes, each page once (the sum of their Pss_Shmem)
    samples: int


def memory_of(pids: Iterable[int]) -> list[tuple[int, int]]:
    """PSS, and PSS of shared memory, of each process in bytes; zeros where they cannot be read."""
    tables = [proc(f"{pid}/smaps_rollup") for pid in pids]
    return [(in_bytes(table, "Pss"), in_bytes(table, "Pss_Shmem")) for table in tables]


def memory_peak(base: list[tuple[int, int]], samples: list[list[tuple[int, int]]]) -> MemoryPeak | None:
    """The peak of samples of a sender and its workers, and its growth over ``base``; None without figures."""
    found = np.array(samples)  # by sample, process, and (PSS, PSS of shared memory)
    if not found.any():
        return None
    peak = found[..., 0].max(0)
    growth = peak - np.array(base)[:, 0]
    figures = peak[0], peak[1:].max(), growth[0], growth[1:].max(), found[..., 1].sum(1).max(), len(found)
    return MemoryPeak(*map(int, figures))
