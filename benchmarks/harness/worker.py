"""A worker's process: a model, one contender's worker end, and a loop that answers calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contenders import Setup
from benchmarks.harness.meters import ticking
from benchmarks.harness.models import Probe, build_model

__all__ = ["ReadCounts", "Worker"]

PIN_EVERY = 64
"""One read in so many holds its version pinned across an await and reads again afterwards."""
LONG_PIN_EVERY = 64 * 128
"""One read in so many keeps the pin long enough for the sender to begin its next update."""
LONG_PIN = 0.02


@dataclass(slots=True)
class ReadCounts:
    """In-loop reads of the model while updates arrive.

    Attributes:
        reads: how many times the model was read.
        torn: reads that saw elements of more than one version.
        leaked: reads that saw a change which the trainer made and never sent.
        skewed: whole reads of another version than the receiver said was in service.
        versions: how many different versions were seen whole.
        pinned: how many of the reads were the second read inside ``pinned()``.
        moved: pinned reads that saw another version than the pin had promised.
        sends: how many updates were sent meanwhile.
    """

    reads: int = 0
    torn: int = 0
    leaked: int = 0
    skewed: int = 0
    versions: int = 0
    pinned: int = 0
    moved: int = 0
    sends: int = 0


class Worker:
    """What a trainer calls in a worker's process.

    Args:
        setup: the contender.
        recipe: what its sender's end gave for this worker.
        index: the worker's index.
    """

    def __init__(self, setup: Setup, recipe: object, index: int) -> None:
        torch.set_num_threads(1)
        self._model = build_model(setup.model)
        self._end = setup.make_worker(recipe, self._model, index)
        self._counts = ReadCounts()
        self._reader: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[list[float]] | None = None
        self._acting: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def ready(self) -> None:
        """Return once the process is up."""

    async def connect(self) -> None:
        """Receive the initial weights."""
        await self._end.connect()

    async def look(self) -> list[float]:
        """A few elements of the model as it is now."""
        return Probe(self._model).read()

    async def act(self) -> None:
        """Roll a small policy out on the event loop, as fast as possible, until closed."""
        self._acting = asyncio.create_task(_roll_out())

    async def tick_start(self) -> None:
        """Start a ticker beside the updates."""
        self._stop.clear()
        self._ticker = asyncio.create_task(self._tick())

    async def tick_stop(self) -> list[float]:
        """Stop it; how late its ticks were, in seconds."""
        self._stop.set()
        assert self._ticker is not None
        return await self._ticker

    async def _tick(self) -> list[float]:
        async with ticking() as late:
            await self._stop.wait()
        return late

    async def read_start(self) -> None:
        """Read the model again and again."""
        self._stop.clear()
        self._counts = ReadCounts()
        self._reader = asyncio.create_task(self._read())

    async def read_count(self) -> int:
        """How many reads there were so far."""
        return self._counts.reads

    async def read_stop(self) -> ReadCounts:
        """Stop reading."""
        self._stop.set()
        assert self._reader is not None
        await self._reader
        return self._counts

    async def _read(self) -> None:
        """Do as an env loop does: synchronous work on the model, then an await."""
        probe = Probe(self._model)
        counts = self._counts
        last = -1.0
        while not self._stop.is_set():
            value = self._judge(probe.read(), self._end.version())
            if value is not None and value != last:
                last = value
                counts.versions += 1
            if counts.reads % PIN_EVERY == 0:
                long = counts.reads % LONG_PIN_EVERY == 0
                await self._read_pinned(probe, LONG_PIN if long else 0.0)
            await asyncio.sleep(0)

    async def _read_pinned(self, probe: Probe, hold: float) -> None:
        async with self._end.pinned() as version:
            before = probe.read()
            await asyncio.sleep(hold)
            value = self._judge(probe.read(), version)
            self._counts.pinned += 1
            # torchrl has no pin: without a promise nothing can be broken.
            if version is not None and value != before[0]:
                self._counts.moved += 1

    def _judge(self, values: list[float], version: int | None) -> float | None:
        """Count one read; returns the version that it saw, or None if it was torn or leaked."""
        counts = self._counts
        counts.reads += 1
        leaked = min(values) < 0  # the trainer writes negative numbers that it never sends
        torn = any(v != values[0] for v in values)
        counts.leaked += leaked
        counts.torn += torn
        if leaked or torn:
            return None
        if version is not None and values[0] != version:
            counts.skewed += 1
        return values[0]

    async def close(self) -> None:
        """Release the worker's end."""
        if self._acting is not None:
            self._acting.cancel()
        await self._end.close()


async def _roll_out() -> Any:
    policy, state = torch.ones(64, 64), torch.zeros(1, 64)
    while True:
        state = torch.tanh(state @ policy)
        await asyncio.sleep(0)
