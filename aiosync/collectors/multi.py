"""Collectors of several worker processes."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Self

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase

from aiosync._deadline import Deadline
from aiosync.collectors.batches import Joiner, split_trajectories
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.controls import Controls
from aiosync.collectors.fields import MASK
from aiosync.collectors.host import MakeHost, ProcessHost, context_of
from aiosync.collectors.on_ray import RayHost
from aiosync.collectors.pool import Pool
from aiosync.collectors.proxy import Delivered, WorkerProxy
from aiosync.collectors.updates import Updates
from aiosync.collectors.worker import WorkerSpec
from aiosync.errors import InvalidArgumentError, NotConnectedError, SyncTimeoutError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.shared import SharedMemWeightSyncScheme
from aiosync.transports._offload import offloaded, uninterrupted
from aiosync.transports.ray_calls import ray_here
from aiosync.weights.copying import INLINE_LIMIT

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]

_AHEAD = 2
"""Batches that a worker of an asynchronous collector is asked for at a time: one that it collects, and one
that waits to be taken meanwhile."""


_PATIENCE = 10.0
"""Seconds that workers have to end by themselves."""

_IMPATIENCE = 1.0
"""The same, of workers that were no use."""


class MultiCollector(Controls):
    """Worker processes that play a policy, and an asynchronous iterator of what they play.

    ::

        async with MultiCollector([make_env] * 2, policy, frames_per_batch=200) as collector:
            async for batch in collector:
                ...  # learn
                await collector.update_policy_weights_()

    Each worker has an event loop, on which its environments are stepped, its weights arrive, and what the
    collector asks of it is done, one at a time: weights change between two steps, and each frame is tagged
    with the version that acted. Batches come in shared memory, without being pickled or sent.

    With ``sync=True`` a batch has a part of every worker, and nothing is played between one batch and the
    call for the next. With ``sync=False`` a batch is one worker's, handed out in the order in which they are
    finished, and workers play on meanwhile: each is at most two batches ahead. Such a batch lies in the
    memory where its worker put it, which is used again when nothing refers to it any more.

    Args:
        create_env_fn: makes an environment (see :func:`~aiosync.collectors.adapt`); or one function per
            worker. Called in the workers.
        policy: the trainer's policy: a TensorDictModule, or a module or function of the observation. Workers
            get a copy, and its weights. None: they act at random.
        sync: see above.
        policy_factory: makes the workers' policies in them; or one function per worker. With ``policy``, that
            is only where the weights come from.
        create_env_kwargs: what ``create_env_fn`` is called with; or one mapping per worker.
        config: all the rest.
        options: the same as keywords: see :class:`BatchConfig`, :class:`PolicyConfig`,
            :class:`DeviceConfig`, :class:`ProcessConfig`, :class:`WeightConfig` and :class:`ReplayConfig`.

    Attributes:
        frames: how many have been handed out.

    Raises:
        InvalidArgumentError: an option that there is not, or that does not go with the others.
    """

    _sync: bool | None = None

    def __init__(
        self,
        create_env_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        policy: Any = None,
        *,
        sync: bool | None = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        config: CollectorConfig | None = None,
        **options: Any,
    ) -> None:
        if self._sync is not None and sync not in (None, self._sync):
            raise InvalidArgumentError(f"sync={sync!r}: a {type(self).__name__} has sync={self._sync}")
        self.sync = (sync is not False) if self._sync is None else self._sync
        self.config = config = (config or CollectorConfig()).of(**options)
        self.num_workers = config.processes.num_workers or _length(create_env_fn)
        config.check(self.num_workers, sync=self.sync)
        envs = _one_each("create_env_fn", create_env_fn, self.num_workers)
        arguments = _one_each("create_env_kwargs", create_env_kwargs or {}, self.num_workers)
        self._envs = [functools.partial(env, **given) for env, given in zip(envs, arguments, strict=True)]
        self.policy_factory = _one_each("policy_factory", policy_factory, self.num_workers)
        self.policy = policy
        self.frames = 0
        self._requested = 0
        self._finished: deque[Delivered] = deque()
        self._taking = asyncio.Lock()
        self._pauses = self._paused = 0
        self._going = asyncio.Event()
        self._going.set()
        self._threads: int | None = None
        self._joiner = Joiner(config.batch.cat_results)
        self._updates = Updates(self, config, self._default_scheme(config.processes.seconds))
        self._pool: Pool | None = None
        self._running: asyncio.Task[None] | None = None
        self._closed = False
        self._warn_of_more(config)

    def _warn_of_more(self, config: CollectorConfig) -> None:
        each = config.per_batch if self.sync else config.batch.frames_of(0, 1)
        total = config.batch.total_frames
        if total != -1 and total % each:
            warnings.warn(
                f"total_frames={total} is not a multiple of the {each} frames of a batch: "
                f"{-total % each} more will be collected",
                stacklevel=3,
            )

    # -- what workers run on --------------------------------------------------------------------------

    def _default_scheme(self, seconds: float) -> WeightSyncScheme:
        commit: Any = "copy" if self.config.policy.needs_fixed_memory else "flip"
        if self.config.processes.launcher == "ray":
            return RayWeightSyncScheme(timeout=seconds, commit=commit)
        return SharedMemWeightSyncScheme(timeout=seconds, commit=commit)

    def _hosts(self) -> tuple[MakeHost, BaseContext | None]:
        """What makes them, and how processes begin."""
        processes = self.config.processes
        if processes.launcher == "ray":
            return functools.partial(RayHost, ray_here(), processes.ray_options or {"num_cpus": 1}), None
        ctx = context_of(processes.start_method)
        return functools.partial(ProcessHost, ctx), ctx

    def _spec(self, index: int) -> WorkerSpec:
        make, policy = self.policy_factory[index], self.policy
        if make is None and policy is not None:
            shares = self._updates.shares
            make = (
                (lambda: policy)
                if shares
                else functools.partial(cloudpickle.loads, cloudpickle.dumps(policy))
            )
        config = self.config
        return WorkerSpec(
            index,
            self.num_workers,
            self._envs[index],
            make,
            config.of_a_worker(),
            first_id=index * config.processes.envs_per_worker,
            buffers=config.batch.use_buffers and config.processes.launcher == "process",
            shares=self._updates.shares,
        )

    # -- life -----------------------------------------------------------------------------------------

    async def connect(self, timeout: float | None = None) -> None:
        """Start the workers, and wait until each is ready to play with version 0.

        Args:
            timeout: seconds.

        Raises:
            Exception: what an environment or a policy raised in a worker, with its traceback.
            WorkerLostError: a worker died.
            SyncTimeoutError: not all were ready in time.
        """
        if self._pool is not None or self._closed:
            raise NotConnectedError("this collector is connected already, or was closed: make another")
        make_host, ctx = self._hosts()
        deadline = self._deadline(timeout)
        threads = self.config.processes.num_threads
        if threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(threads)
        try:
            self._updates.begin(ctx)
            specs = [self._spec(index) for index in range(self.num_workers)]
            restarts = self.config.processes.restart_workers
            self._pool = Pool(specs, self._updates.schemes, make_host, restarts, self._delivered)
            await self._pool.start(deadline)
            await self._updates.join(self._pool, deadline)
        except BaseException:
            await self.aclose(_IMPATIENCE)
            raise

    async def aclose(self, timeout: float | None = None) -> None:
        """End the workers; idempotent.

        Args:
            timeout: seconds that they have to end by themselves; then they are killed. None: 10, or what a
                call may take, if that is less.
        """
        self._closed = True
        self._going.set()
        running, self._running = self._running, None
        pool, self._pool = self._pool, None
        patience = min(_PATIENCE, self.config.processes.seconds)
        deadline = Deadline.after(patience if timeout is None else timeout)
        release = asyncio.ensure_future(self._release(running, pool, deadline))
        try:
            await asyncio.shield(release)
        except asyncio.CancelledError:
            # Whoever is cancelled leaves nothing behind all the same; but waits for nobody.
            if pool is not None:
                pool.kill()
            await uninterrupted(lambda _: asyncio.wait([release]))
            raise

    async def _release(
        self, running: asyncio.Task[None] | None, pool: Pool | None, deadline: Deadline
    ) -> None:
        try:
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            await self._updates.aclose()
        finally:
            if pool is not None:
                await pool.aclose(deadline)
            self._finished.clear()
            if self._threads is not None:
                torch.set_num_threads(self._threads)
                self._threads = None

    shutdown = async_shutdown = aclose

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def _live(self) -> Pool:
        if self._pool is None:
            raise NotConnectedError("connect() first, or use `async with`: this collector has no workers")
        self._pool.check()
        return self._pool

    # -- batches --------------------------------------------------------------------------------------

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
            pool.failure = exc

    def _drop(self) -> None:
        self._finished.clear()
        for worker in self._live.workers:
            for batch in list(worker.batches):
                batch.taken()

    @asynccontextmanager
    async def pause(self, timeout: float | None = None) -> AsyncIterator[None]:
        """Nothing is played inside: what the workers are collecting they bring to its end first. They always
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
            if not self.sync and self._pool is pool:
                self._keep_all_busy(pool, trained=False)


class MultiSyncCollector(MultiCollector):
    """A :class:`MultiCollector` with ``sync=True``."""

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """A :class:`MultiCollector` with ``sync=False``."""

    _sync = False


def _length(given: object) -> int:
    return len(given) if isinstance(given, Sequence) else 1


def _one_each(name: str, given: Any, workers: int) -> list[Any]:
    if not isinstance(given, Sequence):
        return [given] * workers
    if len(given) != workers:
        raise InvalidArgumentError(f"{name}: expected one, or one per worker, {workers}; got {len(given)}")
    return list(given)
