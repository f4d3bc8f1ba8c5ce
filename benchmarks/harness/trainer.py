"""A trainer's process, and the processes of the workers that it spawns; each is called over a pipe.

Each contender has a trainer process of its own, so that its memory is counted by itself, and a hang or a
crash stops nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import anyio
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._C._distributed_c10d import TCPStore
from torch.distributed import rpc

from benchmarks.contenders import Mode, SenderEnd, Sent, Setup, Weights, WorkerEnd
from benchmarks.harness.meters import spread, ticking
from benchmarks.harness.models import Probe, build_model, fill
from benchmarks.harness.results import ReadCounts, Stall

SPAWN = get_context("spawn")
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["aiosync", "benchmarks.harness.models"])
JOIN_TIMEOUT = 10.0  # seconds that a worker's process may take to end after its end was closed
IDLE = 0.3  # seconds of ticking without sends, for comparison
PIN_EVERY = 64  # one read in so many holds its version pinned across an await and reads again afterwards
LONG_PIN_EVERY = 64 * 128  # one in so many for longer: the sender begins its next update meanwhile
LONG_PIN = 0.02


class RemoteError(Exception):
    """A call failed. ``status`` is ``failed`` (the message is the traceback), ``timeout`` or ``died``."""

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        super().__init__(message)


class Remote:
    """An object that ``make`` makes of ``args`` in a new process, with uvloop's event loop or asyncio's.

    Its coroutine methods are called by name, one call at a time. A ``parent`` starts processes of its own,
    which :meth:`kill` ends too; any other ends with this process. ``forked``: from a server that has imported
    torch, which saves seconds for each process.
    """

    def __init__(
        self, make: Any, *args: Any, uvloop: bool = False, parent: bool = False, forked: bool = False
    ) -> None:
        self._conn, theirs = SPAWN.Pipe()
        target = make, args, theirs, uvloop, parent
        start = SERVER if forked else SPAWN
        self._process = start.Process(target=_process_main, args=target, daemon=not parent)
        self._process.start()
        theirs.close()
        self._parent = parent
        self.pid: int = self._process.pid or 0

    async def call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call ``method`` and return its result, within ``timeout`` seconds. Raises :class:`RemoteError`."""
        try:
            self._conn.send((method, arguments))
            async with asyncio.timeout(timeout):
                await anyio.wait_readable(self._conn)
            error, result = self._conn.recv()
        except TimeoutError:
            raise RemoteError("timeout", f"{method}: no answer within {timeout:g} s") from None
        except (EOFError, OSError):
            raise RemoteError("died", f"{method}: its process has ended") from None
        if error:
            raise RemoteError("failed", f"{method}: {error}")
        return result

    async def close(self, timeout: float) -> None:
        """Call the object's ``close`` and wait until the process has ended, ``timeout`` seconds each."""
        await self.call("close", timeout=timeout)
        await self.wait_ended(timeout)

    async def wait_ended(self, timeout: float) -> None:
        """Wait until the process has ended by itself. Raises :class:`RemoteError`."""
        await asyncio.to_thread(self._process.join, timeout)
        if self._process.is_alive():
            raise RemoteError("timeout", f"close: the process is still there after {timeout:g} s")

    def kill(self) -> None:
        """End the process by force, if it has not ended. Without a clean end, end its children too."""
        if self._conn.closed:
            return
        if self._parent and self._process.exitcode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._conn.close()


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Stop processes (SIGSTOP) for the duration of the context."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _process_main(make: Any, args: Any, conn: Connection[Any, Any], uvloop: bool, parent: bool) -> None:
    async def serve() -> None:
        """Answer calls until ``close`` has been answered or the caller has ended."""
        served, method = make(*args), ""
        with contextlib.suppress(EOFError, OSError):
            while method != "close":
                await anyio.wait_readable(conn)
                method, arguments = conn.recv()
                try:
                    reply = "", await getattr(served, method)(**arguments)
                # The boundary of the process: any error is a result for the caller.
                except Exception:  # noqa: BLE001
                    reply = traceback.format_exc(), None
                conn.send(reply)

    if parent:
        os.setpgrp()  # with the processes that it starts
    factory = importlib.import_module("uvloop").new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve())
    if threading.active_count() > 1:
        # Threads that torchrl or gloo cannot end, because they wait for a sender, would hold up the exit.
        os._exit(0)


