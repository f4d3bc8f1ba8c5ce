"""The iterator of a collector: requests batches from the workers and returns them."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self, cast

import torch
from tensordict import TensorDictBase

from aiosync._processors import current_processor
from aiosync.collectors.access import WorkerAccess
from aiosync.collectors.batch_buffers import BatchBuffer
from aiosync.collectors.batch_memory import BatchJoiner, split_trajectories, valid_frames
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.proxy import DeliveredBatch, WorkerProxy
from aiosync.collectors.versions import VERSION
from aiosync.errors import NotInitializedError, OptionConflictError, SyncTimeoutError
from aiosync.transports._offload import offloaded
from aiosync.weights.copying import INLINE_LIMIT

_REQUESTED_AHEAD = 2
"""Batches of an asynchronous collector that a worker may have requested or delivered at a time: one in
progress, and one that the caller has not taken yet."""


class EndOfBatches(Exception):
    """The iterator has returned its last batch."""


class BatchIterator(WorkerAccess):
    """The part of a collector that is its asynchronous iterator.

    Each worker has one or two batches requested at a time. A delivered batch waits here until the caller
    takes it.
    """

    def __init__(self, config: CollectorConfig, *, sync: bool) -> None:
        self.config = config
        self.sync = sync  # each batch has a part from every worker, and no worker steps between two batches
        self.frames = 0  # how many the iterator has returned, and in how many batches
        self.batches = 0
        self._requested = 0  # frames of all requested batches, delivered or not; dropped ones do not count
        # Delivered batches of an asynchronous collector that the caller has not taken, oldest first.
        self._finished: deque[DeliveredBatch] = deque()
        self._next_lock = asyncio.Lock()
        self._active_pauses = 0
        self._pauses_begun = 0  # a timeout during a pause is distinguished from others
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        ragged = config.batch.enough_of(self.num_workers) < self.num_workers
        self._joiner = BatchJoiner(config.batch.join_dim, may_differ=ragged)
        self._collecting: asyncio.Task[None] | None = None  # the task of start()
        self._parked = False  # that task holds no batch, and waits for the end of the pause, if there is one
        self._held_back = False  # who has _next_lock holds no batch, and waits for the end of the pause

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TensorDictBase:
        """Return the next batch. With a replay buffer, which has got the batch, it is None instead.

        Raises:
            StopAsyncIteration: ``total_frames`` have been returned.
            Exception: what an environment or the policy raised in a worker, with the worker's traceback as
                its cause.
            WorkerLostError: a worker died.
            SyncTimeoutError: no batch was complete in time.
        """
        if self._is_done:
            raise StopAsyncIteration
        pool = self._connected_pool
        if self.config.weights.update_at_each_batch:
            await self.update_policy_weights_()
        async with self._next_lock:
            if self._is_done:  # concurrent calls took the last batches
                raise StopAsyncIteration
            await self._wait_while_paused()
            try:
                found = await self._next_batch(pool)
                self.batches += 1
                # None only goes to callers who have given a replay buffer: the type is that for all others.
                return cast(TensorDictBase, found)
            except EndOfBatches:
                raise StopAsyncIteration from None
            except (
                StopAsyncIteration
            ) as exc:  # of an environment, a policy, a hook: it would end the iteration
                raise RuntimeError(f"collection raised StopAsyncIteration: {exc}") from exc

    async def _next_batch(self, pool: Pool) -> TensorDictBase | None:
        """Return the next batch. EndOfBatches: there is none."""
        return await (self._next_sync_batch(pool) if self.sync else self._next_async_batch(pool))

    @property
    def _is_done(self) -> bool:
        return self.frames >= self.config.batch.frames_limit

    async def _wait_while_paused(self) -> None:
        """Wait for the end of a pause. The caller has ``_next_lock``."""
        if self._not_paused.is_set():
            return
        deadline = self._deadline(None)
        self._held_back = True
        if self._pool is not None:
            self._pool.notify()  # the pause waits for this
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self._unpaused()
        except TimeoutError as exc:
            raise deadline.error("receive", hint="the collector is paused") from exc
        finally:
            self._held_back = False

    async def _unpaused(self) -> None:
        while not self._not_paused.is_set():  # the next pause may have begun before this task runs
            await self._not_paused.wait()

    @property
    def _at_random(self) -> bool:
        """Whether the next batch is to be of random actions. Frames that the replay buffer has had before
        count too."""
        written = getattr(self.config.replay.replay_buffer, "write_count", self.frames)
        return written + self._requested - self.frames < self.config.batch.random_frames

    async def _next_sync_batch(self, pool: Pool) -> TensorDictBase | None:
        config = self.config.batch
        at_random = self._at_random  # the same for all parts
        here = current_processor()
        # Linux may move a woken worker from this thread's processor to an idle one: not to one that another
        # worker is about to begin on.
        for worker in sorted(pool.workers, key=lambda worker: worker.spec.processor == here):
            if not worker.requested and not worker.batches:  # else a cancelled call requested it
                self._request(worker, config.frames_of(worker.index, self.num_workers), at_random=at_random)
        enough = config.enough_of(self.num_workers)
        deadline = self._deadline(None)

        def delivered() -> int:
            return sum(bool(worker.batches) for worker in pool.workers)

        if enough < self.num_workers:
            await pool.wait_for(lambda: delivered() >= enough, deadline, "receive")
            for worker in pool.workers:
                if not worker.batches:
                    worker.end_early()
        elif self.num_workers > 1 and self.config.replay.replay_buffer is None:
            await pool.wait_for(lambda: bool(delivered()), deadline, "receive")
            self._prepare_join(next(worker.batches[0] for worker in pool.workers if worker.batches))
        await pool.wait_for(lambda: delivered() >= self.num_workers, deadline, "receive")
        parts = [worker.batches[0] for worker in pool.workers]
        if self.config.replay.replay_buffer is None:
            return await self._join_parts(parts)
        for part in parts:
            await self._store(part)
        return None

    async def _next_async_batch(self, pool: Pool) -> TensorDictBase | None:
        deadline = self._deadline(None)
        self._request_from_all(pool, trained=True)
        while True:
            await pool.wait_for(lambda: bool(self._finished), deadline, "receive")
            if self._is_fresh(first := self._finished[0]):
                stores = self.config.replay.replay_buffer is not None
                found = await (self._store(first) if stores else self._lend(first))
                self._request_from_all(pool, trained=False)
                return found
            self._drop(self._finished.popleft())
            self._request_from_all(pool, trained=True)

    def _drop(self, batch: DeliveredBatch) -> None:
        """Forget a batch that is too old."""
        batch.release()
        self._requested -= batch.frames

    def _is_fresh(self, batch: DeliveredBatch) -> bool:
        allowed = self.config.weights.max_staleness
        if allowed is None:
            return True
        return self._version_number - int(batch.part().data[VERSION].min()) <= allowed

    def _on_delivered(self, part: DeliveredBatch) -> None:
        self._requested += part.frames - part.requested
        if not self.sync:
            self._finished.append(part)

    def _request_from_all(self, pool: Pool, *, trained: bool) -> None:
        """Request batches from all workers that may collect more. ``trained``: the trainer has sent the
        update for the batch that it took last, if it sends one after each batch."""
        config, limit = self.config.batch, self.config.batch.frames_limit
        # The worker with the fewest frames first: if only some may collect, it is not always the same ones.
        for worker in sorted(pool.workers, key=lambda worker: worker.frames):
            frames = config.frames_of(worker.index, 1)
            while worker.requested + len(worker.batches) < _REQUESTED_AHEAD and not self._active_pauses:
                # The updates before this batch is returned, if the trainer sends one after each batch.
                updates = sum(each.requested + len(each.batches) for each in pool.workers) + (not trained)
                if self._requested >= limit or updates > self.config.weights.allowed_updates:
                    return
                self._request(worker, frames, at_random=self._at_random)

    def _request(self, worker: WorkerProxy, frames: int, *, at_random: bool) -> None:
        self._requested += frames
        worker.collect(frames, at_random=at_random)

    def _prepare_join(self, first: DeliveredBatch) -> None:
        """Do what can be done before the other parts are delivered."""
        if isinstance(first.data, BatchBuffer):
            part = first.part()
            if self.num_workers * part.nbytes <= INLINE_LIMIT:
                self._joiner.prepare(part, self.num_workers, first.worker.nested)

    async def _join_parts(self, delivered: Sequence[DeliveredBatch]) -> TensorDictBase:
        """Join the workers' parts into one batch, in memory of this process."""
        parts = [each.part() for each in delivered]
        nbytes = sum(part.nbytes for part in parts)
        nested = delivered[0].worker.nested
        device = self._storing_devices[0]

        def join() -> TensorDictBase:
            found = self._joiner.join(parts, nested)
            return found if device is None else found.to(device)

        found = join() if nbytes <= INLINE_LIMIT else await offloaded(join, "aiosync-batch")
        # Released only now: a cancelled call loses no batch.
        for part in delivered:
            part.release()
        return self._finish(found, delivered)

    @functools.cached_property
    def _storing_devices(self) -> list[torch.device | None]:
        """Where batches of each worker go; None: they stay in shared memory."""
        return [self.config.devices.of(worker).storing for worker in range(self.num_workers)]

    async def _lend(self, delivered: DeliveredBatch) -> TensorDictBase:
        """Return a worker's batch, in the memory that the worker wrote, or copied to ``storing_device``."""
        device = self._storing_devices[delivered.worker.index]
        if device is None or device.type == "cpu":
            found: TensorDictBase = delivered.lend()
        else:
            found = await offloaded(lambda: delivered.read().to(device), "aiosync-batch")
            delivered.release()
        if not self.sync:
            self._finished.popleft()
        return self._finish(found, [delivered])

    async def _store(self, delivered: DeliveredBatch) -> None:
        """Write a worker's batch into the replay buffer. The buffer stays in this process: it need not be
        shared, and a worker that is killed holds no lock of it."""
        found = await self._lend(delivered)
        self._write(found, whole=delivered.worker.whole)

    def _write(self, found: TensorDictBase, *, whole: bool) -> None:
        replay = self.config.replay
        if not whole and not self.config.batch.split_trajs:
            found = valid_frames(found)
        if not found.numel():
            return  # all steps were skipped
        if replay.extend_buffer:
            replay.replay_buffer.extend(found)
        else:
            for step in found.unbind(found.batch_dims - 1):
                replay.replay_buffer.add(step)

    def _finish(self, batch: TensorDictBase, parts: Sequence[DeliveredBatch]) -> TensorDictBase:
        """Count a batch, which consists of these parts, and return it as the options say."""
        self.frames += sum(part.frames for part in parts)
        found = split_trajectories(batch) if self.config.batch.split_trajs else batch
        self._name_versions()
        self._versions.write_names(found)
        postproc = self.config.batch.postproc
        return found if postproc is None else postproc(found)

    async def start(self) -> None:
        """Collect into the replay buffer, in a task of this event loop, until ``total_frames`` or
        :meth:`aclose`. An error is raised by the next call to the collector.

        Raises:
            NotInitializedError: there is no replay buffer.
        """
        if self.config.replay.replay_buffer is None:
            raise NotInitializedError("start() collects into a replay buffer: give replay_buffer=")
        if not self.is_running():
            work = self._collect(self._connected_pool)
            self._collecting = asyncio.create_task(work, name="aiosync-collecting")

    async def _collect(self, pool: Pool) -> None:
        try:
            while not self._is_done:
                self._parked = True
                pool.notify()
                await self._unpaused()
                self._parked = False
                pauses = self._pauses_begun
                try:
                    await anext(self)
                except SyncTimeoutError:
                    if pauses == self._pauses_begun:  # else the timeout passed during a pause
                        raise
                await asyncio.sleep(0)  # anext() does not yield if the next batch has been delivered
        except StopAsyncIteration:
            return  # another task has had the last batch
        except Exception as exc:  # noqa: BLE001 - raised by the next call
            pool.fail(exc)
        finally:
            self._parked = True
            pool.notify()  # a pause may be waiting for the end of the last batch

    @asynccontextmanager
    async def pause(self, timeout: float | None = None) -> AsyncIterator[None]:
        """Stop the workers' steps inside this context. The workers finish the batches in progress first. They
        continue when the context ends, also by an exception. ``timeout``: seconds to wait for those batches.

        After :meth:`start`, nothing is written to the replay buffer inside the context: a batch is either in
        the buffer when the context begins, or it is written when the context has ended. Calls of the workers,
        such as :meth:`map_fn`, are allowed.

        Raises:
            Exception: as the iterator.
            SyncTimeoutError: the workers did not finish in time.
        """
        pool = self._connected_pool
        self._active_pauses += 1
        self._pauses_begun += 1
        self._not_paused.clear()
        try:
            deadline = self._deadline(timeout)
            await pool.wait_for(lambda: self._is_quiet(pool), deadline, "receive")
            yield
        finally:
            self._active_pauses -= 1
            if not self._active_pauses:
                self._not_paused.set()
            if not self.sync and self._pool is pool:
                # A call that waits for a batch has found no fresh one: there is none that is not trained on.
                self._request_from_all(pool, trained=self._next_lock.locked())

    def _is_quiet(self, pool: Pool) -> bool:
        """Return whether no worker steps, and the task of :meth:`start` writes nothing until a pause ends."""
        if any(worker.requested for worker in pool.workers):
            return False
        idle = not self.is_running() or self._parked or self._held_back
        return idle or not any(worker.batches for worker in pool.workers)

    async def next(self) -> TensorDictBase | None:
        """Return the next batch; None after the last one. Raises as the iterator."""
        return await anext(self, None)

    def iterator(self) -> AsyncIterator[TensorDictBase]:
        """Return this collector, which is its own iterator."""
        return self

    def is_running(self) -> bool:
        """Return whether :meth:`start` is collecting."""
        return self._collecting is not None and not self._collecting.done()

    def __len__(self) -> int:
        """How many batches ``total_frames`` are. OptionConflictError: there is no end."""
        total = self.config.batch.frames_limit
        if total == math.inf:
            raise OptionConflictError("a collector without total_frames= has no length")
        return -(-int(total) // self.requested_frames_per_batch)

    def __bool__(self) -> bool:
        return True
