"""The workers of a collector: their start, their replacement and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiosync._deadline import Deadline, DeadlineTimer
from aiosync.collectors.host import MakeHost
from aiosync.collectors.proxy import DeliveredBatch, WorkerProxy
from aiosync.collectors.worker import cancel_all
from aiosync.collectors.worker_spec import Schemes, WorkerSpec
from aiosync.errors import (
    LayoutMismatchError,
    NotConnectedError,
    Phase,
    SyncTimeoutError,
    WorkerError,
    WorkerLostError,
)
from aiosync.events import logger
from aiosync.transports._tasks import BackgroundTasks

_GENERATION = 1 << 32
"""Distance between the trajectory numbers of a worker and those of its successor, in trajectories: more than
a worker can collect."""

_EXIT_SECONDS = 1.0
"""Seconds within which the error of a worker with a broken connection must arrive."""


@dataclass(eq=False, repr=False)
class Pool:
    """The workers, and the schemes that deliver their weights.

    A call that waits is woken by each message of a worker. It raises if a worker has failed for good. A dead
    worker is replaced, as often as ``restarts`` allows. The successor has its index, its seed and the newest
    weights. It gets the open requests of the dead worker, and keeps the batches that the dead worker
    delivered.
    """

    specs: list[WorkerSpec]  # of the next start of each worker
    schemes: Schemes  # initialised on the sender
    make_host: MakeHost
    restarts: list[int]  # how often each worker may still be replaced
    on_batch: Callable[[DeliveredBatch], None]  # called with each batch that a worker delivers
    workers: list[WorkerProxy] = field(default_factory=list)  # the current ones, by index
    extra_updates: int = 0  # updates of the policy that no scheme counts
    _closing: list[WorkerProxy] = field(default_factory=list)  # the workers that aclose() is ending
    _failure: Exception | None = None  # raised by the next call
    # What the calls of wait_for() wait for: resolved when its condition is true, or a worker has failed.
    _waiting: dict[asyncio.Future[None], Callable[[], bool]] = field(default_factory=dict)
    _timer: DeadlineTimer = field(default_factory=DeadlineTimer)
    _tasks: BackgroundTasks = field(default_factory=lambda: BackgroundTasks("aiosync-collector"))

    def fail(self, error: Exception) -> None:
        """Record an error for the calls that wait for workers, now or later. Only the first error is kept."""
        self._failure = self._failure or error
        self.notify()

    def notify(self) -> None:
        """Let :meth:`wait_for` check its condition again."""
        for future, true in self._waiting.items():
            if not future.done() and (self._error() is not None or true()):
                future.set_result(None)

    async def start(self, deadline: Deadline) -> None:
        """Start the workers, and wait until each is ready. Raises what an environment, a policy or a
        scheme raised."""
        await self._tasks.start()
        self.workers = [self._make_worker(index) for index in range(len(self.specs))]
        # Wait for all starts even if one fails: a worker whose start is not awaited could not be closed.
        starting = (worker.start(self.schemes) for worker in self.workers)
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if outcome is not None:
                raise outcome
        await self._connect(deadline)

    async def _connect(self, deadline: Deadline) -> None:
        """Connect the schemes, and wait until all workers are ready. Raises why a worker failed, or the first
        error of a scheme."""
        seconds = deadline.remaining()
        each = [asyncio.ensure_future(scheme.connect(timeout=seconds)) for scheme in self.schemes.values()]
        connected = asyncio.gather(*each)  # done when all are, or one has failed
        connected.add_done_callback(lambda _: self.notify())

        def failed() -> bool:
            return connected.done() and connected.exception() is not None

        try:
            await self.wait_for(lambda: failed() or all(w.ready for w in self.workers), deadline, "connect")
            await connected
        except (WorkerError, LayoutMismatchError):  # of a worker: it may report what it has raised
            await self._wait_for_report()
            raise
        finally:
            await cancel_all(connected, *each)

    async def _wait_for_report(self) -> None:
        """Raise why a worker failed. Return if none reports an error within :data:`_EXIT_SECONDS`."""
        with suppress(SyncTimeoutError):
            await self.wait_for(lambda: self._error() is not None, Deadline.after(_EXIT_SECONDS), "connect")
        self.check()

    def _make_worker(self, index: int) -> WorkerProxy:
        return WorkerProxy(self.specs[index], self.make_host(), self._on_change, self.on_batch)

    def _on_change(self, worker: WorkerProxy) -> None:
        if isinstance(worker.error, WorkerLostError) and self._may_replace(worker):
            self.restarts[worker.index] -= 1
            worker.replaced = True
            logger.warning("collector worker %d died and is started again: %s", worker.index, worker.error)
            self._tasks.spawn(self._replace, worker)
        self.notify()

    def _may_replace(self, worker: WorkerProxy) -> bool:
        current = worker in self.workers and not worker.replaced
        return current and worker.was_ready and self.restarts[worker.index] > 0

    def is_replaced(self, worker: WorkerProxy) -> bool:
        """Return whether a worker has a successor, or will have one if it is lost, or is a successor that has
        not been ready yet."""
        if worker not in self.workers or worker.replaced:
            return True
        begins = worker.error is None and not worker.was_ready
        return begins or self._may_replace(worker)

    async def _replace(self, lost: WorkerProxy) -> None:
        index = lost.index
        spec = self.specs[index]
        first = spec.first_id + spec.stride * _GENERATION
        seed = spec.seed if lost.seed is None else lost.seed
        self.specs[index] = replace(spec, first_id=first, seed=seed, extra_updates=self.extra_updates)
        successor = self._make_worker(index)
        successor.take_over(lost)
        self.workers[index] = successor
        await lost.close(Deadline.after(0))
        try:
            await successor.start(self.schemes)
        except Exception as exc:  # noqa: BLE001 - raised in the call that waits for this worker
            successor.fail(WorkerLostError([index], f"it could not be started again: {exc}"))

    async def wait_for(self, true: Callable[[], bool], deadline: Deadline, phase: Phase) -> None:
        """Wait until ``true()`` returns True. It is called again after each message of a worker. Raises why a
        worker failed, if it is not replaced."""
        while not true():
            self.check()
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = true
            try:
                await self._timer.wait(future, deadline)
            finally:
                del self._waiting[future]
            if not deadline.remaining() and not true():
                self.check()
                late = [worker.index for worker in self.workers if not worker.ready or worker.requested]
                hint = "they have not delivered" if phase == "receive" else "they are not ready"
                raise SyncTimeoutError(phase, workers=late, seconds=deadline.seconds, hint=hint)

    def check(self) -> None:
        """Raise the recorded error, or that of a worker that failed and is not replaced."""
        error = self._error()
        if error is not None:
            raise error

    def _error(self) -> BaseException | None:
        if self._failure is not None:
            return self._failure
        for worker in self.workers:
            if worker.error is not None and not worker.replaced:
                return worker.error
        return None

    async def raise_unless_replaced(self, lost: Sequence[WorkerProxy], error: WorkerLostError) -> None:
        """Raise the error of a lost worker, or ``error`` if no reason is known. Return if each lost worker
        has a successor: it begins with the newest weights."""
        if all(self.is_replaced(worker) for worker in lost):
            return
        try:
            deadline = Deadline.after(_EXIT_SECONDS)
            await self.wait_for(lambda: all(each.error is not None for each in lost), deadline, "receive")
        except SyncTimeoutError:
            raise error from None
        self.check()
        if not all(self.is_replaced(worker) for worker in lost):
            raise error

    async def call(self, method: str, each: Mapping[int, Sequence[Any]], deadline: Deadline) -> list[Any]:
        """Call a method of some workers: worker index -> arguments. If a worker dies before it has answered,
        its successor is called. Raises what one of the methods raises, or why a worker failed."""
        calls = [asyncio.ensure_future(self._call(i, method, args, deadline)) for i, args in each.items()]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            await cancel_all(*calls)

    def start_trajectories_at(self, next_ids: Sequence[int]) -> None:
        """Let successors of worker ``i`` number their trajectories from ``next_ids[i]`` on, or higher."""
        for index, following in enumerate(next_ids):
            spec = self.specs[index]
            steps = -(-(following - spec.first_id) // spec.stride)
            self.specs[index] = replace(spec, first_id=spec.first_id + max(0, steps) * spec.stride)

    async def _call(self, index: int, method: str, given: Sequence[Any], deadline: Deadline) -> Any:
        while True:
            await self.wait_for(lambda: self.workers[index].ready, deadline, "receive")
            worker = self.workers[index]
            try:
                return await worker.call(method, given, deadline)
            except WorkerLostError:
                if not self.is_replaced(worker):
                    raise

    async def aclose(self, deadline: Deadline) -> None:
        """End the workers. Those that do not end by the deadline are killed. Idempotent."""
        self.fail(NotConnectedError("this collector was closed during the call"))
        self._timer.close()
        try:
            await self._tasks.aclose()
        finally:
            self._closing, self.workers = self.workers, []
            await asyncio.gather(*(worker.close(deadline) for worker in self._closing))

    def kill(self) -> None:
        """Kill all workers, so that :meth:`aclose` does not wait for them."""
        for worker in (*self.workers, *self._closing):
            worker.host.kill()