async def _connect(end: SenderEnd | WorkerEnd, name: str, rank: int) -> None:
    """Connect an end, once its process has joined what the setup says."""
    extras = end.setup.extras
    place: dict[str, Any] = {"rank": rank, "world_size": 1 + end.setup.workers}
    if "rpc" in extras:
        # As torchrl's RPCCollector. With torch's default each process polls shared memory without a pause.
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{extras['rpc']}", _transports=["uv"])
        # It blocks until all have joined.
        await asyncio.to_thread(rpc.init_rpc, name, rpc_backend_options=options, **place)
    if "port" in extras:
        store: Any = TCPStore("127.0.0.1", extras["port"], is_master=False, wait_for_workers=False)
        await asyncio.to_thread(dist.init_process_group, "gloo", store=store, **place)
    await end.connect()


class Trainer:
    """The model in training and the sender's end: the driver calls its methods."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = build_model(setup.model)
        self._value = 0  # of every element: the version that was last sent
        self._workers: list[Remote] = []

    async def build(self) -> list[int]:
        """Make the sender's end and spawn the workers; returns their process ids once all are up."""
        fill(self._model, 0.0)
        self._end: SenderEnd = self._setup.ends()[0](self._setup, self._model)
        for index in range(self._setup.workers):
            recipe = await self._end.recipe(index)
            self._workers.append(Remote(Worker, self._setup, recipe, index, uvloop=self._setup.uvloop))
        await self._ask_all("look")  # each answers once it is up
        return [worker.pid for worker in self._workers]

    async def connect(self) -> None:
        """Connect both ends: each waits for the other."""
        await asyncio.gather(self._ask_all("connect"), _connect(self._end, "trainer", 0))

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
        reader, done = self._workers[0], 0
        await self._end.send(self._train(mode))  # from here on content equals version
        await reader.call("start", what="read")
        while done < sends or await reader.call("count_reads") < reads:
            await self._end.send(self._train(mode), off_loop=True)
            done += 1
            fill(self._model, -1.0)
        counts: ReadCounts = await reader.call("stop", what="read")
        counts.sends = done
        return counts

    async def suspended(self, mode: Mode, sends: int) -> dict[str, Any]:
        """Sends to the others while the last worker is stopped, and the most ``memory`` of the slots then."""
        seconds, memory = [], []
        with stopped([self._workers[-1].pid]):
            for _ in range(sends):
                start = time.perf_counter()
                await self._end.send_past_last()
                seconds.append(time.perf_counter() - start)
                memory.append(self._end.stats()["memory"])
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
        if "rpc" in self._setup.extras:
            rpc.shutdown(graceful=False)
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
        self._end: WorkerEnd = setup.ends()[1](setup, recipe, self._model, index)
        self._counts = ReadCounts()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._stopping = asyncio.Event()

    async def connect(self) -> None:
        """Receive the initial weights."""
        await _connect(self._end, f"worker{self._end.index}", 1 + self._end.index)

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
        """Return how many reads there were so far."""
        return self._counts.reads

    async def close(self) -> None:
        """Release the worker's end."""
        for task in self._tasks.values():
            task.cancel()
        await self._end.close()
        if "rpc" in self._end.setup.extras:
            rpc.shutdown(graceful=False)

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
        probe, last = Probe(self._model), None
        counts = self._counts = ReadCounts()
        while not self._stopping.is_set():
            value = self._judge(probe.read(), self._end.version())
            if value not in (None, last):
                last = value
                counts.versions += 1
            if counts.reads % PIN_EVERY == 0:
                async with self._end.pinned() as version:
                    before = probe.read()
                    await asyncio.sleep(0.0 if counts.reads % LONG_PIN_EVERY else LONG_PIN)
                    value = self._judge(probe.read(), version)
                counts.pinned += 1
                # torchrl has no pin: without a promise nothing can be broken.
                counts.moved += version is not None and value != before[0]
            await asyncio.sleep(0)
        return counts

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
        counts.skewed += version is not None and values[0] != version
        return values[0]
