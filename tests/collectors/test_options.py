"""Options, each with both kinds of collectors."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type

from aiosync import InvalidArgumentError, UnpicklableError
from aiosync.collectors import (
    BatchConfig,
    CollectorConfig,
    MultiCollector,
    ProcessConfig,
)
from tests.collectors.kit import ENVS, ListReplayBuffer, check, collecting, workers_of
from tests.collectors.worlds import Counting, make_policy
from tests.kit.marked import mark

BOTH = pytest.mark.parametrize("sync", [True, False])


async def _batches(count: int, *args: Any, **options: Any) -> list[Any]:
    async with collecting(*args, **options) as collector:
        return [await anext(collector) for _ in range(count)]


@BOTH
async def test_a_number_of_frames_for_each_worker(sync: bool) -> None:
    expected = {16} if sync else {6, 10}
    sizes: set[int] = set()
    options = {"cat_results": -1} if sync else {}
    async with collecting(ENVS, sync=sync, frames_per_batch=[6, 10], **options) as collector:
        while sizes != expected:  # one worker may be quicker than the other for long
            sizes.add((await anext(collector)).numel())
            assert sizes <= expected


@BOTH
async def test_total_frames_are_exact(sync: bool) -> None:
    async with collecting(ENVS, sync=sync, total_frames=100) as collector:
        frames = [batch.numel() async for batch in collector]
        assert sum(frames) == collector.frames == 100
        with pytest.raises(StopAsyncIteration):
            await anext(collector)


@BOTH
async def test_arguments_of_the_environments(sync: bool) -> None:
    given = [{"name": 5, "length": 3}, {"name": 6, "length": 4}]
    found = await _batches(4, [Counting] * 2, sync=sync, create_env_kwargs=given)
    names = {int(name) for batch in found for name in batch["observation"][..., 0].reshape(-1)}
    assert names <= {5, 6}
    if sync:
        assert names == {5, 6}
    for batch in found:
        ended = batch["next", "observation"][batch["next", "done"].squeeze(-1)]
        assert torch.equal(ended[:, 2], ended[:, 0] - 2)
    with pytest.raises(
        InvalidArgumentError, match="create_env_kwargs: expected one, or one per worker, 2; got 1"
    ):
        MultiCollector(ENVS, create_env_kwargs=[{}])


@BOTH
async def test_a_factory_for_each_worker(sync: bool) -> None:
    factories = [functools.partial(_constant, 1), functools.partial(_constant, 2)]
    found = await _batches(4, ENVS, sync=sync, policy_factory=factories)
    for batch in found:
        assert torch.equal(batch["action"].float(), batch["observation"][..., 0] + 1)


def _constant(action: int) -> Any:
    return lambda observation: torch.tensor(action)


@BOTH
async def test_batches_without_buffers(sync: bool) -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=sync, use_buffers=False) as collector:
        for version in range(1, 5):
            check(await anext(collector))
            mark(policy, version)
            await collector.update_policy_weights_()
        assert all(not worker.buffers for worker in workers_of(collector))


@BOTH
async def test_what_is_made_of_each_batch(sync: bool) -> None:
    for batch in await _batches(3, ENVS, sync=sync, postproc=_with_sums):
        assert batch["sums"].shape == batch.batch_size


def _with_sums(batch: TensorDictBase) -> TensorDictBase:
    return batch.set("sums", batch["observation"].sum(-1))


@BOTH
async def test_threads(sync: bool) -> None:
    before = torch.get_num_threads()
    try:
        options = {"num_threads": 1, "num_sub_threads": 2}
        async with collecting(ENVS, policy_factory=_Threads, sync=sync, **options) as collector:
            assert torch.get_num_threads() == 1
            assert (await anext(collector))["next", "reward"].unique().tolist() == [2.0]
    finally:
        torch.set_num_threads(before)


class _Threads:
    def __call__(self, observation: Any) -> int:
        return torch.get_num_threads()


@BOTH
async def test_something_done_in_each_worker_first(sync: bool) -> None:
    for batch in await _batches(2, ENVS, sync=sync, init_fn=_set_a_variable, policy_factory=_FromVariable):
        assert batch["next", "reward"].unique().tolist() == [2.0]
    assert "AIOSYNC_TEST_VARIABLE" not in os.environ


def _set_a_variable() -> None:
    os.environ["AIOSYNC_TEST_VARIABLE"] = "2"


class _FromVariable:
    def __init__(self) -> None:
        self.action = int(os.environ["AIOSYNC_TEST_VARIABLE"])

    def __call__(self, observation: Any) -> int:
        return self.action


@BOTH
@pytest.mark.parametrize("each", [1, 3])
async def test_hooks_around_each_batch(sync: bool, each: int) -> None:
    options = {"pre_collect_hook": _count_batches, "post_collect_hook": _write, "envs_per_worker": each}
    async with collecting(
        ENVS, policy_factory=_FromVariable, init_fn=_set_a_variable, sync=sync, **options
    ) as c:
        for _ in range(2):
            batch = await anext(c)
            assert batch["next", "reward"].unique().tolist() == [-3.0]
    async with collecting(ENVS[:1], **options | {"envs_per_worker": 1}) as c:
        for number in range(1, 4):
            batch = await anext(c)
            assert batch["next", "terminated"].sum() == number


_BATCHES: list[None] = []


def _count_batches() -> None:
    _BATCHES.append(None)


def _write(batch: TensorDictBase) -> None:
    assert batch.numel() in (10, 12, 20, 21)
    batch["next", "reward"].fill_(-3)
    batch["next", "terminated"].zero_()
    batch["next", "terminated"].view(-1)[: len(_BATCHES)] = True


@BOTH
async def test_workers_have_the_variables_of_now(sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSYNC_TEST_VARIABLE", "1")
    for batch in await _batches(2, ENVS, sync=sync, policy_factory=_FromVariable):
        assert batch["next", "reward"].unique().tolist() == [1.0]


async def test_hooks_that_are_replaced() -> None:
    async with MultiCollector(ENVS, None, frames_per_batch=16) as collector:
        assert (await anext(collector))["next", "reward"].max() != 9
        await collector.set_post_collect_hook(functools.partial(_fill, value=9.0))
        assert collector.post_collect_hook is not None
        assert (await anext(collector))["next", "reward"].eq(9).all()
        with pytest.raises(UnpicklableError, match="pre_collect_hook"):
            await collector.set_pre_collect_hook(threading.Lock().acquire)
        await collector.set_post_collect_hook(None)
        assert (await anext(collector))["next", "reward"].max() != 9
        with pytest.raises(AttributeError):
            collector.post_collect_hook = None  # type: ignore[misc]


def _fill(batch: Any, value: float) -> None:
    batch["next", "reward"].fill_(value)


@BOTH
@pytest.mark.parametrize(
    ("kind", "action"), [(InteractionType.RANDOM, 0), (InteractionType.DETERMINISTIC, 1)]
)
async def test_interaction_types(sync: bool, kind: InteractionType, action: int) -> None:
    for batch in await _batches(2, ENVS, sync=sync, policy_factory=_Interacting, exploration_type=kind):
        assert batch["action"].unique().tolist() == [action]


class _Interacting:
    def __call__(self, observation: Any) -> int:
        return int(interaction_type() == InteractionType.DETERMINISTIC)


@BOTH
async def test_a_policy_that_is_trusted(sync: bool) -> None:
    for batch in await _batches(2, ENVS, sync=sync, policy_factory=_odd_name, trust_policy=True):
        assert batch["action"].unique().tolist() == [2]


def _odd_name() -> Any:
    return lambda x: x.set("action", torch.tensor(2))


@BOTH
async def test_frames_without_versions(sync: bool) -> None:
    policy = make_policy()
    for batch in await _batches(2, ENVS, policy, sync=sync, track_policy_version=False):
        assert "policy_version" not in batch.keys()
    with pytest.raises(InvalidArgumentError, match="needs track_policy_version"):
        MultiCollector(ENVS, policy, sync=False, track_policy_version=False, max_staleness=1)


@BOTH
async def test_weights_before_each_batch(sync: bool) -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=sync, update_at_each_batch=True) as collector:
        for version in range(1, 6):
            mark(policy, version)
            batch = await anext(collector)
            check(batch)
            if sync:
                assert batch["marks"].unique().tolist() == [version]
        assert collector.policy_version == 5


@BOTH
async def test_an_episode_that_nobody_ends(sync: bool) -> None:
    found = await _batches(2, ENVS[:1], sync=sync, reset_when_done=False)
    steps = torch.cat([batch["observation"].reshape(-1, 4)[:, 2] for batch in found])
    assert torch.equal(steps, torch.arange(40.0))


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {"compile_policy": {"backend": "eager"}},
        pytest.param({"compile_policy": True}, marks=pytest.mark.soak),  # a compiler's minute
    ],
)
async def test_a_compiled_policy(sync: bool, options: dict[str, Any]) -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=sync, timeout=120, **options) as collector:
        for version in range(1, 5):
            check(await anext(collector))
            mark(policy, version)
            await collector.update_policy_weights_()


@BOTH
async def test_devices(sync: bool) -> None:
    options = {
        "policy_device": ["cpu", "cpu"],
        "env_device": "cpu",
        "storing_device": "meta",
        "no_cuda_sync": True,
    }
    for batch in await _batches(2, ENVS, make_policy(), sync=sync, **options):
        assert batch.device == torch.device("meta")
        assert batch["observation"].is_meta
        assert batch.numel() == 20
    for batch in await _batches(2, ENVS, make_policy(), sync=sync, device="cpu"):
        check(batch)


class _Named:
    """A tracker as torchrl's of UUIDs."""

    version = "first"

    def increment_version(self) -> None:
        """Not called."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "this machine has no CUDA device"),
        ({"device": "cdua"}, "device='cdua': expected a device"),
        ({"policy_device": ["cpu"]}, "policy_device: expected one device, or one per worker, 2; got 1"),
        ({"storing_device": ["cpu", "meta"], "sync": True}, "storing_device: expected one device"),
        ({"cudagraph_policy": True}, "cudagraph_policy= needs policy_device="),
        ({"launcher": "slurm"}, "expected 'process' or 'ray'"),
        ({"ray_options": {}}, "needs launcher='ray'"),
        ({"on_stale": "wati"}, "expected 'drop' or 'wait'"),
        ({"on_stale": "wait", "sync": False}, "needs max_staleness="),
        ({"max_staleness": -1, "sync": False}, "expected 0 or more versions"),
        ({"restart_workers": -1}, "expected 0 or more"),
        ({"num_workers": 0}, "expected a positive number"),
        ({"preemptive_threshold": -0.1}, "a number in \\[0, 1\\]"),
        ({"max_staleness": 1, "sync": True}, "max_staleness= needs sync=False"),
        (
            {"max_staleness": 1, "track_policy_version": _Named(), "replay_buffer": ListReplayBuffer()},
            "needs versions that are numbers: got a tracker whose version is 'first'",
        ),
        (
            {"max_staleness": 1, "track_policy_version": _Named(), "trajs_per_batch": 1, "sync": False},
            "needs versions that are numbers",
        ),
        ({"start_method": "fork"}, "expected 'spawn' or 'forkserver'"),
        ({"weight_updater": 3}, "weight_updater: expected an updater"),
        ({"collector_class": dict}, "is an option of torchrl alone: a worker steps its environments"),
        ({"total_frames": "many"}, "expected a number of frames, or None"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    if torch.cuda.is_available() and options.get("device") == "cuda":
        pytest.skip("there is one here")
    with pytest.raises(InvalidArgumentError, match=message):
        MultiCollector(ENVS, make_policy(), **options)


def test_torchrls_defaults_of_options_that_it_alone_has() -> None:
    names = ("trajs_per_batch", "trajs_per_write", "traj_format", "auto_register_policy_transforms")
    options: dict[str, Any] = {"collector_class": None, **dict.fromkeys(names)}
    MultiCollector(ENVS, compact_obs=False, **options)


@BOTH
async def test_a_configuration_in_place_of_options(sync: bool) -> None:
    config = CollectorConfig(batch=BatchConfig(frames_per_batch=6), processes=ProcessConfig(num_workers=2))
    for batch in await _batches(2, Counting, sync=sync, config=config, frames_per_batch=8):
        assert batch.numel() == 8


@BOTH
async def test_a_batch_is_the_trainers_own_while_it_has_it(sync: bool) -> None:
    async with collecting(ENVS, make_policy(), sync=sync) as collector:
        kept = [await anext(collector) for _ in range(6)]
        copies = [batch.clone() for batch in kept]
        for _ in range(6):
            await anext(collector)
        for batch, copy in zip(kept, copies, strict=True):
            assert (batch == copy).all()
        parts = {leaf.untyped_storage().data_ptr() for batch in kept for leaf in batch.values(True, True)}
        assert len(parts) >= 6, "kept batches lie in different memory"


@BOTH
async def test_memory_is_used_again(sync: bool) -> None:
    seen = set()
    async with collecting(ENVS, make_policy(), sync=sync) as collector:
        for _ in range(30):
            batch = await anext(collector)
            seen.add(batch["observation"].untyped_storage().data_ptr())
            del batch
    assert len(seen) <= 8


class _Twice(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.ones(observation.shape[:-1], dtype=torch.int64)


@BOTH
async def test_a_policy_with_hooks_is_called_with_them(sync: bool) -> None:
    policy = TensorDictModule(_Twice(), in_keys=["observation"], out_keys=["action"])
    policy.register_forward_hook(_doubled)
    for batch in await _batches(2, ENVS, policy, sync=sync):
        assert batch["action"].unique().tolist() == [2]


def _doubled(module: Any, given: Any, found: TensorDictBase) -> TensorDictBase:
    return found.set("action", found["action"] * 2)
