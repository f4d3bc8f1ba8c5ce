"""The collectors of several workers: the workers' start and end."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, Unpack

import torch
from tensordict import TensorDictBase

from aiosync._deadline import Deadline
from aiosync._endpoint import AsyncResource
from aiosync._processors import places_of
from aiosync.collectors.adapters import env_factory, is_env
from aiosync.collectors.batch_config import per_worker
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.host import MakeHost, ProcessHost, RayHost, context_of
from aiosync.collectors.options import CollectorOptions
from aiosync.collectors.pickling import PolicySkeleton, check_picklable
from aiosync.collectors.pool import Pool
from aiosync.collectors.saved_state import RestorableIterator
from aiosync.collectors.weight_sources import sent_in_full
from aiosync.collectors.worker import cancel_all
from aiosync.collectors.worker_spec import WorkerSpec
from aiosync.errors import InvalidArgumentError, NotConnectedError, OptionConflictError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.shared_memory import SharedMemWeightSyncScheme
from aiosync.transports._offload import uninterrupted
from aiosync.transports.ray import ray_here

_CLOSE_SECONDS = 10.0
"""Seconds that workers have to end by themselves in :meth:`MultiCollector.aclose`."""

_ABORT_SECONDS = 1.0
"""The same after a failed :meth:`MultiCollector.connect`."""

CALLED_IN_WORKERS = ("init_fn", "pre_collect_hook", "post_collect_hook")
"""The options of :class:`ProcessConfig` that are functions."""


class ThreadLimit:
    """The option ``num_threads``, for torch's work in the calling thread. Limits may end in any order."""

    def __init__(self, collector: MultiCollector) -> None:
        self._collector = collector
        self._taken = 0  # how many threads fewer torch uses

    def set(self) -> None:
        """Leave processors to the collector's workers."""
        before, processes = torch.get_num_threads(), self._collector.config.processes
        beside = self._collector.num_workers if self._collector._has_processes else 0
        self._taken = before - processes.threads_beside(beside)
        if self._taken:
            torch.set_num_threads(before - self._taken)

    def restore(self) -> None:
        """End the limit, in the thread of :meth:`set`."""
        taken, self._taken = self._taken, 0
        if taken:
            torch.set_num_threads(max(1, torch.get_num_threads() + taken))


