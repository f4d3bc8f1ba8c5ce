"""A trainer's process, and the processes of the workers that it spawns.

Each contender has a trainer process of its own, so that its memory is counted by itself, and a hang or a
crash stops nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.contenders import Mode, Sent, Setup, Weights
from benchmarks.harness.meters import spread, ticking
from benchmarks.harness.models import Probe, build_model, fill
from benchmarks.harness.process import Remote, RemoteError
from benchmarks.harness.results import ReadCounts, Stall

JOIN_TIMEOUT = 10.0  # seconds that a worker's process may take to end after its end was closed
IDLE = 0.3  # seconds of ticking without sends, for comparison
PIN_EVERY = 64  # one read in so many holds its version pinned across an await and reads again afterwards
LONG_PIN_EVERY = 64 * 128
"""One read in so many keeps the pin long enough for the sender to begin its next update."""
LONG_PIN = 0.02


class Trainer:
    """The model in training and the sender's end: the driver calls its methods."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = build_model(setup.model)
        self._value = 0  # what every element holds: the version that the next send publishes
        self._workers: list[Remote] = []

    async def build(self) -> list[int]:
        """Make the sender's end and spawn the workers; returns their process ids once all are up."""
        fill(self._model, 0.0)
        self._end = self._setup.ends()[0](self._setup, self._model)
        for index in range(self._setup.workers):
            recipe = await self._end.recipe(index)
            self._workers.append(Remote(Worker, self._setup, recipe, index, uvloop=self._setup.uvloop))
        await self._ask_all("ready")
        return [worker.pid for worker in self._workers]

    async def connect(self) -> None:
        """Connect both ends: each waits for the other."""
        await asyncio.gather(self._ask_all("connect"), self._end.connect())

    async def acting(self, mode: Mode) -> bool:
        """Start rollouts in the workers, until they are closed."""
        await self._ask_all("start", what="act")
        return True

    async def turn(self, mode: Mode) -> list[tuple[float, Sent]]:
        """One turn: a training step (not timed), a send (timed), as often as the model says."""
        sends = []
        for _ in range(self._setup.model.turn):
            weights = self._train(mode)
            start = time.perf_counter()
            sent = await self._end.send(weights)
            sends.append((time.perf_counter() - start, sent))
        return sends

    async def burst(self, mode: Mode, sends: int) -> None:
        """Several training steps and sends, while the driver samples memory."""
        for _ in range(sends):
            await self._end.send(self._train(mode))

    async def stall(self, mode: Mode, sends: int = 0, seconds: float = 0.0) -> Stall:
        """Back-to-back sends beside a ticker on every loop, at least so many and for so many seconds."""
        async with ticking() as idle:
            await asyncio.sleep(IDLE)
        weights = self._train(mode)
        await self._ask_all("start", what="tick")
        until = time.perf_counter() + seconds
        done = 0
        async with ticking() as late:
            while done < sends or time.perf_counter() < until:
                await self._end.send(weights, off_loop=True)
                done += 1
        self._value += done - 1  # keeps it equal to the version
        ticks = await self._ask_all("stop", what="tick")
        workers = [tick for worker in ticks for tick in worker]
        return Stall(spread(late), spread(workers), spread(idle))

    async def reads(self, mode: Mode, sends: int, reads: int) -> ReadCounts:
        """Back-to-back sends while worker 0 reads; between them a change that is never sent."""
        reader = self._workers[0]
        done = 0
        await self._end.send(self._train(mode))  # from here on content equals version
        await reader.call("start", what="read")
        while True:
            await self._end.send(self._train(mode), off_loop=True)
            done += 1
            fill(self._model, -1.0)
            if done >= sends and await reader.call("count_reads") >= reads:
                break
        counts: ReadCounts = await reader.call("stop", what="read")
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
                await self._end.send_past_last()
                seconds.append(time.perf_counter() - start)
                memory.append(self._end.stats()["memory"])
        finally:
            os.kill(pid, signal.SIGCONT)
        return {"send": spread(seconds), "memory": max(memory)}

    async def counters(self, mode: Mode) -> dict[str, int]:
        """Counters of the sender's end."""
        return self._end.stats()

    async def verified(self, mode: Mode) -> bool:
        """Whether every worker holds the value last sent."""
        found = await self._ask_all("look")
        return all(value == float(self._value) for values in found for value in values)

    async def close(self) -> None:
        """Close both ends; no worker's process is left."""
        await self._end.close()
        await self._ask_all("close")
        await self._end.leave()
        for worker in self._workers:
            try:
                await worker.wait_ended(JOIN_TIMEOUT)
            except RemoteError:
                worker.kill()

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

    async def _ask_all(self, method: str, **arguments: Any) -> list[Any]:
        return await asyncio.gather(*(worker.call(method, **arguments) for worker in self._workers))


class Worker:
    """A model and a worker's end: the trainer calls its methods.

    ``start`` and ``stop`` say what runs on the loop beside the updates: ``act``, ``tick`` or ``read``.
    """

    def __init__(self, setup: Setup, recipe: object, index: int) -> None:
        torch.set_num_threads(1)
        self._model = build_model(setup.model)
        self._end = setup.ends()[1](setup, recipe, self._model, index)
        self._counts = ReadCounts()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._stopping = asyncio.Event()

    async def ready(self) -> None:
        """Return once the process is up."""

    async def connect(self) -> None:
        """Receive the initial weights."""
        await self._end.connect()

    async def look(self) -> list[float]:
        """A few elements of the model as it is now."""
        return Probe(self._model).read()

    async def start(self, what: str) -> None:
        """Start a task."""
        self._stopping.clear()
        self._tasks[what] = asyncio.create_task(getattr(self, f"_{what}")())

    async def stop(self, what: str) -> Any:
        """Stop it; returns what it has measured."""
        self._stopping.set()
        return await self._tasks.pop(what)

    async def count_reads(self) -> int:
        """How many reads there were so far."""
        return self._counts.reads

    async def close(self) -> None:
        """Release the worker's end."""
        for task in self._tasks.values():
            task.cancel()
        await self._end.close()

    async def _act(self) -> None:
        """Roll a small policy out, as fast as possible."""
        policy, state = torch.ones(64, 64), torch.zeros(1, 64)
        while True:
            state = torch.tanh(state @ policy)
            await asyncio.sleep(0)

    async def _tick(self) -> list[float]:
        """Seconds by which ticks were late."""
        async with ticking() as late:
            await self._stopping.wait()
        return late

    async def _read(self) -> ReadCounts:
        """Do as an env loop does: synchronous work on the model, then an await."""
        probe, last = Probe(self._model), -1.0
        counts = self._counts = ReadCounts()
        while not self._stopping.is_set():
            value = self._judge(probe.read(), self._end.version())
            if value is not None and value != last:
                last = value
                counts.versions += 1
            if counts.reads % PIN_EVERY == 0:
                long = counts.reads % LONG_PIN_EVERY == 0
                await self._read_pinned(probe, LONG_PIN if long else 0.0)
            await asyncio.sleep(0)
        return counts

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
