"""A trainer's process: the model in training, one contender's sender end, and the workers it spawned.

Each contender has a trainer process of its own, so that its memory is counted by itself, and a hang or a
crash stops nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, Literal, TypeAlias

from tensordict import TensorDict

from benchmarks.contenders import SenderEnd, Sent, Setup, Weights
from benchmarks.harness.meters import spread, ticking
from benchmarks.harness.models import build_model, fill
from benchmarks.harness.process import Remote, RemoteError
from benchmarks.harness.results import Stall
from benchmarks.harness.worker import ReadCounts, Worker

__all__ = ["Mode", "Trainer"]

JOIN_TIMEOUT = 10.0
"""Seconds that a worker's process may take to end after its end was closed."""
IDLE = 0.3
"""Seconds of ticking without sends, for comparison."""

Mode: TypeAlias = Literal["plain", "fresh", "known", "still"]
"""What a send gets: the model, fresh tensors of it, nothing (the sender knows the model), or nothing, and the
weights have not changed since the last send."""


class Trainer:
    """What the driver calls in a trainer's process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = build_model(setup.model)
        self._value = 0  # what every element holds: the version that the next send publishes
        self._end: SenderEnd | None = None
        self._workers: list[Remote] = []

    async def build(self) -> list[int]:
        """Make the sender's end and spawn the workers; returns their process ids once all are up."""
        fill(self._model, 0.0)
        self._end = self._setup.make_sender(self._model)
        for index in range(self._setup.workers):
            recipe = await self._end.recipe(index)
            self._workers.append(Remote(Worker, self._setup, recipe, index, uvloop=self._setup.uvloop))
        await self._ask_all("ready")
        return [worker.pid for worker in self._workers]

    async def connect(self) -> None:
        """Connect both ends: each waits for the other."""
        await asyncio.gather(self._ask_all("connect"), self._sender.connect())

    async def acting(self, mode: Mode) -> bool:
        """Have the workers roll out from now on."""
        await self._ask_all("act")
        return True

    async def turn(self, mode: Mode) -> list[tuple[float, Sent]]:
        """One turn: a training step (not timed), a send (timed), as often as the model says."""
        sends = []
        for _ in range(self._setup.model.turn):
            weights = self._train(mode)
            start = time.perf_counter()
            sent = await self._sender.send(weights)
            sends.append((time.perf_counter() - start, sent))
        return sends

    async def burst(self, mode: Mode, sends: int) -> None:
        """Several training steps and sends, while the driver samples memory."""
        for _ in range(sends):
            await self._sender.send(self._train(mode))

    async def stall(self, mode: Mode, sends: int = 0, seconds: float = 0.0) -> Stall:
        """Back-to-back sends beside a ticker on every loop, at least so many and for so many seconds."""
        async with ticking() as idle:
            await asyncio.sleep(IDLE)
        weights = self._train(mode)
        await self._ask_all("tick_start")
        until = time.perf_counter() + seconds
        done = 0
        async with ticking() as late:
            while done < sends or time.perf_counter() < until:
                await self._sender.send(weights, off_loop=True)
                done += 1
        self._value += done - 1  # keeps it equal to the version
        ticks = await self._ask_all("tick_stop")
        workers = [tick for worker in ticks for tick in worker]
        return Stall(spread(late), spread(workers), spread(idle))

    async def reads(self, mode: Mode, sends: int, reads: int) -> ReadCounts:
        """Back-to-back sends while worker 0 reads; between them a change that is never sent."""
        reader = self._workers[0]
        done = 0
        await self._sender.send(self._train(mode))  # from here on content equals version
        await reader.call("read_start")
        while True:
            await self._sender.send(self._train(mode), off_loop=True)
            done += 1
            fill(self._model, -1.0)
            if done >= sends and await reader.call("read_count") >= reads:
                break
        counts: ReadCounts = await reader.call("read_stop")
        counts.sends = done
        return counts

    async def suspended(self, mode: Mode, sends: int) -> dict[str, Any]:
        """Send to the others while the last worker is stopped (SIGSTOP): the spread of ``send``, and the most
        ``memory`` of the slots in bytes."""
        seconds, memory = [], []
        pid = self._workers[-1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(sends):
                start = time.perf_counter()
                await self._sender.send_past_last()
                seconds.append(time.perf_counter() - start)
                memory.append(self._sender.stats()["memory"])
        finally:
            os.kill(pid, signal.SIGCONT)
        return {"send": spread(seconds), "memory": max(memory)}

    async def counters(self, mode: Mode) -> dict[str, int]:
        """Counters of the sender's end."""
        return dict(self._sender.stats())

    async def verified(self, mode: Mode) -> bool:
        """Whether every worker holds the value last sent."""
        found = await self._ask_all("look")
        return all(value == float(self._value) for values in found for value in values)

    async def close(self) -> None:
        """Close both ends; no worker's process is left."""
        await self._sender.close()
        await self._ask_all("close")
        await self._sender.leave()
        for worker in self._workers:
            try:
                await worker.wait_ended(JOIN_TIMEOUT)
            except RemoteError:
                worker.kill()

    @property
    def _sender(self) -> SenderEnd:
        assert self._end is not None, "build comes first"
        return self._end

    def _train(self, mode: Mode) -> Weights | None:
        """Change every weight in place, unless ``still``; returns what the send gets."""
        if mode == "still":
            return None
        self._value += 1
        fill(self._model, float(self._value))
        if mode == "fresh":
            fresh: TensorDict = TensorDict.from_module(self._model).data.clone()
            return fresh
        return self._model if mode == "plain" else None

    async def _ask_all(self, method: str) -> list[Any]:
        return await asyncio.gather(*(worker.call(method) for worker in self._workers))
