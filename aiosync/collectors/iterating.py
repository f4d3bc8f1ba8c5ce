"""A collector's batches: who is asked for the next one, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from tensordict import TensorDict, TensorDictBase

from aiosync.collectors.batches import Joiner, split_trajectories
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.controls import Controls
from aiosync.collectors.fields import MASK
from aiosync.collectors.pool import Pool
from aiosync.collectors.proxy import Delivered, WorkerProxy
from aiosync.errors import InvalidArgumentError, SyncTimeoutError
from aiosync.transports._offload import offloaded
from aiosync.weights.copying import INLINE_LIMIT

__all__ = ["Iterating"]

_AHEAD = 2
"""Batches that a worker of an asynchronous collector is asked for at a time: one that it collects, and one
that waits to be taken meanwhile."""


class Iterating(Controls):
    """The part of a collector that is its iterator. Workers are asked for batches, each for one or two at a
    time; what they have delivered waits until the caller takes it.

    Args:
        config: all options.
        sync: a batch is of all workers, and no worker steps between two.

    Attributes:
        frames: how many have been handed out.
    """

    def __init__(self, config: CollectorConfig, *, sync: bool) -> None:
        self.config = config
        self.sync = sync
        self.frames = 0
        self._requested = 0
        self._finished: deque[Delivered] = deque()
        self._taking = asyncio.Lock()
        self._pauses = self._paused = 0
        self._going = asyncio.Event()
        self._going.set()
        self._joiner = Joiner(config.batch.cat_results)
        self._running: asyncio.Task[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next batch, a TensorDict; None if it went to a replay buffer.

        Raises:
            StopAsyncIteration: there have been ``total_frames``.
            Exception: what an environment or the policy raised in a worker, with its traceback.
            WorkerLostError: a worker died.
            SyncTimeoutError: there was none in time.
        """
        if self._is_enough:
            raise StopAsyncIteration
        pool = self._live
        if self.config.weights.update_at_each_batch:
            await self.update_policy_weights_()
        async with self._taking:
            if self._is_enough:  # others have taken the last ones
                raise StopAsyncIteration
            await self._until_it_goes_on()
            batch = await (self._next_of_all(pool) if self.sync else self._next_of_any(pool))
            return self._stored(batch)

    @property
    def _is_enough(self) -> bool:
        return self.frames >= self.config.batch.total_frames != -1

    async def _until_it_goes_on(self) -> None:
        deadline = self._deadline(None)
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                await self._going.wait()
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise deadline.error("receive", hint="the collector is paused") from exc

    def _stored(self, batch: TensorDictBase) -> Any:
        replay = self.config.replay
        if replay.replay_buffer is None:
            return batch
        if replay.extend_buffer and self.config.batch.split_trajs:
            replay.replay_buffer.extend(batch)
        elif replay.extend_buffer:
            flat = batch.reshape(-1)
            played = flat.get(MASK, None)
            replay.replay_buffer.extend(flat if played is None else flat[played])
        else:
            replay.replay_buffer.add(batch)
        return None

    async def _next_of_all(self, pool: Pool) -> TensorDictBase:
        config = self.config.batch
        at_random = self._is_random
        for worker in pool.workers:
            if not worker.asked and not worker.batches:  # what a cancelled call has asked for is taken now
                self._ask(worker, config.frames_of(worker.index, self.num_workers), at_random=at_random)
        enough = max(1, int(self.num_workers * config.preemptive_threshold))
        deadline = self._deadline(None)

        def delivered() -> int:
            return sum(bool(worker.batches) for worker in pool.workers)

        await pool.until(lambda: delivered() >= enough, deadline, "receive")
        if enough < self.num_workers:
            for worker in pool.workers:
                if not worker.batches:
                    worker.cut()
            await pool.until(lambda: delivered() >= self.num_workers, deadline, "receive")
        return await self._joined([worker.batches[0] for worker in pool.workers])

    async def _next_of_any(self, pool: Pool) -> TensorDictBase:
        deadline = self._deadline(None)
        self._keep_all_busy(pool, trained=True)
        while True:
            await pool.until(lambda: bool(self._finished), deadline, "receive")
            if self._is_fresh(self._finished[0]):
                found = await self._lent(self._finished[0])
                self._keep_all_busy(pool, trained=False)
                return found
            dropped = self._finished.popleft()
            dropped.taken()
            self._requested -= dropped.frames
            self._keep_all_busy(pool, trained=True)

    def _is_fresh(self, batch: Delivered) -> bool:
        allowed = self.config.weights.max_staleness
        if allowed is None:
            return True
        return self.policy_version - int(batch.read()["policy_version"].min()) <= allowed

    def _keep_all_busy(self, pool: Pool, *, trained: bool) -> None:
        """``trained``: the trainer has sent what it made of the batch that it was given last, if it does so
        after each."""
        # In turn, so that where few are let collect it is not always the same.
        for worker in sorted(pool.workers, key=lambda worker: worker.frames):
            self._keep_busy(pool, worker, trained=trained)

    def _delivered(self, delivered: Delivered) -> None:
        self._requested += delivered.frames - delivered.asked
        if not self.sync:
            self._finished.append(delivered)

    def _keep_busy(self, pool: Pool, worker: WorkerProxy, *, trained: bool) -> None:
        total = self.config.batch.total_frames
        frames = self.config.batch.frames_of(worker.index, 1)
        while worker.asked + len(worker.batches) < _AHEAD and not self._pauses:
            # The updates that there will be before this batch is handed out, if there is one after each.
            updates = sum(each.asked + len(each.batches) for each in pool.workers) + (not trained)
            if self._requested >= total != -1 or updates > self.config.weights.allowed_updates:
                return
            self._ask(worker, frames, at_random=self._is_random)

    @property
    def _is_random(self) -> bool:
        """Whether the next batch is one of those at the beginning that are acted at random."""
        return self._requested < self.config.batch.init_random_frames

    def _ask(self, worker: WorkerProxy, frames: int, *, at_random: bool) -> None:
        self._requested += frames
        worker.collect(frames, at_random=at_random)

    async def _joined(self, taken: Sequence[Delivered]) -> TensorDictBase:
        """Workers' parts as one batch, in memory of this process's own."""
        parts = [delivered.read() for delivered in taken]
        nbytes = sum(leaf.nbytes for part in parts for leaf in part.values(True, True))
        device = self.config.devices.of(0).storing

        def join() -> TensorDictBase:
            found = self._put_together(parts)
            return found if device is None else found.to(device)

        found = join() if nbytes <= INLINE_LIMIT else await offloaded(join, "aiosync-batch")
        # Nothing is taken before it is here: a call that is cancelled loses nothing.
        for delivered in taken:
            delivered.taken()
        return self._finish(found, sum(delivered.frames for delivered in taken))

    def _put_together(self, parts: Sequence[TensorDict]) -> TensorDictBase:
        return self._joiner.join(parts)

    async def _lent(self, taken: Delivered) -> TensorDictBase:
        """A worker's batch, in the memory that it has it in; or on a device."""
        device = self.config.devices.of(taken.worker.index).storing
        if device is None or device.type == "cpu":
            found: TensorDictBase = taken.lend()
        else:
            found = await offloaded(lambda: taken.read().to(device), "aiosync-batch")
            taken.taken()
        self._finished.popleft()
        return self._finish(found, taken.frames)

    def _finish(self, batch: TensorDictBase, frames: int) -> TensorDictBase:
        self.frames += frames
        found = split_trajectories(batch) if self.config.batch.split_trajs else batch
        postproc = self.config.batch.postproc
        return found if postproc is None else postproc(found)

    async def start(self) -> None:
        """Collect into the replay buffer from now on, beside whatever else runs on this event loop, until
        ``total_frames`` or :meth:`aclose`. What goes wrong is raised by the next call.

        Raises:
            InvalidArgumentError: there is no replay buffer.
        """
        if self.config.replay.replay_buffer is None:
            raise InvalidArgumentError("start() collects into a replay buffer: give replay_buffer=")
        if self._running is None:
            self._running = asyncio.create_task(self._run(self._live), name="aiosync-collecting")

    async def _run(self, pool: Pool) -> None:
        try:
            while not self._is_enough:
                await self._going.wait()
                pauses = self._paused
                try:
                    await anext(self)
                except SyncTimeoutError:
                    if pauses == self._paused:  # else a pause has taken that long
                        raise
                await asyncio.sleep(0)  # the next batch may be there already
        except Exception as exc:  # noqa: BLE001 - raised by the next call
            pool.fail(exc)

    def _drop(self) -> None:
        self._finished.clear()
        for worker in self._live.workers:
            for batch in list(worker.batches):
                batch.taken()

    @asynccontextmanager
    async def pause(self, timeout: float | None = None) -> AsyncIterator[None]:
        """No worker steps inside: the workers finish what they are collecting first. They always
        go on afterwards.

        Raises:
            Exception: as the iterator.
            SyncTimeoutError: they have not come to an end in time.
        """
        pool = self._live
        self._pauses += 1
        self._paused += 1
        self._going.clear()
        try:
            await pool.until(
                lambda: not any(worker.asked for worker in pool.workers), self._deadline(timeout), "receive"
            )
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._going.set()
            if not self.sync and self._is_live(pool):
                self._keep_all_busy(pool, trained=False)
