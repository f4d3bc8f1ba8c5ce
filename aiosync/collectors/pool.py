"""The workers of a collector: how they begin, begin again and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from aiosync._deadline import Deadline
from aiosync.collectors.host import MakeHost, Schemes
from aiosync.collectors.proxy import DeliveredBatch, WorkerProxy
from aiosync.collectors.worker import WorkerSpec
from aiosync.errors import NotConnectedError, Phase, SyncTimeoutError, WorkerLostError
from aiosync.events import logger
from aiosync.transports._tasks import BackgroundTasks

__all__ = ["Pool"]

_GENERATION = 1 << 32
"""Trajectories' numbers that a worker is given before those of its successor: more than it can use."""


class Pool:
    """Workers, and the schemes that bring their weights.

    A waiting call is woken by each message of a worker, and raises if a worker has failed for good. A
    worker that has died is replaced, as often as that may be: by one that has its index, its seed and the
    newest weights, that is asked for what was asked of the other, and that keeps what the other has
    delivered.

    Args:
        specs: the workers.
        schemes: model -> scheme, initialised on the sender.
        make_host: gives what one worker runs on.
        restarts: how often each worker may be replaced.
        on_batch: called with each batch as it is delivered.

    Attributes:
        workers: those that are there now, by their index.
        failure: an error that no call was waiting for.
        counted: updates that came by none of the schemes.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        schemes: Schemes,
        make_host: MakeHost,
        restarts: int,
        on_batch: Callable[[DeliveredBatch], None],
    ) -> None:
        self.workers: list[WorkerProxy] = []
        self._closing: list[WorkerProxy] = []
        self.failure: Exception | None = None
        self.extra_updates = 0
        self._specs = list(specs)
        self._schemes = dict(schemes)
        self._make_host = make_host
        self._restarts = [restarts] * len(specs)
        self._on_batch = on_batch
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks("aiosync-collector")
        self._stack = AsyncExitStack()

    def fail(self, error: Exception) -> None:
        """Record an error that no call was waiting for. Calls that wait for workers will raise it."""
        self.failure = self.failure or error
        self._changed.set()

    async def start(self, deadline: Deadline) -> None:
        """Start the workers, and wait until each can play.

        Raises:
            Exception: what an environment or a policy raised.
            WorkerLostError: a worker died.
            SyncTimeoutError: not all were ready in time.
        """
        await self._tasks.start()
        for scheme in self._schemes.values():
            self._stack.push_async_callback(scheme.aclose)
        self.workers = [self._make_worker(index) for index in range(len(self._specs))]
        # All of them, whatever becomes of one: who is being started is to be seen to its end.
        starting = (worker.start(self._schemes) for worker in self.workers)
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if outcome is not None:
                raise outcome
        connecting = [
            asyncio.ensure_future(scheme.connect(timeout=deadline.remaining()))
            for scheme in self._schemes.values()
        ]
        try:
            await self.wait_for(lambda: all(worker.ready for worker in self.workers), deadline, "connect")
            await asyncio.gather(*connecting)
        finally:
            await _cancel_all(connecting)

    def _make_worker(self, index: int) -> WorkerProxy:
        return WorkerProxy(self._specs[index], self._make_host(), self._on_change, self._on_batch)

    def _on_change(self, worker: WorkerProxy) -> None:
        if isinstance(worker.error, WorkerLostError) and self._may_replace(worker):
            self._restarts[worker.index] -= 1
            worker.replaced = True
            logger.warning("collector worker %d is started again: %s", worker.index, worker.error)
            self._tasks.spawn(self._replace, worker)
        self._changed.set()

    def _may_replace(self, worker: WorkerProxy) -> bool:
        current = worker in self.workers and not worker.replaced
        return current and worker.was_ready and self._restarts[worker.index] > 0

    def is_replaced(self, worker: WorkerProxy) -> bool:
        """Whether another has its place, or will have it now that it is lost; or it is itself that other one,
        which has not come yet."""
        if worker not in self.workers or worker.replaced:
            return True
        begins = worker.error is None and not worker.was_ready
        return begins or self._may_replace(worker)

    async def _replace(self, lost: WorkerProxy) -> None:
        index = lost.index
        spec = self._specs[index]
        first = spec.first_id + spec.stride * _GENERATION
        self._specs[index] = replace(spec, first_id=first, seed=lost.seed, extra_updates=self.extra_updates)
        successor = self._make_worker(index)
        successor.take_over(lost)
        self.workers[index] = successor
        await lost.close(Deadline.after(0))
        try:
            await successor.start(self._schemes)
        except Exception as exc:  # noqa: BLE001 - raised in the call that waits for this worker
            successor.fail(WorkerLostError([index], f"it could not be started again: {exc}"))

    async def wait_for(self, true: Callable[[], bool], deadline: Deadline, phase: Phase) -> None:
        """Wait.

        Raises:
            Exception: why a worker has failed, if it is not replaced.
            SyncTimeoutError: it did not come true in time.
        """
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                while not true():
                    self.check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            if not limit.expired():
                raise
            late = [worker.index for worker in self.workers if not worker.ready or worker.requested]
            hint = "they have not delivered" if phase == "receive" else "they are not ready"
            raise SyncTimeoutError(phase, workers=late, seconds=deadline.seconds, hint=hint) from exc

    def check(self) -> None:
        """Raise what a worker has failed with, if one has, or what went wrong elsewhere."""
        if self.failure is not None:
            raise self.failure
        for worker in self.workers:
            if worker.error is not None and not worker.replaced:
                raise worker.error

    async def call(self, method: str, each: Mapping[int, Sequence[Any]], deadline: Deadline) -> list[Any]:
        """Call a method of some workers, each with arguments of its own; of a worker's successor too, if it
        dies before it has answered.

        Raises:
            Exception: what one of the methods raises, or why a worker has failed.
            SyncTimeoutError: not all have answered in time.
        """
        calls = [
            asyncio.ensure_future(self._call(index, method, given, deadline)) for index, given in each.items()
        ]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            await _cancel_all(calls)

    def start_trajectories_at(self, next_ids: Sequence[int]) -> None:
        """Worker ``i`` has used no trajectory's number from ``next_ids[i]`` on."""
        for index, following in enumerate(next_ids):
            spec = self._specs[index]
            steps = -(-(following - spec.first_id) // spec.stride)
            self._specs[index] = replace(spec, first_id=spec.first_id + max(0, steps) * spec.stride)

    async def _call(self, index: int, method: str, given: Sequence[Any], deadline: Deadline) -> Any:
        while True:
            await self.wait_for(lambda: self.workers[index].ready, deadline, "receive")
            worker = self.workers[index]
            try:
                return await worker.call(method, *given, deadline=deadline)
            except WorkerLostError:
                if not self.is_replaced(worker):
                    raise

    async def aclose(self, deadline: Deadline) -> None:
        """End the workers; those that do not end by themselves are killed. Idempotent."""
        closed = NotConnectedError("this collector was closed meanwhile")
        self.fail(closed)
        async with self._stack:
            try:
                await self._tasks.aclose()
            finally:
                self._closing, self.workers = self.workers, []
                for worker in self._closing:
                    worker.fail_calls(closed)
                    worker.close_pipe()
                await asyncio.gather(*(worker.close(deadline) for worker in self._closing))

    def kill(self) -> None:
        """Kill all workers, so that :meth:`aclose` does not wait for them."""
        for worker in (*self.workers, *self._closing):
            worker.kill()


async def _cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Have none of them go on by itself."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
