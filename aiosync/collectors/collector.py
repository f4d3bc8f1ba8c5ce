"""The collectors: their workers' start and end."""

from __future__ import annotations

import asyncio
import copy
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing.context import BaseContext
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase

from aiosync._deadline import Deadline
from aiosync._endpoint import AsyncResource
from aiosync.collectors.batch_memory import split_trajectories
from aiosync.collectors.config import CollectorConfig, ReplayConfig, WeightConfig, per_worker
from aiosync.collectors.host import LocalHost, MakeHost, ProcessHost, RayHost, context_of
from aiosync.collectors.pool import Pool
from aiosync.collectors.saved_state import RestorableIterator
from aiosync.collectors.worker import WorkerSpec, cancel_all
from aiosync.errors import InvalidArgumentError, NotConnectedError, OptionConflictError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.memory import MemoryWeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.shared_memory import SharedMemWeightSyncScheme
from aiosync.transports._offload import uninterrupted
from aiosync.transports.ray import ray_here

_CLOSE_SECONDS = 10.0
"""Seconds that workers have to end by themselves in :meth:`MultiCollector.aclose`."""

_ABORT_SECONDS = 1.0
"""The same after a failed :meth:`MultiCollector.connect`."""


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
        create_env_fn: returns an environment (see :func:`~aiosync.collectors.adapt`); or one function per
            worker. Called in the workers.
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
        config = (config or CollectorConfig()).of(**options)
        super().__init__(config, sync=(sync is not False) if self._sync is None else self._sync)
        given = len(create_env_fn) if isinstance(create_env_fn, Sequence) else 1
        self.num_workers = count = config.processes.num_workers or given
        config.check(count, sync=self.sync)
        envs = per_worker("create_env_fn", create_env_fn, count)
        arguments = per_worker("create_env_kwargs", create_env_kwargs or {}, count)
        self._envs = [functools.partial(env, **given) for env, given in zip(envs, arguments, strict=True)]
        self.policy_factory = per_worker("policy_factory", policy_factory, count)
        self.policy = policy
        self._saved_threads: int | None = None
        commit = "copy" if config.policy.needs_fixed_memory else "flip"
        # The workers' policies are copies of this one, with the same adapters if there are any.
        default = self._default_scheme(timeout=config.processes.seconds, commit=commit, peft="as_is")
        self._set_up_schemes(default)
        self._closed = False
        each = config.per_batch if self.sync else config.batch.frames_of(0, 1)
        total = config.batch.total_frames
        if total != -1 and total % each:
            more = f"{-total % each} more frames will be collected"
            text = f"total_frames={total} is not a multiple of the {each} frames of a batch: {more}"
            warnings.warn(text, stacklevel=2)

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

    def _spec(self, index: int) -> WorkerSpec:
        make, policy, config = self.policy_factory[index], self.policy, self.config
        share_tensors = self._updater is not None  # it writes into tensors that workers share
        if make is None and share_tensors:
            make = None if policy is None else lambda: policy
        elif make is None and policy is not None:
            make = functools.partial(cloudpickle.loads, cloudpickle.dumps(policy))
        return WorkerSpec(
            index,
            self.num_workers,
            self._envs[index],
            make,
            config.of_a_worker(),
            first_id=index * config.processes.envs_per_worker,
            use_buffers=config.batch.use_buffers and config.processes.launcher == "process",
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
            WorkerLostError: a worker died.
            SyncTimeoutError: not all workers were ready in time.
        """
        if self._pool is not None or self._closed:
            raise NotConnectedError("this collector is connected, or was closed: make a new one")
        make_host, ctx = self._host_factory()
        deadline = self._deadline(timeout)
        threads = self.config.processes.num_threads
        if threads is not None:
            self._saved_threads = torch.get_num_threads()
            torch.set_num_threads(threads)
        try:
            self._init_senders(ctx)
            specs = [self._spec(index) for index in range(self.num_workers)]
            restarts = [self.config.processes.restart_workers] * self.num_workers
            self._pool = Pool(specs, self._schemes, make_host, restarts, self._on_delivered)
            self._pool.extra_updates = self._extra_updates
            await self._pool.start(deadline)
            await self._connect_receivers(self._pool, deadline)
            self._limit_age()
        except BaseException:
            await self.aclose(_ABORT_SECONDS)
            raise

    async def aclose(self, timeout: float | None = None) -> None:
        """End the workers; idempotent. ``timeout``: seconds that they have to end by themselves, after which
        they are killed. None: 10, or the collector's own timeout if that is shorter.
        """
        self._closed = True
        self._not_paused.set()
        collecting, self._collecting = self._collecting, None
        pool, self._pool = self._pool, None
        patience = min(_CLOSE_SECONDS, self.config.processes.seconds)
        deadline = Deadline.after(patience if timeout is None else timeout)
        release = asyncio.ensure_future(self._release(collecting, pool, deadline))
        try:
            await asyncio.shield(release)
        except asyncio.CancelledError:
            # A cancelled close releases everything too, but kills the workers instead of waiting for them.
            if pool is not None:
                pool.kill()
            await uninterrupted(lambda _: asyncio.wait([release]))
            raise

    async def _release(self, task: asyncio.Task[None] | None, pool: Pool | None, deadline: Deadline) -> None:
        try:
            if task is not None:
                await cancel_all(task)
            await self._following.aclose()
        finally:
            if pool is not None:
                await pool.aclose(deadline)
            self._finished.clear()
            if self._saved_threads is not None:
                torch.set_num_threads(self._saved_threads)
                self._saved_threads = None

    async def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the workers; idempotent.

        Args:
            timeout: as of :meth:`aclose`.
            close_env: whether to close the environments. False is for a :class:`Collector` only: otherwise
                the environments end with the workers.
            raise_on_error: whether to raise the errors of the workers' end.

        Raises:
            OptionConflictError: ``close_env=False``, and the workers are processes.
        """
        if not close_env:
            await self._keep_environments()
        try:
            await self.aclose(timeout)
        except Exception:
            if raise_on_error:
                raise

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

    async def _keep_environments(self) -> None:
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


class Collector(MultiCollector):
    """Rolls out a policy in this process, on the event loop that iterates the collector.

    Otherwise it behaves as a :class:`MultiCollector` with one worker and ``sync=True``: no step happens
    between one batch and the request for the next. The policy that acts is a copy, with the version that was
    sent last. An environment with a slow ``step`` blocks the event loop, unless ``step`` is a coroutine
    function.

    Args:
        create_env_fn: an environment, or a function that returns one.
        policy: see :class:`MultiCollector`.
        policy_factory: see :class:`MultiCollector`.
        create_env_kwargs: see :class:`MultiCollector`.
        config: see :class:`MultiCollector`. Options about processes are refused.
        options: the same options as keywords.

    Raises:
        InvalidArgumentError: an unknown option, or options that do not fit together.
    """

    _sync = True

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        config: CollectorConfig | None = None,
        **options: Any,
    ) -> None:
        config = (config or CollectorConfig()).of(**options)
        processes = config.processes
        given = [each.name for each in fields(processes) if getattr(processes, each.name) != each.default]
        if refused := ", ".join(name for name in given if name not in _LOCAL_OPTIONS):
            raise InvalidArgumentError(f"{refused}: a Collector runs in this process; see MultiCollector")
        super().__init__(
            _env_factory(create_env_fn),
            policy,
            policy_factory=policy_factory,
            create_env_kwargs=create_env_kwargs,
            config=config,
        )
        self._join = operator.itemgetter(0)
        self._env_was_given = callable(getattr(create_env_fn, "step", None)) and not isinstance(
            create_env_fn, type
        )

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        return MemoryWeightSyncScheme(**options)

    def _host_factory(self) -> tuple[MakeHost, BaseContext | None]:
        return LocalHost, None

    async def _keep_environments(self) -> None:
        if self._pool is not None:
            await self._call_all("keep_environments", None)

    async def fake_tensordict(self) -> TensorDictBase:
        """Return zeros with the layout of a batch. A copy of the policy takes a step for it in another
        environment. This collector's environment and random numbers do not change.

        Raises:
            Exception: what the environment or the policy raises.
        """
        batch, make, factory = self.config.batch, self._envs[0], self.policy_factory[0]
        config = replace(
            self.config,
            batch=replace(batch, frames_per_batch=1, total_frames=-1, split_trajs=False, postproc=None),
            weights=WeightConfig(),
            replay=ReplayConfig(),
        )
        env = copy.deepcopy(make()) if self._env_was_given else make
        policy = copy.deepcopy(self.policy)
        with torch.random.fork_rng(devices=[]):
            async with Collector(env, policy, policy_factory=factory, config=config) as collector:
                step = await anext(collector)
        steps = -(-self.requested_frames_per_batch // step.numel())
        zeros = step.expand(*step.shape[:-1], steps).clone().zero_()
        if batch.set_truncated:
            for name in ("truncated", "done"):
                zeros["next", name][..., -1, :] = True
        found = split_trajectories(zeros) if batch.split_trajs else zeros
        return found if batch.postproc is None else batch.postproc(found)

    async def get_distant_attr(self, attr: str, timeout: float | None = None) -> Any:
        """Return an attribute of the worker; see :meth:`MultiCollector.get_distant_attr`."""
        (found,) = await super().get_distant_attr(attr, timeout)
        return found

    def _spec(self, index: int) -> WorkerSpec:
        return replace(super()._spec(index), own_process=False, use_buffers=False)


_LOCAL_OPTIONS = {"envs_per_worker", "init_fn", "timeout"}
"""The options of :class:`ProcessConfig` that a :class:`Collector` takes."""


def _env_factory(given: Any) -> Callable[..., Any]:
    steps = callable(getattr(given, "step", None)) and callable(getattr(given, "reset", None))
    if isinstance(given, Sequence):
        raise InvalidArgumentError("create_env_fn: expected one environment, got several; see MultiCollector")
    return (lambda: given) if steps and not isinstance(given, type) else given
