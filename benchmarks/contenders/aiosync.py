"""aiosync's schemes, as its README uses them, with every option at its default but those of the setup.

Extras of a setup: ``mbit`` is the rate of each TCP connection in megabits per second (0: unlimited), and
``relays`` how many relays stand between the trainer and the workers.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any

import aiosync
from benchmarks.contenders import MODEL_ID, SenderEnd, Sent, Setup, Weights, WorkerEnd
from benchmarks.harness.trainer import SPAWN, Remote

TIMEOUT = 120.0  # seconds that any one call may take
_SO_MAX_PACING_RATE = 47


def limit_rate(mbit: float, scheme: Any) -> None:
    """Have the kernel send at most ``mbit`` megabits per second over each connection of a TCP sender (0: no
    limit). A connection inherits the option of the listening socket, so call it before the first."""
    if mbit:
        listening: socket.socket = scheme._listener._socket
        listening.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(mbit * 1e6 / 8))


def ends(setup: Setup) -> tuple[type[SenderEnd], type[WorkerEnd]]:
    """The sender's end, and a receiver task beside the worker's loop."""
    return _Sender, _Worker


def _make_scheme(setup: Setup) -> Any:
    return aiosync.WeightSyncScheme.from_backend(setup.scheme, timeout=TIMEOUT, **setup.options)


class _Sender(SenderEnd):
    def __post_init__(self) -> None:
        self._scheme = _make_scheme(self.setup)
        self._relays: list[Remote] = []
        self._addresses: list[str] = []
        if self.setup.scheme != "rpc":  # which is initialized when this process has joined torch RPC
            self._initialize()
        if self.setup.scheme == "tcp":
            mbit = self.setup.extras.get("mbit", 0.0)
            limit_rate(mbit, self._scheme)
            for _ in range(self.setup.extras.get("relays", 0)):
                self._relays.append(Remote(_Relay, self._scheme.address, mbit))

    def _initialize(self) -> None:
        # To TCP, any worker may connect.
        given: dict[str, Any] = {} if self.setup.scheme == "tcp" else {"num_workers": self.setup.workers}
        if self.setup.scheme in ("shared", "process"):
            given["ctx"] = SPAWN
        self._scheme.init_on_sender(model_id=MODEL_ID, model=self.model, **given)

    async def recipe(self, index: int) -> Any:
        if self.setup.scheme == "rpc":
            return None
        if not self._relays:
            return self._scheme
        if not self._addresses:
            self._addresses = [await relay.call("address") for relay in self._relays]
        return aiosync.TCPWeightSyncScheme(self._addresses[index % len(self._addresses)], timeout=TIMEOUT)

    async def connect(self) -> None:
        if self.setup.scheme == "rpc":
            self._initialize()
        expected = len(self._relays) or self.setup.workers
        await self._scheme.connect(**{"min_workers": expected} if self.setup.scheme == "tcp" else {})

    async def send(self, weights: Weights | None, *, off_loop: bool = False) -> Sent:
        report = await self._scheme.send(weights)
        seconds = (worker.seconds for worker in report.workers.values())
        return Sent([each["commit"] for each in seconds if "commit" in each], dict(report.seconds))

    async def send_past_last(self) -> None:
        *others, _ = self._scheme.workers
        await self._scheme.send(wait=False)
        await self._scheme.wait_ack(others)

    def stats(self) -> dict[str, int]:
        stats = self._scheme.stats
        return {"memory": stats.memory, "wire_nbytes": stats.wire_nbytes}

    async def close(self) -> None:
        await self._scheme.aclose()
        for relay in self._relays:
            await relay.close(TIMEOUT)


class _Worker(WorkerEnd):
    def __post_init__(self) -> None:
        self._scheme = self.recipe or _make_scheme(self.setup)
        self._receiving = AsyncExitStack()

    async def connect(self) -> None:
        # Below a relay, indices are counted per relay: the relay gives them out.
        index = None if self.setup.extras.get("relays") else self.index
        self._scheme.init_on_receiver(model_id=MODEL_ID, model=self.model, worker_idx=index)
        await self._scheme.connect()
        await self._receiving.enter_async_context(self._scheme.receiving())

    def version(self) -> Any:
        return self._scheme.version

    def pinned(self) -> Any:
        return self._scheme.pinned()

    async def close(self) -> None:
        # The task that answers calls entered the receiver task, and leaves it too.
        await self._receiving.aclose()
        await self._scheme.aclose()


class _Relay:
    """A relay in a process of its own."""

    def __init__(self, upstream: str, mbit: float) -> None:
        above = aiosync.TCPWeightSyncScheme(upstream, timeout=TIMEOUT)
        below = aiosync.TCPWeightSyncScheme(timeout=TIMEOUT)
        self._node = aiosync.WeightRelay(above, below, model_id=MODEL_ID)
        limit_rate(mbit, below)
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        async with self._node:
            await self._node.wait_closed()

    async def address(self) -> str:
        return self._node.address

    async def close(self) -> None:
        await self._serving
