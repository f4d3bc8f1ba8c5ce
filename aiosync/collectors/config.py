"""What a collector is asked to do, in frozen dataclasses that check themselves.

A collector takes the same as keywords: :meth:`CollectorConfig.of` sorts them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from aiosync._deadline import check_timeout, default_timeout
from aiosync.collectors.devices import DeviceConfig
from aiosync.errors import InvalidArgumentError

__all__ = [
    "BatchConfig",
    "CollectorConfig",
    "PolicyConfig",
    "ProcessConfig",
    "ReplayConfig",
    "StartMethod",
    "WeightConfig",
]

StartMethod: TypeAlias = Literal["spawn", "forkserver"]


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{name}={value!r}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Which frames a batch is made of. A frame is one step of one environment.

    Attributes:
        frames_per_batch: frames of each batch that is handed out; or, a sequence, of each worker's part.
        total_frames: where to stop; -1: never. If batches do not divide it, the last one goes past.
        max_frames_per_traj: an episode is truncated after so many steps; 0: never.
        init_random_frames: so many frames at the beginning are acted at random.
        reset_at_each_iter: each batch begins with a reset.
        reset_when_done: an episode that has ended is followed by another.
        set_truncated: a batch's last frame is marked as truncated, so that nothing is bootstrapped across.
        split_trajs: hand batches out as ``(trajectories, steps)``, padded, with ``("collector", "mask")``.
        cat_results: how workers' parts are put together in a synchronous batch: along a dimension, or stacked
            along a new first one.
        preemptive_threshold: when this share of the workers has delivered, the others are cut short.
        postproc: called with each batch; gives the one that is handed out.
        use_buffers: batches come through shared memory that is used again and again; else each is pickled
            and comes through a pipe. (With Ray the one is as the other.)
    """

    frames_per_batch: int | Sequence[int] = 200
    total_frames: int = -1
    max_frames_per_traj: int = 0
    init_random_frames: int = 0
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    split_trajs: bool = False
    cat_results: Literal["stack"] | int = "stack"
    preemptive_threshold: float = 1.0
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    use_buffers: bool = True

    def __post_init__(self) -> None:
        each = self.frames_per_batch
        for number in [each] if isinstance(each, int) else each:
            _check_positive("frames_per_batch", number)
        if self.total_frames != -1:
            _check_positive("total_frames", self.total_frames)
        for name in ("max_frames_per_traj", "init_random_frames"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidArgumentError(f"{name}={value!r}: expected 0 or a positive number of frames")
        if not 0 < self.preemptive_threshold <= 1:
            raise InvalidArgumentError(
                f"preemptive_threshold={self.preemptive_threshold!r}: expected a share of the workers, "
                "more than 0 and at most 1"
            )
        if self.cat_results != "stack" and not isinstance(self.cat_results, int):
            raise InvalidArgumentError(
                f"cat_results={self.cat_results!r}: expected 'stack' or the number of a dimension"
            )

    def frames_of(self, worker: int, workers: int) -> int:
        """Frames of a worker's part of a synchronous batch; the first ones take what does not divide."""
        each = self.frames_per_batch
        if not isinstance(each, int):
            return each[worker]
        return each // workers + (worker < each % workers)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How the policy acts.

    Attributes:
        exploration_type: whether it samples or gives its mode (tensordict's interaction types).
        trust_policy: it takes and gives TensorDicts, whatever its signature looks like.
        track_policy_version: tag each frame with the version that acted, as ``"policy_version"`` and
            ``("next", "policy_version")``.
        compile_policy: compile it in each worker; a mapping: with these arguments of ``torch.compile``.
        cudagraph_policy: capture it as a CUDA graph in each worker; a mapping: with these arguments of
            tensordict's ``CudaGraphModule``. Its weights are copied into the memory that it has, as a graph
            needs it (a scheme that you give has to have ``commit="copy"``).
    """

    exploration_type: InteractionType = InteractionType.RANDOM
    trust_policy: bool = False
    track_policy_version: bool = True
    compile_policy: bool | Mapping[str, Any] = False
    cudagraph_policy: bool | Mapping[str, Any] = False

    @property
    def needs_fixed_memory(self) -> bool:
        """Whether weights have to stay where they were when the policy was captured."""
        compiling = self.compile_policy if isinstance(self.compile_policy, Mapping) else {}
        captured = compiling.get("mode") in ("reduce-overhead", "max-autotune")
        return captured or self.cudagraph_policy is not False


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The workers.

    Attributes:
        launcher: what workers are: ``"process"``: processes on this machine; ``"ray"``: actors of the Ray
            cluster that this process has joined (``ray.init()``).
        ray_options: Ray's options for each actor. The default is ``{"num_cpus": 1}``.
        num_workers: how many, if ``create_env_fn`` is one function.
        envs_per_worker: how many environments each steps at the same time.
        num_threads: torch's threads in this process while workers run; None: as they are.
        num_sub_threads: torch's threads in each worker.
        start_method: how processes begin. None: forked by a server that has imported torch once for all of
            them (``"forkserver"``), where there is such a thing, else ``"spawn"``.
        restart_workers: how often a worker that has died is started again, before it is an error.
        init_fn: called in each worker before anything else.
        timeout: seconds that a call may take which is not told its own; None: as everywhere in aiosync.
    """

    launcher: Literal["process", "ray"] = "process"
    ray_options: Mapping[str, Any] | None = None
    num_workers: int | None = None
    envs_per_worker: int = 1
    num_threads: int | None = None
    num_sub_threads: int = 1
    start_method: StartMethod | None = None
    restart_workers: int = 0
    init_fn: Callable[[], object] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.launcher not in ("process", "ray"):
            raise InvalidArgumentError(f"launcher={self.launcher!r}: expected 'process' or 'ray'")
        if self.start_method not in (None, "spawn", "forkserver"):
            raise InvalidArgumentError(
                f"start_method={self.start_method!r}: expected 'spawn' or 'forkserver' (a process with an "
                "event loop and threads, as this one, is not to be forked)"
            )
        if self.ray_options is not None and self.launcher != "ray":
            raise InvalidArgumentError("ray_options= is of launcher='ray'")
        for name in ("envs_per_worker", "num_sub_threads"):
            _check_positive(name, getattr(self, name))
        for name in ("num_workers", "num_threads"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.restart_workers < 0:
            raise InvalidArgumentError(f"restart_workers={self.restart_workers!r}: expected 0 or more")
        if self.timeout is not None:
            check_timeout(self.timeout, f"timeout={self.timeout!r}")

    @property
    def seconds(self) -> float:
        """What a call may take."""
        return default_timeout() if self.timeout is None else self.timeout


@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """How weights get to the workers.

    Attributes:
        weight_sync_schemes: model -> scheme; None: the policy's, by shared memory.
        weight_updater: what brings weights to the workers in the place of schemes, as in older programs of
            torchrl's: an updater of ours or torchrl's, or a function that makes one.
        weight_recv_schemes: model -> scheme, for a collector that is itself the worker of another: what comes
            by these it hands on to its own workers, before its own model has it.
        worker_idx: which of that other's workers this is.
        update_at_each_batch: send the policy's weights before each batch is begun.
        max_staleness: how many versions behind the policy's newest a batch's oldest frame may be where it is
            handed out; None: any.
        on_stale: what to do about others: ``"drop"`` them; or ``"wait"``: have no more batches collected at a
            time than would be used up by so many updates, if there is one after each (and drop what is
            too old all the same).
    """

    weight_sync_schemes: Mapping[str, Any] | None = None
    weight_updater: Any = None
    weight_recv_schemes: Mapping[str, Any] | None = None
    worker_idx: int | None = None
    update_at_each_batch: bool = False
    max_staleness: int | None = None
    on_stale: Literal["drop", "wait"] = "drop"

    def __post_init__(self) -> None:
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise InvalidArgumentError("weight_updater= and weight_sync_schemes= are two ways of one thing")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise InvalidArgumentError(f"max_staleness={self.max_staleness!r}: expected 0 or more versions")
        if self.on_stale not in ("drop", "wait"):
            raise InvalidArgumentError(f"on_stale={self.on_stale!r}: expected 'drop' or 'wait'")
        if self.on_stale == "wait" and self.max_staleness is None:
            raise InvalidArgumentError("on_stale='wait' is of sync=False, with max_staleness=")

    @property
    def allowed_updates(self) -> float:
        """How many there may be between asking for a batch and handing it out."""
        if self.on_stale == "drop" or self.max_staleness is None:
            return math.inf
        return self.max_staleness


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Where batches go instead of to the iterating caller.

    Attributes:
        replay_buffer: anything with ``extend(frames)``, such as torchrl's. The iterator then gives None for
            each batch, and :meth:`~aiosync.collectors.MultiCollector.start` collects by itself.
        extend_buffer: extend it with the frames; else ``add`` each batch as one item.
    """

    replay_buffer: Any = None
    extend_buffer: bool = True

    def __post_init__(self) -> None:
        method = "extend" if self.extend_buffer else "add"
        if self.replay_buffer is not None and not callable(getattr(self.replay_buffer, method, None)):
            raise InvalidArgumentError(
                f"replay_buffer: expected something with {method}(), got {type(self.replay_buffer).__name__}"
            )


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """All of it.

    Attributes:
        batch, policy, devices, processes, weights, replay: see there.
    """

    batch: BatchConfig = field(default_factory=BatchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)
    weights: WeightConfig = field(default_factory=WeightConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)

    def of(self, **options: Any) -> Self:
        """The same with some of it said otherwise, by the names of the parts' attributes.

        Raises:
            InvalidArgumentError: an option that there is not, or a value that cannot be.
        """
        for part in fields(self):
            names = {known.name for known in fields(getattr(self, part.name))}
            given = {name: options.pop(name) for name in names & options.keys()}
            if given:
                self = replace(self, **{part.name: replace(getattr(self, part.name), **given)})
        for name in options:
            known = [each.name for part in fields(self) for each in fields(getattr(self, part.name))]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f": expected one of {', '.join(sorted(known))}"
            raise InvalidArgumentError(f"{name}= is not an option of a collector{hint}")
        return self

    def check(self, workers: int, *, sync: bool) -> None:
        """Check what depends on how many workers there are, or on one thing and another.

        Raises:
            InvalidArgumentError: it does not fit.
        """
        batch = self.batch
        each = batch.frames_per_batch
        if not isinstance(each, int) and len(each) != workers:
            raise InvalidArgumentError(
                f"frames_per_batch: expected one number, or one per worker, {workers}; got {len(each)}"
            )
        self.devices.check(workers)
        places = [self.devices.of(worker) for worker in range(workers)]
        if sync and min(batch.frames_of(worker, workers) for worker in range(workers)) < 1:
            raise InvalidArgumentError(
                f"frames_per_batch={each!r}: a synchronous batch has a part of each worker: expected at "
                f"least {workers}, as there are workers"
            )
        if not sync and batch.preemptive_threshold != 1:
            raise InvalidArgumentError(
                "preemptive_threshold= needs sync=True: otherwise no batch waits for the slower workers"
            )
        if sync and self.weights.max_staleness is not None:
            raise InvalidArgumentError("max_staleness= is of sync=False: a synchronous batch is always new")
        if sync and len({place.storing for place in places}) > 1:
            raise InvalidArgumentError("storing_device: a synchronous batch lies on one device; got several")
        on_cuda = all(place.policy is not None and place.policy.type == "cuda" for place in places)
        if self.policy.cudagraph_policy is not False and not on_cuda:
            raise InvalidArgumentError("cudagraph_policy= needs policy_device= (or device=): a CUDA device")
        if self.weights.max_staleness is not None and not self.policy.track_policy_version:
            raise InvalidArgumentError("max_staleness= needs track_policy_version=True")

    def of_a_worker(self) -> Self:
        """What a worker has to know of it: nothing that is the trainer's own."""
        return replace(
            self, batch=replace(self.batch, postproc=None), weights=WeightConfig(), replay=ReplayConfig()
        )

    @property
    def per_batch(self) -> int:
        """Frames of a batch of all workers."""
        each = self.batch.frames_per_batch
        return each if isinstance(each, int) else sum(each)
