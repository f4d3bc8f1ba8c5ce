"""The calls of a collector that read from its workers, or call their methods; its options as attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aiosync.collectors.pickling import check_picklable
from aiosync.collectors.profiling import ProfileConfig
from aiosync.collectors.upstream import UpstreamControls
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.weights.resolve import call_by_path, resolve_model

_WHEN_NONE = {
    "max_frames_per_traj": 0,
    "init_random_frames": 0,
    "preemptive_threshold": 1.0,
    "split_trajs": False,
    "traj_format": "padded",
    "trust_policy": False,
}
"""What an option's attribute is if the option is None."""


class WorkerAccess(UpstreamControls):
    """The calls that read from the workers, or call their methods.

    Each option of the collector is an attribute of the same name.
    """

    sync: bool
    frames: int
    batches: int
    _has_processes: bool  # the workers are processes of their own

    # -- attributes of what workers have ---------------------------------------------------------------

    async def getattr_env(self, attr: str, timeout: float | None = None) -> Any:
        """Return an attribute of the first worker's environment. Dots in ``attr`` go to nested attributes.
        ``timeout``: seconds.

        Raises:
            AttributeError: the environment has no such attribute.
            UnpicklableError: the attribute cannot be unpickled in this process.
        """
        return await self._call_first("get_attribute", timeout, "env", attr)

    async def getattr_env_all(self, attr: str, timeout: float | None = None) -> list[Any]:
        """Return an attribute of each worker's environment; as :meth:`getattr_env`."""
        return await self._call_all("get_attribute", timeout, "env", attr)

    async def getattr_policy(self, attr: str, timeout: float | None = None) -> Any:
        """Return an attribute of the first worker's policy. Dots in ``attr`` go to nested attributes.
        ``timeout``: seconds.

        Raises:
            AttributeError: the policy has no such attribute.
            NotInitializedError: there is no policy.
        """
        return await self._call_first("get_attribute", timeout, "policy", attr)

    async def getattr_policy_all(self, attr: str, timeout: float | None = None) -> list[Any]:
        """Return an attribute of each worker's policy; as :meth:`getattr_policy`."""
        return await self._call_all("get_attribute", timeout, "policy", attr)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer. Dots in ``attr`` go to nested attributes.

        Raises:
            NotInitializedError: there is no replay buffer.
            AttributeError: the replay buffer has no such attribute.
        """
        if self.config.replay.replay_buffer is None:
            raise NotInitializedError("this collector has no replay buffer: give replay_buffer=")
        return resolve_model(self.config.replay.replay_buffer, attr)

    async def get_distant_attr(self, attr: str, timeout: float | None = None) -> Any:
        """Return an attribute of each worker, as a list.

        Args:
            attr: a path such as ``policy.module.scale``, ``env.transform[0]`` or ``worker_idx``.
            timeout: seconds.

        Raises:
            AttributeError: a part of the path does not exist.
        """
        return await self._call_all("get_attribute", timeout, "", attr)

    async def set_seed(self, seed: int, static_seed: bool = False, timeout: float | None = None) -> int:
        """Seed the environments and begin new episodes.

        Args:
            seed: seed of the first environment. The next one gets ``seed + 1``, and so on.
            static_seed: every worker begins with ``seed``.
            timeout: seconds.

        Returns:
            The first unused seed.
        """
        pool = self._connected_pool
        await pool.wait_for(lambda: all(w.ready for w in pool.workers), self._deadline(timeout), "receive")
        strides = [self.config.processes.envs_per_worker * worker.width for worker in pool.workers]
        each = {w.index: seed if static_seed else seed + sum(strides[: w.index]) for w in pool.workers}
        await pool.call("set_seed", {index: [s] for index, s in each.items()}, self._deadline(timeout))
        for worker in pool.workers:
            worker.seed = each[worker.index]
        self._forget_complete()
        return each[self.num_workers - 1] + strides[-1]

    async def reset(self, reset_idx: Sequence[bool] | None = None, timeout: float | None = None) -> None:
        """Begin new episodes. ``reset_idx``: for each worker, whether to reset its environments; None: all.
        ``timeout``: seconds.

        Raises:
            InvalidArgumentError: ``reset_idx`` has another length.
        """
        if reset_idx is not None and len(reset_idx) != self.num_workers:
            raise InvalidArgumentError(
                f"reset_idx: expected one value per worker, {self.num_workers}; got {len(reset_idx)}"
            )
        chosen = [index for index in range(self.num_workers) if reset_idx is None or reset_idx[index]]
        await self._connected_pool.call("reset", {index: [] for index in chosen}, self._deadline(timeout))

    def _forget_complete(self) -> None:
        """Forget the whole trajectories that the caller has not taken."""

    # -- methods of what workers have ------------------------------------------------------------------

    async def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method in each worker, between two frames, and return the results.

        Args:
            method_name: a path such as ``env.set_level``, ``policy.module.reset_noise`` or ``set_seed``. What
                a coroutine function returns is awaited.
            list_of_args: the positional arguments for each worker.
            list_of_kwargs: the keyword arguments for each worker.
            timeout: seconds.

        Raises:
            InvalidArgumentError: a list has not one entry for each worker.
            AttributeError: a part of the path does not exist.
            UnpicklableError: an argument cannot be unpickled in a worker, or a result in this process.
            Exception: what a method raises.
        """
        count = self.num_workers
        arguments = [()] * count if list_of_args is None else list(list_of_args)
        keywords = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for name, found in (("list_of_args", arguments), ("list_of_kwargs", keywords)):
            if len(found) != count:
                raise InvalidArgumentError(
                    f"{name}: expected {count} entries, one per worker; got {len(found)}"
                )
        each = {i: (method_name, tuple(arguments[i]), dict(keywords[i])) for i in range(count)}
        return await self._connected_pool.call("execute", each, self._deadline(timeout))

    async def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this collector, or of what it has, by its path; await a coroutine's result.

        Args:
            attr_path: a path such as ``replay_buffer.sample``. If it is no method, its value is returned.
            args: the method's arguments.
            kwargs: the method's keyword arguments.

        Raises:
            AttributeError: a part of the path does not exist.
            InvalidArgumentError: there are arguments, and the path does not lead to a method.
        """
        return await call_by_path(self, attr_path, args, kwargs)

    async def _call_first(self, method: str, timeout: float | None, *arguments: Any) -> Any:
        (found,) = await self._connected_pool.call(method, {0: arguments}, self._deadline(timeout))
        return found

    async def _call_all(self, method: str, timeout: float | None, *arguments: Any) -> list[Any]:
        each = {index: arguments for index in range(self.num_workers)}
        return await self._connected_pool.call(method, each, self._deadline(timeout))

    # -- hooks ---------------------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> Callable[[], object] | None:
        """What each worker calls before each batch; None: nothing."""
        return self.config.processes.pre_collect_hook

    @property
    def post_collect_hook(self) -> Callable[[Any], object] | None:
        """What each worker calls with each batch; None: nothing."""
        return self.config.processes.post_collect_hook

    async def set_pre_collect_hook(
        self, hook: Callable[[], object] | None, timeout: float | None = None
    ) -> None:
        """Replace :attr:`pre_collect_hook`; as :meth:`set_post_collect_hook`."""
        await self._set_hook("pre_collect_hook", hook, timeout)

    async def set_post_collect_hook(
        self, hook: Callable[[Any], object] | None, timeout: float | None = None
    ) -> None:
        """Replace :attr:`post_collect_hook`. Workers call the new hook from the next batch on.

        Args:
            hook: the function; None: call nothing.
            timeout: seconds.

        Raises:
            UnpicklableError: the workers are processes, and the hook cannot be pickled.
        """
        await self._set_hook("post_collect_hook", hook, timeout)

    async def _set_hook(self, name: str, hook: Any, timeout: float | None) -> None:
        if self._has_processes:
            check_picklable(**{name: hook})
        self.config = self.config.of(**{name: hook})
        if self._pool is not None:
            pool = self._connected_pool
            # Also for the successors of workers that die.
            pool.specs[:] = [replace(spec, config=spec.config.of(**{name: hook})) for spec in pool.specs]
            await self._call_all("set_hook", timeout, name, hook)

    # -- profiles --------------------------------------------------------------------------------------

    async def enable_profile(
        self,
        *,
        workers: Sequence[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: Sequence[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], object] | None = None,
    ) -> None:
        """Profile the next batches of some workers with ``torch.profiler``.

        Args:
            workers: the workers; None: the first.
            num_rollouts: how many batches until the profile ends.
            warmup_rollouts: how many of them are not recorded.
            save_path: the file for the trace, with ``{worker_idx}`` for the worker's index. None:
                ``collector_profile_{worker_idx}.json``.
            activities: some of ``"cpu"`` and ``"cuda"``; None: both, if there is a CUDA device.
            record_shapes: see ``torch.profiler``.
            profile_memory: see ``torch.profiler``.
            with_stack: see ``torch.profiler``.
            with_flops: see ``torch.profiler``.
            on_trace_ready: called in the worker with the profile, instead of writing the file.

        Raises:
            InvalidArgumentError: an invalid value.
        """
        config = ProfileConfig(
            workers=[0] if workers is None else workers,
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            activities=("cpu", "cuda") if activities is None else activities,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            on_trace_ready=on_trace_ready,
        )
        await self._set_profile(config, config)
        self._profile_config = config

    async def disable_profile(self) -> None:
        """End the profile, and write the trace if it has a batch. Without a profile do nothing."""
        config, self._profile_config = self._profile_config, None
        if config is not None:
            await self._set_profile(config, None)

    async def _set_profile(self, at: ProfileConfig, config: ProfileConfig | None) -> None:
        each = {index: [config] for index in at.workers if index < self.num_workers}
        await self._connected_pool.call("set_profile", each, self._deadline(None))

    @property
    def profile_config(self) -> ProfileConfig | None:
        """The arguments of :meth:`enable_profile`; None: it was not called."""
        return self._profile_config

    _profile_config: ProfileConfig | None = None

    # -- progress and options --------------------------------------------------------------------------

    async def stats(
        self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate", timeout: float | None = None
    ) -> dict[str, int | float | bool]:
        """Return how far collection is, as numbers.

        Args:
            workers: ``"aggregate"``: what this process knows; ``"per_worker"``: what each worker knows,
                as ``worker_0/frames`` and so on; ``"both"``.
            timeout: seconds.

        Returns:
            ``frames`` and ``batches`` so far, ``requested_frames_per_batch``, ``policy_version`` (if it is
            an integer), ``workers``, ``workers_alive``; with ``total_frames`` also that, and ``completed``.
            A worker's ``policy_version`` is the version that it acts with.

        Raises:
            InvalidArgumentError: ``workers`` is none of these.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise InvalidArgumentError(f"workers={workers!r}: expected 'aggregate', 'per_worker' or 'both'")
        found: dict[str, int | float | bool] = {}
        if workers != "per_worker":
            found |= {"frames": self.frames, "batches": self.batches}
            total = self.config.batch.frames_limit
            if total < math.inf:
                found |= {"total_frames": total, "completed": self.frames >= total}
            found["requested_frames_per_batch"] = self.requested_frames_per_batch
            version = self.policy_version
            if isinstance(version, int):
                found["policy_version"] = version
        found["workers"] = self.num_workers
        if self._pool is not None:
            found["workers_alive"] = sum(each.error is None for each in self._pool.workers)
        if workers != "aggregate":
            for index, each in enumerate(await self._call_all("stats", timeout)):
                found |= {f"worker_{index}/{name}": value for name, value in each.items()}
        return found

    @property
    def requested_frames_per_batch(self) -> int:
        """``frames_per_batch``, or its sum. With ``sync=True`` a batch may have more frames: a number is
        rounded up to a multiple of the workers."""
        given = self.config.batch.frames_per_batch
        return sum(given) if isinstance(given, Sequence) else given

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """Return the frames of one worker's part of a batch. ``worker_idx``: the worker; None: the first."""
        return self.config.batch.frames_of(worker_idx or 0, self.num_workers if self.sync else 1)

    @property
    def create_env_fn(self) -> list[Any]:
        """For each worker the function that makes its environment."""
        return list(self._envs)

    _envs: list[Any]

    def _option(self, name: str) -> Any:
        """Return the value of an option. AttributeError: there is no such option."""
        if name == "collector_class":  # of torchrl: what each of its workers has
            return None
        if name in ("storing_device", "env_device"):
            kind = name.removesuffix("_device")
            return tuple(getattr(self.config.devices.of(i), kind) for i in range(self.num_workers))
        if name == "total_frames":
            return self.config.batch.frames_limit
        for group in fields(self.config):
            options = getattr(self.config, group.name)
            if name in {each.name for each in fields(options)}:
                value = getattr(options, name)
                return _WHEN_NONE.get(name) if value is None else value
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    if not TYPE_CHECKING:  # a checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            """The options of the collector."""
            if name.startswith("_") or name == "config":
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            return self._option(name)
