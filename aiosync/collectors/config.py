"""The options of a collector, as frozen dataclasses that check their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from aiosync._deadline import check_timeout, default_timeout
from aiosync._options import unknown_option
from aiosync.collectors.batch_config import BatchConfig, check, check_positive, per_worker
from aiosync.errors import InvalidArgumentError, OptionConflictError

Device: TypeAlias = torch.device | str | int


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How the policy acts.

    Attributes:
        exploration_type: tensordict's interaction type: whether the policy samples actions or takes the mode.
        auto_register_policy_transforms: append to torchrl's environments the transforms that a recurrent
            policy needs and that they lack, ``InitTracker`` and ``TensorDictPrimer``. None: do not.
        trust_policy: the policy takes and returns TensorDicts, whatever its signature says. None: only a
            tensordict ``CudaGraphModule`` does.
        track_policy_version: tag each frame with the version that acted, as ``"policy_version"`` and
            ``("next", "policy_version")``. A tracker such as torchrl's ``PolicyVersion``: it is kept up to
            date, and names the versions.
        compile_policy: compile the policy in each worker; a mapping: with these arguments of
            ``torch.compile``; None: do not.
        cudagraph_policy: capture the policy as a CUDA graph in each worker; None: do not; a mapping: with
            these arguments of tensordict's ``CudaGraphModule``. Weights are then copied into the parameters'
            own memory, as a graph needs (a scheme that you pass must have ``commit="copy"``).
    """

    exploration_type: InteractionType = InteractionType.RANDOM
    auto_register_policy_transforms: bool | None = None
    trust_policy: bool | None = None
    track_policy_version: Any = True
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None

    @property
    def compile_options(self) -> Mapping[str, Any] | None:
        """The arguments of ``torch.compile``; None: the policy is not compiled."""
        return _arguments(self.compile_policy)

    @property
    def cudagraph_options(self) -> Mapping[str, Any] | None:
        """The arguments of ``CudaGraphModule``; None: the policy is not captured."""
        return _arguments(self.cudagraph_policy)

    @property
    def needs_fixed_memory(self) -> bool:
        """Whether the parameters must stay at their addresses, because a CUDA graph is captured."""
        captured = (self.compile_options or {}).get("mode") in ("reduce-overhead", "max-autotune")
        return captured or self.cudagraph_options is not None


