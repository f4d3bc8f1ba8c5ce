"""A worker's process: a model, one receiver's end, and an event loop that answers commands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.channel import Channel, Values, serve
from benchmarks.loops import run_on
from benchmarks.meters import ticking
from benchmarks.models import ModelSpec, Probe, build_model
from benchmarks.peers import CONTENDERS, ReceivePeer

__all__ = ["ReadCounts", "WorkerSpec", "worker_main"]

PIN_EVERY = 64
"""One read in so many holds its version pinned across an await and looks again afterwards."""
LONG_PIN_EVERY = 64 * 128
"""One read in so many keeps the pin long enough for the sender to begin its next update."""
LONG_PIN = 0.02


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told when it is spawned."""

    contender: str
    model: ModelSpec
    worker_idx: int
    uvloop: bool


@dataclass(slots=True)
class ReadCounts:
    """In-loop reads of the model while updates were coming in.

    Attributes:
        reads: how many times the model was looked at.
        torn: reads that saw elements of more than one version.
        leaked: reads that saw a change which the trainer made and never sent.
        skewed: whole reads of another version than the receiver said was in service.
        versions: how many different versions were seen whole.
        pinned: how many of the reads were the second look inside ``pinned()``.
        moved: pinned looks that saw another version than the pin had promised.
    """

    reads: int = 0
    torn: int = 0
    leaked: int = 0
    skewed: int = 0
    versions: int = 0
    pinned: int = 0
    moved: int = 0


def worker_main(spec: WorkerSpec, recipe: object, conn: Connection) -> None:
    """Entry point of the process: serve commands from ``conn`` until told to close."""
    torch.set_num_threads(1)
    run_on(_serve(spec, recipe, conn), spec.uvloop)


async def _serve(spec: WorkerSpec, recipe: object, conn: Connection) -> None:
    model = build_model(spec.model)
    peer = CONTENDERS[spec.contender].make_receiver(recipe, model, spec.worker_idx)
    worker = _Worker(peer, model)
    with Channel(conn) as channel:
        await serve(
            channel,
            {
                "ready": worker.ready,
                "connect": worker.connect,
                "look": worker.look,
                "tick_start": worker.tick_start,
                "tick_stop": worker.tick_stop,
                "read_start": worker.read_start,
                "read_count": worker.read_count,
                "read_stop": worker.read_stop,
                "close": worker.close,
            },
        )


class _Worker:
    def __init__(self, peer: ReceivePeer, model: torch.nn.Module) -> None:
        self._peer = peer
        self._model = model
        self._counts = ReadCounts()
        self._reader: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[list[float]] | None = None
        self._stop = asyncio.Event()

    async def ready(self, _: Mapping[str, Any]) -> Values:
        return {}

    async def connect(self, _: Mapping[str, Any]) -> Values:
        await self._peer.connect()
        return {}

    async def look(self, _: Mapping[str, Any]) -> Values:
        """What the model holds right now, and the version that the receiver says it is."""
        return {"values": Probe(self._model).read(), "version": self._peer.version()}

    async def tick_start(self, _: Mapping[str, Any]) -> Values:
        self._stop.clear()
        self._ticker = asyncio.create_task(self._tick())
        return {}

    async def tick_stop(self, _: Mapping[str, Any]) -> Values:
        self._stop.set()
        assert self._ticker is not None
        return {"late": await self._ticker}

    async def _tick(self) -> list[float]:
        async with ticking() as late:
            await self._stop.wait()
        return late

    async def read_start(self, _: Mapping[str, Any]) -> Values:
        self._stop.clear()
        self._counts = ReadCounts()
        self._reader = asyncio.create_task(self._read())
        return {}

    async def read_count(self, _: Mapping[str, Any]) -> Values:
        return {"reads": self._counts.reads}

    async def read_stop(self, _: Mapping[str, Any]) -> Values:
        self._stop.set()
        assert self._reader is not None
        await self._reader
        return asdict(self._counts)

    async def _read(self) -> None:
        """Stands for the env loop: a stretch of synchronous work on the model, then an await."""
        probe = Probe(self._model)
        counts = self._counts
        last = -1.0
        while not self._stop.is_set():
            value = self._judge(probe.read(), self._peer.version())
            if value is not None and value != last:
                last = value
                counts.versions += 1
            if counts.reads % PIN_EVERY == 0:
                long = counts.reads % LONG_PIN_EVERY == 0
                await self._read_pinned(probe, LONG_PIN if long else 0.0)
            await asyncio.sleep(0)

    async def _read_pinned(self, probe: Probe, hold: float) -> None:
        async with self._peer.pinned() as version:
            before = probe.read()
            await asyncio.sleep(hold)
            value = self._judge(probe.read(), version)
            self._counts.pinned += 1
            # Without a promise (torchrl has no pin) there is nothing that could be broken.
            if version is not None and value != before[0]:
                self._counts.moved += 1

    def _judge(self, values: list[float], version: int | None) -> float | None:
        """Count one read; returns the version that it saw, or None where it was torn or leaked."""
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

    async def close(self, _: Mapping[str, Any]) -> Values:
        await self._peer.close()
        return {}
