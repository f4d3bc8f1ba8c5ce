"""A trainer's process: the model being trained, one sender's end, and the workers it spawned.

Each contender gets a trainer process of its own, so that its memory can be told apart, and so
that a hang or a crash takes nothing else with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tensordict import TensorDict

from benchmarks.channel import Channel, Values, serve
from benchmarks.loops import run_on
from benchmarks.meters import ticking
from benchmarks.models import ModelSpec, build_model, fill
from benchmarks.peers import CONTENDERS, SendPeer, Weights
from benchmarks.worker import ReadCounts, WorkerSpec, worker_main

__all__ = ["TrainerSpec", "trainer_main"]

JOIN_TIMEOUT = 10.0
"""Seconds that a worker may take to end by itself after it was closed."""
IDLE = 0.3
"""Seconds of ticking with nothing going on, for comparison."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What a trainer is told when it is spawned."""

    contender: str
    scheme: str
    model: ModelSpec
    workers: int
    uvloop: bool


def trainer_main(spec: TrainerSpec, conn: Connection) -> None:
    """Entry point of the process: serve commands from ``conn`` until told to close."""
    run_on(_serve(spec, conn), spec.uvloop)


async def _serve(spec: TrainerSpec, conn: Connection) -> None:
    trainer = _Trainer(spec)
    with Channel(conn) as channel:
        try:
            await serve(
                channel,
                {
                    "build": trainer.build,
                    "connect": trainer.connect,
                    "round": trainer.round,
                    "burst": trainer.burst,
                    "stall": trainer.stall,
                    "torn": trainer.torn,
                    "look": trainer.look,
                    "close": trainer.close,
                },
            )
        finally:
            trainer.reap()


class _Trainer:
    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._model = build_model(spec.model)
        self._value = 0  # what every element holds; equals the version that the next send publishes
        self._peer: SendPeer | None = None
        self._links: list[Channel] = []
        self._processes: list[BaseProcess] = []

    async def build(self, _: Mapping[str, Any]) -> Values:
        """Make the sender's end and spawn the workers; returns once all of them are up."""
        fill(self._model, 0.0)
        ctx = get_context("spawn")
        contender = CONTENDERS[self._spec.contender]
        peer = contender.make_sender(self._spec.scheme, self._model, self._spec.workers, ctx)
        for idx in range(self._spec.workers):
            ours, theirs = ctx.Pipe()
            worker = WorkerSpec(self._spec.contender, self._spec.model, idx, self._spec.uvloop)
            process = ctx.Process(
                target=worker_main, args=(worker, peer.recipe, theirs), name=f"worker-{idx}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._links.append(Channel(ours).__enter__())
        self._peer = peer
        await self._ask_all("ready")
        return {"pids": [p.pid for p in self._processes]}

    async def connect(self, _: Mapping[str, Any]) -> Values:
        # Both ends at once: a rendez-vous needs the other side.
        await asyncio.gather(self._sender.connect(), self._ask_all("connect"))
        return {}

    async def round(self, values: Mapping[str, Any]) -> Values:
        """One turn: a training step (not timed), a send (timed), as often as the model says."""
        sends = []
        for _ in range(self._spec.model.turn):
            weights = self._train(values["mode"])
            start = time.perf_counter()
            sent = await self._sender.send(weights)
            seconds = time.perf_counter() - start
            sends.append({"seconds": seconds, "commit": dict(sent.commit), "phases": dict(sent.phases)})
        return {"sends": sends}

    async def burst(self, values: Mapping[str, Any]) -> Values:
        """Several training steps and sends, for somebody who watches from outside."""
        for _ in range(values["sends"]):
            await self._sender.send(self._train(values["mode"]))
        return {}

    async def stall(self, values: Mapping[str, Any]) -> Values:
        """Back-to-back sends with a ticker on every loop; returns latenesses in seconds."""
        async with ticking() as idle:
            await asyncio.sleep(IDLE)
        weights = self._train(values["mode"])
        await self._ask_all("tick_start")
        async with ticking() as late:
            for _ in range(values["sends"]):
                await self._sender.send(weights, off_loop=True)
        self._value += values["sends"] - 1  # so that it goes on being the version
        ticks = await self._ask_all("tick_stop")
        return {"idle": idle, "sender": late, "workers": [t for w in ticks for t in w["late"]]}

    async def torn(self, values: Mapping[str, Any]) -> Values:
        """Back-to-back sends while worker 0 reads; between them a change that is never sent."""
        reader = self._links[0]
        sends = 0
        await self._sender.send(self._train(values["mode"]))  # from here on content equals version
        await reader.call("read_start")
        while True:
            await self._sender.send(self._train(values["mode"]), off_loop=True)
            sends += 1
            fill(self._model, -1.0)
            if sends >= values["sends"]:
                counted = await reader.call("read_count")
                if counted["reads"] >= values["reads"]:
                    break
        counts = await reader.call("read_stop")
        return {"sends": sends, **{f.name: counts[f.name] for f in dataclasses.fields(ReadCounts)}}

    async def look(self, _: Mapping[str, Any]) -> Values:
        """What each worker holds now, and what it should hold: the value last sent."""
        return {"expected": self._value, "workers": await self._ask_all("look")}

    async def close(self, _: Mapping[str, Any]) -> Values:
        await self._sender.close()
        await self._ask_all("close")
        return {}

    def reap(self) -> None:
        """See to it that no worker is left."""
        for link in self._links:
            link.__exit__()
        for process in self._processes:
            process.join(JOIN_TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def _sender(self) -> SendPeer:
        assert self._peer is not None, "build comes first"
        return self._peer

    def _train(self, mode: str) -> Weights:
        """Change every weight in place; what is to be sent: the model, or fresh tensors of it."""
        self._value += 1
        fill(self._model, float(self._value))
        if mode == "fresh":
            fresh: TensorDict = TensorDict.from_module(self._model).data.clone()
            return fresh
        return self._model

    async def _ask_all(self, verb: str) -> list[Values]:
        return await asyncio.gather(*(link.call(verb) for link in self._links))