def _arguments(given: bool | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the arguments of an option that is a switch or a mapping of arguments; None: it is off."""
    if isinstance(given, Mapping):
        return given
    return {} if given else None


@dataclass(frozen=True, slots=True)
class WorkerDevices:
    """The devices of one worker; None: tensors stay where they are."""

    env: torch.device | None = None  # of what the environments return
    policy: torch.device | None = None
    storing: torch.device | None = None  # of the batches


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Devices. Each option is one device for all workers, or a sequence with one per worker.

    Attributes:
        device: the default of the three others.
        env_device: what environments return is moved to this device; a torchrl environment is moved itself.
        policy_device: the device of the workers' policies.
        storing_device: the device of the batches returned; with ``sync=True`` one for all workers.
        no_cuda_sync: synchronize each copy to or from a CUDA device by itself, instead of the whole device
            after each step.
    """

    device: Device | Sequence[Device] | None = None
    env_device: Device | Sequence[Device] | None = None
    policy_device: Device | Sequence[Device] | None = None
    storing_device: Device | Sequence[Device] | None = None
    no_cuda_sync: bool = False

    @property
    def syncs(self) -> bool:
        """Whether to synchronize the CUDA device after each step: ``not no_cuda_sync``."""
        return not self.no_cuda_sync

    def of(self, worker: int) -> WorkerDevices:
        """Return the devices of one worker."""
        return WorkerDevices(*(self._of(name, worker) for name in ("env", "policy", "storing")))

    def _of(self, name: str, worker: int) -> torch.device | None:
        given = getattr(self, f"{name}_device")
        given = self.device if given is None else given
        if isinstance(given, Sequence) and not isinstance(given, str):
            given = given[worker]
        return None if given is None else torch.device(given)

    def check(self, workers: int) -> None:
        """Check that the devices exist, and that each sequence has one per worker.

        Raises:
            InvalidArgumentError: otherwise.
        """
        for name in ("device", "env_device", "policy_device", "storing_device"):
            for device in per_worker(name, getattr(self, name), workers, "one device"):
                _check_available(name, device)


def _check_available(name: str, given: Device | None) -> None:
    try:
        device = torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError) as exc:
        raise InvalidArgumentError(f"{name}={given!r}: expected a device: {exc}") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"{name}={given!r}: this machine has no CUDA device")


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The workers.

    Attributes:
        launcher: ``"process"``: workers are processes on this machine; ``"ray"``: actors of the Ray cluster
            that this process has joined (``ray.init()``).
        ray_options: Ray's options for each actor. The default is ``{"num_cpus": 1}``.
        num_workers: the number of workers, if ``create_env_fn`` is one function. A sequence of functions has
            one per worker, whatever this says.
        envs_per_worker: environments that each worker steps concurrently.
        num_threads: torch's threads in this process while the workers run; None: as many as before less one
            per worker, at least one.
        num_sub_threads: torch's threads in each worker.
        start_method: multiprocessing's start method. None: ``"forkserver"``, where a server imports torch
            once and forks all workers, if the platform has it; else ``"spawn"``.
        restart_workers: how many times a dead worker is started again before its death is an error.
        init_fn: called in each worker before all else.
        pre_collect_hook: called in each worker before the first step of each batch.
        post_collect_hook: called in each worker with each batch that it has collected, a TensorDict, before
            the batch is delivered. What it writes into the tensors is delivered.
        timeout: default timeout of each call, in seconds; None: ``AIOSYNC_TIMEOUT``, else 120.
    """

    launcher: Literal["process", "ray"] = "process"
    ray_options: Mapping[str, Any] | None = None
    num_workers: int | None = None
    envs_per_worker: int = 1
    num_threads: int | None = None
    num_sub_threads: int = 1
    start_method: Literal["spawn", "forkserver"] | None = None
    restart_workers: int = 0
    init_fn: Callable[[], object] | None = None
    pre_collect_hook: Callable[[], object] | None = None
    post_collect_hook: Callable[[TensorDictBase], object] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check("launcher", self.launcher, self.launcher in ("process", "ray"), "'process' or 'ray'")
        method = self.start_method
        methods = "'spawn' or 'forkserver' (a process that has an event loop and threads must not be forked)"
        check("start_method", method, method in (None, "spawn", "forkserver"), methods)
        if self.ray_options is not None and self.launcher != "ray":
            raise InvalidArgumentError("ray_options= needs launcher='ray'")
        check_positive("envs_per_worker", self.envs_per_worker)
        check_positive("num_sub_threads", self.num_sub_threads)
        for name in ("num_workers", "num_threads"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check("restart_workers", self.restart_workers, self.restart_workers >= 0, "0 or more")
        if self.timeout is not None:
            check_timeout(self.timeout, f"timeout={self.timeout!r}")

    def threads_beside(self, workers: int) -> int:
        """Return how many threads torch uses in the calling thread while ``workers`` run."""
        if self.num_threads is not None:
            return self.num_threads
        before = torch.get_num_threads()
        return before if self.launcher == "ray" else max(1, before - workers)

    @property
    def seconds(self) -> float:
        """The default timeout of a call, in seconds."""
        return default_timeout() if self.timeout is None else self.timeout


@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """How weights reach the workers.

    Attributes:
        weight_sync_schemes: model id -> scheme; None or empty: the policy, through shared memory.
        weight_updater: an updater that is used instead of schemes, as in torchrl's older interface: one of
            aiosync's or torchrl's, or a function that returns one.
        weight_recv_schemes: model id -> scheme, for a collector that is itself a worker of another collector.
            It sends what it receives to its own workers first, then applies it to its own model.
        worker_idx: the index of this collector among the workers of the other one.
        update_at_each_batch: send the policy's weights before each batch is requested.
        max_staleness: how many versions behind the newest the oldest frame of a batch may be when the
            iterator returns the batch; None: any number.
        on_stale: ``"drop"``: drop older batches. ``"wait"``: also request only as many batches at a time as
            the trainer uses up in ``max_staleness`` updates, with one update after each batch.
    """

    weight_sync_schemes: Mapping[str, Any] | None = None
    weight_updater: Any = None
    weight_recv_schemes: Mapping[str, Any] | None = None
    worker_idx: int | None = None
    update_at_each_batch: bool = False
    max_staleness: int | None = None
    on_stale: Literal["drop", "wait"] = "drop"

    def __post_init__(self) -> None:
        for name in ("weight_sync_schemes", "weight_recv_schemes"):
            if (given := getattr(self, name)) is not None:
                # Blocking twins may be given too: their asyncio schemes do the work.
                schemes = {key: getattr(each, "asyncio_scheme", each) for key, each in given.items()}
                object.__setattr__(self, name, schemes)
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise OptionConflictError("got weight_updater= and weight_sync_schemes=: expected one of them")
        stale = self.max_staleness
        check("max_staleness", stale, stale is None or stale >= 0, "0 or more versions")
        check("on_stale", self.on_stale, self.on_stale in ("drop", "wait"), "'drop' or 'wait'")
        if self.on_stale == "wait" and self.max_staleness is None:
            raise InvalidArgumentError("on_stale='wait' needs max_staleness= and sync=False")

    @property
    def allowed_updates(self) -> float:
        """How many updates may be sent between the request for a batch and the return of that batch."""
        return math.inf if self.on_stale == "drop" or self.max_staleness is None else self.max_staleness


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """A replay buffer that receives the batches instead of the iterating caller.

    Attributes:
        replay_buffer: any object with ``extend(frames)``, such as torchrl's. The iterator then returns None
            for each batch, and :meth:`~aiosync.collectors.MultiCollector.start` collects in the background.
        extend_buffer: True: call ``extend`` with each worker's part of a batch: of the shape ``(*batch_size,
            steps)`` for torchrl's environments, with one frame per environment and step for others. False:
            call ``add`` with each step, of the shape ``batch_size``, or with each frame.
    """

    replay_buffer: Any = None
    extend_buffer: bool = True

    def __post_init__(self) -> None:
        method = "extend" if self.extend_buffer else "add"
        if self.replay_buffer is not None and not callable(getattr(self.replay_buffer, method, None)):
            raise InvalidArgumentError(
                f"replay_buffer: expected an object with {method}(), got {type(self.replay_buffer).__name__}"
            )


_TORCHRL_ONLY = {
    "collector_class": "a worker steps its environments itself, without a collector of its own",
}
"""Options of torchrl that a collector does not have -> what to do instead."""


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """All options of a collector, in groups."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    weights: WeightConfig = field(default_factory=WeightConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)

    def of(self, **options: Any) -> Self:
        """Return a copy with some options of any group replaced.

        Raises:
            InvalidArgumentError: an unknown option, or an invalid value.
        """
        names = {part.name: [each.name for each in fields(getattr(self, part.name))] for part in fields(self)}
        for group, members in names.items():
            given = {name: options.pop(name) for name in members if name in options}
            if given:
                self = replace(self, **{group: replace(getattr(self, group), **given)})
        for name, value in options.items():
            if name in _TORCHRL_ONLY:
                if value is None or value is False:  # torchrl's defaults
                    continue
                raise InvalidArgumentError(
                    f"{name}={value!r} is an option of torchrl alone: {_TORCHRL_ONLY[name]}"
                )
            known = [each for members in names.values() for each in members]
            raise unknown_option(name, known, "a collector")
        return self

    def check(self, workers: int, *, sync: bool) -> None:
        """Check options that depend on each other, on the number of workers or on ``sync``.

        Raises:
            InvalidArgumentError: options do not fit together.
        """
        batch = self.batch
        per_worker("frames_per_batch", batch.frames_per_batch, workers, "one number")
        self.devices.check(workers)
        places = [self.devices.of(worker) for worker in range(workers)]
        if not sync and batch.join_dim != "stack":
            raise InvalidArgumentError(
                f"cat_results={batch.cat_results!r} needs sync=True: otherwise a batch comes from one worker"
            )
        replayed = self.replay.replay_buffer is not None
        if sync and self.weights.max_staleness is not None and not replayed:
            raise InvalidArgumentError("max_staleness= needs sync=False: a synchronous batch is always new")
        if sync and len({place.storing for place in places}) > 1:
            raise InvalidArgumentError("storing_device: expected one device with sync=True, got several")
        on_cuda = all(place.policy is not None and place.policy.type == "cuda" for place in places)
        if self.policy.cudagraph_options is not None and not on_cuda:
            raise InvalidArgumentError("cudagraph_policy= needs policy_device= (or device=): a CUDA device")
        if self.replay.replay_buffer is not None and not self.replay.extend_buffer:
            for name in ("postproc", "split_trajs"):
                if getattr(batch, name):
                    raise OptionConflictError(
                        f"{name}= needs extend_buffer=True: with extend_buffer=False the replay buffer gets "
                        "single steps"
                    )
        if self.weights.max_staleness is None:
            return
        if not self.policy.track_policy_version:
            raise InvalidArgumentError("max_staleness= needs track_policy_version=True")
        names = getattr(self.policy.track_policy_version, "version", 0)
        if not isinstance(names, int) and (replayed or batch.trajs_per_batch is not None):
            raise OptionConflictError(
                "max_staleness= with replay_buffer= or trajs_per_batch= needs versions that are numbers: "
                f"got a tracker whose version is {names!r}"
            )

    def of_a_worker(self) -> Self:
        """Return the options that a worker needs; those of the trainer alone are reset."""
        batch = replace(self.batch, postproc=None)
        policy = replace(self.policy, track_policy_version=bool(self.policy.track_policy_version))
        return replace(self, batch=batch, policy=policy, weights=WeightConfig(), replay=ReplayConfig())