class MultiCollector(RestorableIterator, AsyncResource):
    """Worker processes that roll out a policy, and an asynchronous iterator of their batches.

    ::

        async with MultiCollector([make_env] * 2, policy, frames_per_batch=200) as collector:
            async for batch in collector:
                ...  # learn
                await collector.update_policy_weights_()

    Each worker has one event loop. It steps the environments, receives weights and executes the collector's
    commands there, one at a time. So weights change only between two steps, and each frame is tagged with the
    version that acted. Batches go through shared memory; they are neither pickled nor sent.

    With ``sync=True`` a batch has a part from every worker, and no worker steps between one batch and the
    request for the next. With ``sync=False`` a batch comes from one worker, batches come in the order in
    which they are complete, and workers continue meanwhile: each is at most two batches ahead. With
    ``sync=False`` a batch's memory is reused once the last reference to the batch is dropped.

    Args:
        create_env_fn: a function that returns an environment (see :func:`~aiosync.collectors.adapt`), called
            in the workers; or an environment, of which each worker gets a copy; or one of these per worker.
        policy: the trainer's policy: a TensorDictModule, or a module or function of the observation. Workers
            get a copy, and its weights. None: random actions.
        sync: see above.
        policy_factory: returns a worker's policy; or one function per worker. Called in the workers.
            ``policy`` is then only the source of the weights.
        create_env_kwargs: keyword arguments of ``create_env_fn``; or one mapping per worker.
        config: all other options.
        options: the same options as keywords: see :class:`BatchConfig`, :class:`PolicyConfig`,
            :class:`DeviceConfig`, :class:`ProcessConfig`, :class:`WeightConfig` and :class:`ReplayConfig`.

    Attributes:
        frames: how many frames the iterator has returned.

    Raises:
        InvalidArgumentError: an unknown option, or options that do not fit together.
    """

    _sync: bool | None = None
    _has_processes = True

    def __init__(
        self,
        create_env_fn: Callable[..., Any] | Sequence[Callable[..., Any]],
        policy: Any = None,
        *,
        sync: bool | None = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        config: CollectorConfig | None = None,
        **options: Unpack[CollectorOptions],
    ) -> None:
        if self._sync is not None and sync not in (None, self._sync):
            raise InvalidArgumentError(f"sync={sync!r}: a {type(self).__name__} has sync={self._sync}")
        config = (config or CollectorConfig()).of(**options)
        self.num_workers = count = _number_of_workers(create_env_fn, config)
        super().__init__(config, sync=(sync is not False) if self._sync is None else self._sync)
        config.check(count, sync=self.sync)
        envs = per_worker("create_env_fn", create_env_fn, count)
        each = config.processes.envs_per_worker
        if each > 1 and any(is_env(env) for env in envs):
            raise OptionConflictError(
                f"envs_per_worker={each}: create_env_fn is an environment already, and all of a worker's "
                "rollouts would step it: give a function that makes one"
            )
        arguments = per_worker("create_env_kwargs", create_env_kwargs or {}, count)
        self._envs = [env_factory(env, given) for env, given in zip(envs, arguments, strict=True)]
        self.policy_factory = per_worker("policy_factory", policy_factory, count)
        self.policy = policy
        self._skeleton: PolicySkeleton | None = None  # what workers get of the policy; not with an updater
        self._threads = ThreadLimit(self)
        self._closed = False
        self._connecting: asyncio.Task[None] | None = None  # the work of connect()
        self._releasing: asyncio.Future[None] | None = None  # that of aclose()
        commit = "copy" if config.policy.needs_fixed_memory else "flip"
        # The workers' policies are copies of this one, with the same adapters if there are any.
        default = self._default_scheme(timeout=config.processes.seconds, commit=commit, peft="as_is")
        self._set_up_schemes(default)
        self._check_picklable(create_env_fn=envs, create_env_kwargs=arguments)
        config.batch.warn(count, sync=self.sync, returned=config.replay.replay_buffer is None)

    @property
    def _policy_travels(self) -> bool:
        """Whether a worker gets the trainer's policy, and not one of a factory."""
        return self.policy is not None and not all(self.policy_factory)

    def _check_picklable(self, **arguments: Any) -> None:
        """Raise UnpicklableError if workers cannot get an argument."""
        if self._policy_travels and (self._has_processes or self._updater is None):
            check_picklable(policy=self.policy)
        if self._has_processes:
            hooks = {name: getattr(self.config.processes, name) for name in CALLED_IN_WORKERS}
            check_picklable(policy_factory=self.policy_factory, **hooks, **arguments)

    # -- what workers run in --------------------------------------------------------------------------

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        if self.config.processes.launcher == "ray":
            return RayWeightSyncScheme(**options)
        return SharedMemWeightSyncScheme(**options)

    def _host_factory(self) -> tuple[MakeHost, BaseContext | None]:
        """Return what creates the workers' hosts, and multiprocessing's context if workers are processes."""
        processes = self.config.processes
        if processes.launcher == "ray":
            return functools.partial(RayHost, ray_here(), processes.ray_options or {"num_cpus": 1}), None
        ctx = context_of(processes.start_method)
        return functools.partial(ProcessHost, ctx), ctx

    def _specs(self) -> list[WorkerSpec]:
        """What the workers need at their start."""
        count = self.num_workers
        specs = [self._spec(index) for index in range(count)]
        if not (self.sync and self._has_processes):
            return specs
        here = self.config.processes.launcher == "process"
        places = places_of(count) if here else [None] * count
        return [replace(spec, processor=place) for spec, place in zip(specs, places, strict=True)]

    def _spec(self, index: int) -> WorkerSpec:
        make, config = self.policy_factory[index], self.config
        share_tensors = self._updater is not None  # it writes into tensors that workers share
        if make is None and self._skeleton is not None:
            make = functools.partial(self._skeleton.make, config.devices.of(index).policy)
        elif make is None and self.policy is not None:
            make = functools.partial(_identity, self.policy)
        return WorkerSpec(
            index,
            self.num_workers,
            self._envs[index],
            make,
            config.of_a_worker(),
            first_id=index * config.processes.envs_per_worker,
            use_buffers=config.batch.use_buffers is not False and config.processes.launcher == "process",
            share_tensors=share_tensors,
            extra_updates=self._extra_updates,
            parts=self.num_workers if self.sync else 1,
        )

    # -- life cycle -----------------------------------------------------------------------------------

    async def connect(self, timeout: float | None = None) -> None:
        """Start the workers, and wait until each is ready to act with version 0. ``timeout``: seconds.

        Raises:
            Exception: what an environment or a policy raised in a worker, with the worker's traceback as its
                cause.
            UnsupportedTensorError, ArenaAllocationError: the weights cannot be sent.
            WorkerLostError: a worker died.
            SyncTimeoutError: not all workers were ready in time.
            NotConnectedError: the collector is connected, was closed, or is closed by another task meanwhile.
        """
        if self._connecting is not None or self._closed:
            raise NotConnectedError("this collector is connected, or was closed: make a new one")
        # A task of its own, so that aclose() in another task can end it.
        work = self._open(self._deadline(timeout))
        self._connecting = connecting = asyncio.create_task(work, name="aiosync-connecting")
        try:
            await asyncio.wait([connecting])
            if connecting.cancelled():
                raise NotConnectedError("this collector was closed while it connected")
            connecting.result()
        except BaseException:
            await self.aclose(_ABORT_SECONDS)
            raise

    async def _open(self, deadline: Deadline) -> None:
        if self._closed:  # before this task has begun
            raise NotConnectedError("this collector was closed while it connected")
        make_host, ctx = self._host_factory()
        self._init_senders(ctx)
        if self._updater is None and self._policy_travels:
            self._skeleton = PolicySkeleton(self.policy, sent_in_full(self.policy, self._schemes))
        specs = self._specs()
        restarts = [self.config.processes.restart_workers] * self.num_workers
        self._pool = pool = Pool(specs, self._schemes, make_host, restarts, self._on_delivered)
        pool.extra_updates = self._extra_updates
        await pool.start(deadline)
        await self._connect_receivers(pool, deadline)
        self._threads.set()  # after the schemes: copies of weights use the former number
        self._limit_age()

    async def aclose(self, timeout: float | None = None) -> None:
        """End the workers; idempotent. ``timeout``: seconds that they have to end by themselves, after which
        they are killed. None: 10, or the collector's own timeout if that is shorter.

        A :meth:`connect` in another task raises. Other calls of this method wait for the first one.
        """
        self._closed = True
        self._not_paused.set()
        if self._releasing is not None:
            if not self._releasing.done():
                await asyncio.wait([self._releasing])
            return
        tasks = [task for task in (self._connecting, self._collecting) if task is not None]
        self._connecting = self._collecting = None
        pool, self._pool = self._pool, None
        patience = min(_CLOSE_SECONDS, self.config.processes.seconds)
        deadline = Deadline.after(patience if timeout is None else timeout)
        self._releasing = release = asyncio.ensure_future(self._release(tasks, pool, deadline))
        try:
            await asyncio.shield(release)
        except asyncio.CancelledError:
            # A cancelled close releases everything too, but kills the workers instead of waiting for them.
            if pool is not None:
                pool.kill()
            await uninterrupted(lambda _: asyncio.wait([release]))
            raise

    async def _release(
        self, tasks: Sequence[asyncio.Task[None]], pool: Pool | None, deadline: Deadline
    ) -> None:
        try:
            await cancel_all(*tasks)
            await self._following.aclose()
        finally:
            async with self._sending:
                if pool is not None:
                    await pool.aclose(deadline)
                self._finished.clear()
                self._threads.restore()

    async def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the workers; idempotent.

        Args:
            timeout: as of :meth:`aclose`.
            close_env: whether to close the environments, also one that was given as an object and that
                :meth:`load_state_dict` has replaced. False is for a :class:`Collector` only: otherwise the
                environments end with the workers.
            raise_on_error: whether to raise the errors of the workers' end.

        Raises:
            OptionConflictError: ``close_env=False``, and the workers are processes.
        """
        failure: Exception | None = None
        if not close_env:
            try:
                await self._keep_environments(timeout)
            except OptionConflictError:
                raise
            except Exception as exc:  # noqa: BLE001 - a collector that has failed ends all the same
                failure = exc
        try:
            await self.aclose(timeout)
        except Exception as exc:  # noqa: BLE001
            failure = failure or exc
        if failure is not None and raise_on_error:
            raise failure

    async def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the workers, also after :meth:`start`; see :meth:`shutdown`."""
        await self.shutdown(timeout, close_env)

    async def fake_tensordict(self) -> TensorDictBase:
        """Return a batch of zeros; see :meth:`Collector.fake_tensordict`.

        Raises:
            NotImplementedError: the environments are in other processes, and this one has none.
        """
        raise NotImplementedError(
            "fake_tensordict() makes an environment in this process: call it on a Collector with the same "
            "arguments"
        )

    async def _keep_environments(self, timeout: float | None) -> None:
        raise OptionConflictError("close_env=False: the environments of worker processes end with these")

    @property
    def closed(self) -> bool:
        """Whether the collector was closed."""
        return self._closed


class MultiSyncCollector(MultiCollector):
    """A :class:`MultiCollector` with ``sync=True``."""

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """A :class:`MultiCollector` with ``sync=False``."""

    _sync = False


def _identity(policy: Any) -> Any:
    return policy


def _number_of_workers(create_env_fn: Any, config: CollectorConfig) -> int:
    if isinstance(create_env_fn, Sequence):
        if not create_env_fn:
            raise InvalidArgumentError("create_env_fn=[]: expected at least one function: one per worker")
        return len(create_env_fn)
    return config.processes.num_workers or 1
