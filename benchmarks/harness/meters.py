"""Spreads of samples, the memcpy limit, a ticker for event-loop stalls, memory from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Memcpy", "MemoryPeak", "MemorySampler", "Spread", "spread", "summary", "ticking", "times"]

TICK = 0.001
"""Seconds between two ticks of :func:`ticking`."""


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
    ordered = sorted(s * scale for s in samples)
    return Spread(
        count=len(ordered),
        median=_quantile(ordered, 0.5),
        min=ordered[0],
        max=ordered[-1],
        p99=_quantile(ordered, 0.99),
    )


def summary(samples: Sequence[float], scale: float = 1e3) -> Spread:
    """:func:`spread` of at least one sample."""
    found = spread(samples, scale)
    assert found is not None, "nothing was measured"
    return found


def times(other: Spread | None, ours: Spread | None) -> float | None:
    """How many times less the median of ``ours`` is than that of ``other``."""
    return other.median / ours.median if other and ours else None


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two samples around the quantile."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Run a task that wants to wake every millisecond; yields its latenesses in seconds.

    A loop that is blocked for 30 ms shows as one sample of 0.03. Timers of asyncio's own selector
    loop are rounded up to whole milliseconds, so up to 0.001 is the loop's habit and not a stall.
    """
    late: list[float] = []

    async def tick() -> None:
        due = time.perf_counter() + TICK
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            late.append(max(0.0, now - due))
            due = now + TICK

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)  # the first deadline is set before the caller goes on
    try:
        yield late
    finally:
        # A loop that was blocked to the end has a tick outstanding: let it record how late.
        await asyncio.sleep(2 * TICK)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Memcpy:
    """The physical limit: the same bytes from one warm buffer into another.

    Args:
        numel: how many fp32 elements.
    """

    def __init__(self, numel: int) -> None:
        self._source = torch.ones(numel)
        self._target = torch.zeros(numel)

    def take(self, value: int) -> float:
        """Change the source (not timed), copy it (timed); returns seconds."""
        self._source.fill_(float(value))
        start = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak resident memory while sends were going on, in bytes.

    Attributes:
        sender: PSS of the sender's process (a page shared by k processes counts 1/k in each).
        worker: the largest PSS of any one worker.
        sender_growth: the sender's peak less what it held before it connected (model in memory).
        worker_growth: the largest growth of any one worker over what it held before it connected.
        shared: shared memory of all processes, each page once (the sum of their Pss_Shmem).
        samples: how many times it was looked at.
    """

    sender: int
    worker: int
    sender_growth: int
    worker_growth: int
    shared: int
    samples: int


class MemorySampler:
    """Reads the memory of a sender and its workers; keeps the peaks. On Linux only.

    Args:
        sender: process id of the sender.
        workers: process ids of the workers.
    """

    def __init__(self, sender: int, workers: Iterable[int]) -> None:
        self._pids = [sender, *workers]
        self._base = [_rollup(pid)[0] for pid in self._pids]
        self._peak: list[int] = []
        self._shared = 0
        self._samples = 0
        self.restart()

    def restart(self) -> None:
        """Forget the peaks, not where the growth is counted from."""
        self._peak = [0] * len(self._pids)
        self._shared = 0
        self._samples = 0

    def sample(self) -> None:
        """Take one sample (milliseconds of work: it walks the page tables of every process)."""
        readings = [_rollup(pid) for pid in self._pids]
        self._peak = [max(p, pss) for p, (pss, _) in zip(self._peak, readings, strict=True)]
        self._shared = max(self._shared, sum(shmem for _, shmem in readings))
        self._samples += 1

    def peak(self) -> MemoryPeak | None:
        """The peaks so far, or None where this system does not tell."""
        if not self._samples or not self._peak[0]:
            return None
        growth = [p - b for p, b in zip(self._peak, self._base, strict=True)]
        return MemoryPeak(
            sender=self._peak[0],
            worker=max(self._peak[1:]),
            sender_growth=growth[0],
            worker_growth=max(growth[1:]),
            shared=self._shared,
            samples=self._samples,
        )


def _rollup(pid: int) -> tuple[int, int]:
    """(PSS, PSS of shared memory) of a process in bytes; zeros where it cannot be told."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0, 0
    sizes = {"Pss:": 0, "Pss_Shmem:": 0}
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        if key in sizes:
            sizes[key] = int(rest.split()[0]) * 1024
    return sizes["Pss:"], sizes["Pss_Shmem:"]
