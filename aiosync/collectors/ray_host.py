"""Workers that are actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

from aiosync.collectors.command_pipe import CommandPipe, CommandPipeClosed, LocalCommandPipe
from aiosync.collectors.host import Host
from aiosync.collectors.worker import Schemes, WorkerSpec, run_worker
from aiosync.transports._offload import handover


@dataclass(eq=False)
class RayHost(Host):
    """Runs a worker in a Ray actor."""

    ray: Any  # the module
    options: Mapping[str, Any]  # Ray's, for the actor
    _handle: Any = None

    async def start(self, spec: WorkerSpec, schemes: Schemes) -> CommandPipe:
        # An async actor: a call that waits for messages does not block other calls.
        self._handle = self.ray.remote(_WorkerActor).options(**self.options).remote()
        self._running = _as_future(self._handle.run.remote(cloudpickle.dumps(spec), dict(schemes)))
        return _RayCommandPipe(self._handle)

    def kill(self) -> None:
        if self._handle is not None:
            self.ray.kill(self._handle)

    def cause(self) -> str:
        if self._running is None or not self._running.done():
            return "its actor sends nothing more, but still runs"
        error = self._running.exception()
        if error is None:
            return "its actor has ended"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"Ray reports: {' '.join(lines)[:400]}"

    def release(self) -> None:
        self.kill()  # an idle actor stays alive as long as a process has its handle
        self._handle = self._running = None


def _as_future(pending: Any) -> asyncio.Future[Any]:
    answer: asyncio.Future[Any]
    answer, settle = handover()
    pending.future().add_done_callback(lambda done: settle(done.result))
    return answer


class _WorkerActor:
    """The actor: runs a worker on its event loop."""

    def __init__(self) -> None:
        self._ours, self._theirs = LocalCommandPipe.pair()
        self._expected = 0
        self._out_of_order: dict[int, bytes | None] = {}

    async def run(self, spec: bytes, schemes: Schemes) -> None:
        """Run a worker until the collector closes the pipe."""
        await run_worker(partial(cloudpickle.loads, spec), schemes, self._theirs)

    async def deliver(self, number: int, data: bytes | None) -> None:
        """Deliver message ``number`` to the worker; None closes the pipe. Ray may run the calls of an async
        actor in another order."""
        self._out_of_order[number] = data
        while self._expected in self._out_of_order:
            message = self._out_of_order.pop(self._expected)
            self._expected += 1
            if message is None:
                self._ours.close()
            else:
                self._ours.send(cloudpickle.loads(message))

    async def messages(self) -> list[Any]:
        """Wait for messages of the worker and return them; an empty list after the last one."""
        try:
            return await self._ours.receive_all()
        except CommandPipeClosed:
            return []


@dataclass(eq=False)
class _RayCommandPipe(CommandPipe):
    _handle: Any
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _received: list[Any] = field(default_factory=list)  # newest first
    _pending: asyncio.Future[Any] | None = None
    _closed: bool = False

    def send(self, message: object) -> None:
        if not self._closed:
            self._handle.deliver.remote(next(self._numbers), cloudpickle.dumps(message))

    async def receive(self) -> Any:
        if not self._received:
            if self._pending is None:  # else a cancelled receive() has made the call
                self._pending = _as_future(self._handle.messages.remote())
            await asyncio.wait([self._pending])
            pending, self._pending = self._pending, None
            try:
                self._received = list(reversed(pending.result()))
            except Exception as exc:
                raise CommandPipeClosed("the actor has ended") from exc
        if not self._received:
            raise CommandPipeClosed("the actor has closed the pipe")
        return self._received.pop()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.deliver.remote(next(self._numbers), None)
