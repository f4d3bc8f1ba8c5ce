"""The keywords of collectors, for type checkers: those of the classes in :class:`CollectorConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from aiosync.collectors.batch_config import TrajFormat
from aiosync.collectors.config import Device


class BatchOptions(TypedDict, total=False):
    """See :class:`BatchConfig`."""

    frames_per_batch: int | Sequence[int]
    total_frames: int | None
    max_frames_per_traj: int | None
    init_random_frames: int | None
    reset_at_each_iter: bool
    reset_when_done: bool
    set_truncated: bool
    split_trajs: bool | None
    cat_results: Literal["stack"] | int | None
    preemptive_threshold: float | None
    trajs_per_batch: int | None
    trajs_per_write: int | None
    traj_format: TrajFormat | None
    compact_obs: bool
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    use_buffers: bool | None


class PolicyOptions(TypedDict, total=False):
    """See :class:`PolicyConfig`."""

    exploration_type: InteractionType
    auto_register_policy_transforms: bool | None
    trust_policy: bool | None
    track_policy_version: Any
    compile_policy: bool | Mapping[str, Any] | None
    cudagraph_policy: bool | Mapping[str, Any] | None


class DeviceOptions(TypedDict, total=False):
    """See :class:`DeviceConfig`."""

    device: Device | Sequence[Device] | None
    env_device: Device | Sequence[Device] | None
    policy_device: Device | Sequence[Device] | None
    storing_device: Device | Sequence[Device] | None
    no_cuda_sync: bool


class ProcessOptions(TypedDict, total=False):
    """See :class:`ProcessConfig`."""

    launcher: Literal["process", "ray"]
    ray_options: Mapping[str, Any] | None
    num_workers: int | None
    envs_per_worker: int
    num_threads: int | None
    num_sub_threads: int
    start_method: Literal["spawn", "forkserver"] | None
    restart_workers: int
    init_fn: Callable[[], object] | None
    pre_collect_hook: Callable[[], object] | None
    post_collect_hook: Callable[[TensorDictBase], object] | None
    timeout: float | None


class WeightOptions(TypedDict, total=False):
    """See :class:`WeightConfig`."""

    weight_sync_schemes: Mapping[str, Any] | None
    weight_updater: Any
    weight_recv_schemes: Mapping[str, Any] | None
    worker_idx: int | None
    update_at_each_batch: bool
    max_staleness: int | None
    on_stale: Literal["drop", "wait"]


class ReplayOptions(TypedDict, total=False):
    """See :class:`ReplayConfig`."""

    replay_buffer: Any
    extend_buffer: bool


class CollectorOptions(
    BatchOptions, PolicyOptions, DeviceOptions, ProcessOptions, WeightOptions, ReplayOptions, total=False
):
    """All keywords of a collector."""
