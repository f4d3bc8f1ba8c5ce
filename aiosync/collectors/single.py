"""The collector that runs in the process of its caller."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing.context import BaseContext
from typing import Any, Unpack

import torch
from tensordict import TensorDictBase

from aiosync.collectors.batch_buffers import Part
from aiosync.collectors.batch_memory import BatchJoiner, split_trajectories
from aiosync.collectors.collector import CALLED_IN_WORKERS, MultiCollector
from aiosync.collectors.config import CollectorConfig, ReplayConfig, WeightConfig
from aiosync.collectors.env import Nested
from aiosync.collectors.host import LocalHost, MakeHost
from aiosync.collectors.options import CollectorOptions
from aiosync.collectors.pickling import copy_env
from aiosync.collectors.worker_spec import WorkerSpec
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.memory import MemoryWeightSyncScheme


class Collector(MultiCollector):
    """Rolls out a policy in this process, on the event loop that iterates the collector.

    Otherwise it behaves as a :class:`MultiCollector` with one worker and ``sync=True``: no step happens
    between one batch and the request for the next. The policy that acts is a copy, with the version that was
    sent last. Steps block the event loop: other tasks run after each step, or about every 4 ms if steps take
    less. An environment whose ``step`` is a coroutine function does not block it.

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
    _has_processes = False

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        config: CollectorConfig | None = None,
        **options: Unpack[CollectorOptions],
    ) -> None:
        config = (config or CollectorConfig()).of(**options)
        processes = config.processes
        given = [each.name for each in fields(processes) if getattr(processes, each.name) != each.default]
        if refused := ", ".join(name for name in given if name not in _LOCAL_OPTIONS):
            raise InvalidArgumentError(f"{refused}: a Collector runs in this process; see MultiCollector")
        if isinstance(create_env_fn, Sequence) and len(create_env_fn) != 1:
            raise InvalidArgumentError(
                f"create_env_fn: expected one environment, got {len(create_env_fn)}; see MultiCollector"
            )
        super().__init__(
            create_env_fn,
            policy,
            policy_factory=policy_factory,
            create_env_kwargs=create_env_kwargs,
            config=config,
        )
        self._joiner = _OnlyPart(config.batch.join_dim)
        (env,) = create_env_fn if isinstance(create_env_fn, Sequence) else (create_env_fn,)
        self._env_was_given = callable(getattr(env, "step", None)) and not isinstance(env, type)

    def _default_scheme(self, **options: Any) -> WeightSyncScheme:
        return MemoryWeightSyncScheme(**options)

    def _host_factory(self) -> tuple[MakeHost, BaseContext | None]:
        return LocalHost, None

    async def _keep_environments(self, timeout: float | None) -> None:
        if self._pool is not None:  # it may have failed, unlike its worker
            await self._pool.call("keep_environments", {0: []}, self._deadline(timeout))

    async def fake_tensordict(self) -> TensorDictBase:
        """Return zeros with the layout of a batch. A copy of the policy takes a step for it in another
        environment. This collector's environment and random numbers do not change.

        Raises:
            Exception: what the environment or the policy raises.
            UnpicklableError: the environment was given as an object, which has running processes.
        """
        batch, make, factory = self.config.batch, self._envs[0], self.policy_factory[0]
        config = replace(
            self.config,
            batch=replace(
                batch,
                frames_per_batch=1,
                total_frames=-1,
                split_trajs=False,
                postproc=None,
                trajs_per_batch=None,
                trajs_per_write=None,
                traj_format=None,
            ),
            weights=WeightConfig(),
            replay=ReplayConfig(),
        )
        env = copy_env(make()) if self._env_was_given else make
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
        spec = super()._spec(index)
        return replace(spec, env_given=self._env_was_given, own_process=False, use_buffers=False)


class _OnlyPart(BatchJoiner):
    """A batch of one part is that part."""

    def join(self, parts: Sequence[Part], nested: Nested) -> TensorDictBase:
        """Return the only part."""
        (part,) = parts
        return part.data


_LOCAL_OPTIONS = {"envs_per_worker", "timeout", *CALLED_IN_WORKERS}
"""The options of :class:`ProcessConfig` that a :class:`Collector` takes."""
