"""The ways by which weights get to a collector's workers, and through it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from aiosync import (
    InvalidArgumentError,
    LayoutMismatchError,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NotInitializedError,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    TCPWeightSyncScheme,
    WeightSyncScheme,
)
from aiosync.sync import updaters as blocking_updaters
from aiosync.updaters import VanillaWeightUpdater, WeightUpdaterBase
from tests.collectors.kit import ENVS, check, collecting, workers_of
from tests.collectors.worlds import make_policy
from tests.kit.clock import PATIENCE, within
from tests.kit.marked import mark

BOTH = pytest.mark.parametrize("sync", [True, False])
SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "shared": lambda: SharedMemWeightSyncScheme(timeout=PATIENCE),
    "process": lambda: MultiProcessWeightSyncScheme(timeout=PATIENCE),
    "tcp": lambda: TCPWeightSyncScheme("tcp://127.0.0.1:0", token="a token of the tests", timeout=PATIENCE),
}


@BOTH
@pytest.mark.parametrize("name", SCHEMES)
async def test_any_scheme(sync: bool, name: str) -> None:
    policy = make_policy()
    options = {"sync": sync, "weight_sync_schemes": {"policy": SCHEMES[name]()}}
    async with collecting(ENVS, policy, **options) as collector:
        for version in range(1, 8):
            check(await anext(collector))
            mark(policy, version)
            await collector.update_policy_weights_()
        assert collector.policy_version == 7


async def test_no_scheme_at_all() -> None:
    policy = make_policy()
    options = {"weight_sync_schemes": {"policy": NoWeightSyncScheme()}}
    async with collecting(ENVS, policy, **options) as collector:
        mark(policy, 1)
        await collector.update_policy_weights_()
        assert (await anext(collector))["marks"].unique().tolist() == [0]


@BOTH
async def test_weights_that_are_given(sync: bool) -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=sync) as collector:
        other = make_policy()
        mark(other, 1)
        await collector.update_policy_weights_(other)
        mark(other, 2)
        await collector.update_policy_weights_(TensorDict.from_module(other))
        assert collector.get_cached_weights()["module", "first"] == 2  # type: ignore[index]
        await collector.reset()
        assert policy.module.first == 0
        mark(other, 3)
        await collector.update_policy_weights_(weights_dict={"policy": other.state_dict()}, worker_ids=[0])
        assert collector.policy_version == 3
        assert await collector.getattr_policy_all("module.first") == [3.0, 2.0]
        with pytest.raises(
            InvalidArgumentError, match="value: this collector has no scheme for such a model"
        ):
            await collector.update_policy_weights_(other, model_id="value")
        with pytest.raises(LayoutMismatchError):
            await collector.update_policy_weights_({"module.first": torch.zeros(())})
        check(await anext(collector))


class Pair(nn.Module):
    """A policy and a value net, each with a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.ParameterDict({"mark": nn.Parameter(torch.zeros(()))})
        self.value = nn.ParameterDict({"mark": nn.Parameter(torch.zeros(()))})

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        marks = torch.stack([self.actor["mark"].detach(), self.value["mark"].detach()])
        action = torch.zeros(observation.shape[:-1], dtype=torch.int64)
        return action, marks.expand(*observation.shape[:-1], 2).clone()


@BOTH
async def test_several_models_at_once(sync: bool) -> None:
    pair = Pair()
    policy = TensorDictModule(pair, in_keys=["observation"], out_keys=["action", "marks"])
    names = ["policy.module.actor", "policy.module.value"]
    schemes = {name: SharedMemWeightSyncScheme(timeout=PATIENCE) for name in names}
    async with collecting(ENVS, policy, sync=sync, weight_sync_schemes=schemes) as collector:
        for version in range(1, 30):
            marks = (await anext(collector))["marks"]
            assert torch.equal(marks[..., 0], marks[..., 1]), "one model was ahead of the other"
            with torch.no_grad():
                pair.actor["mark"].fill_(version)
                pair.value["mark"].fill_(version)
            await collector.update_policy_weights_(weights_dict=dict.fromkeys(names))
        with torch.no_grad():
            pair.value["mark"].fill_(100)
        await collector.update_policy_weights_(weights_dict=dict.fromkeys(names), worker_ids=[1])
        assert await collector.getattr_policy_all("module.value.mark") == [29.0, 100.0]


class Writing(WeightUpdaterBase):
    """Writes into weights that workers have too."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared

    def _get_server_weights(self) -> Any:
        return self.collector.trained

    def all_worker_ids(self) -> list[int]:
        return [0]

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.shared.update_(server_weights)


@BOTH
async def test_an_updater(sync: bool) -> None:
    policy = make_policy()
    policy.share_memory()
    trained = copy.deepcopy(policy)
    updater = Writing(TensorDict.from_module(policy).data)
    async with collecting(ENVS, policy, sync=sync, weight_updater=updater) as collector:
        collector.trained = TensorDict.from_module(trained).data  # type: ignore[attr-defined]
        assert updater.collector is collector
        await anext(collector)
        mark(trained, 1)
        async with collector.pause():
            await collector.update_policy_weights_()
            assert collector.policy_version == 1
        found = await within(anext(collector))
        while found["marks"].min() < 1:  # a worker began it before the update
            found = await within(anext(collector))
        assert found["marks"].unique().tolist() == [1]
        assert found["policy_version"].unique().tolist() == [1]
        await collector.increment_version()
        assert collector.policy_version == 2
    with pytest.raises(InvalidArgumentError, match="expected one of them"):
        async with collecting(ENVS, policy, weight_updater=updater, weight_sync_schemes={}):
            pass


@pytest.mark.parametrize("module", ["ours", "blocking"])
async def test_updaters_that_write_in_place(module: str) -> None:
    policy = make_policy()
    policy.share_memory()
    kinds: Any = VanillaWeightUpdater if module == "ours" else blocking_updaters.VanillaWeightUpdater
    make = lambda: kinds.from_policy(policy)  # noqa: E731 - a factory
    async with collecting(ENVS, policy, weight_updater=make) as collector:
        trained = make_policy()
        mark(trained, 4)
        await collector.update_policy_weights_(trained)
        assert (await anext(collector))["marks"].unique().tolist() == [4]


async def test_a_worker_that_comes_back_counts_on() -> None:
    async with collecting(ENVS[:1], restart_workers=1) as collector:
        await collector.increment_version()
        await collector.increment_version()
        await anext(collector)
        (worker,) = workers_of(collector)
        worker.host.kill()
        await within(_until_another(collector, worker))
        for _ in range(2):
            found = await anext(collector)
        assert found["policy_version"].unique().tolist() == [2]


async def _until_another(collector: Any, worker: Any) -> None:
    while workers_of(collector)[0] is worker:
        await anext(collector)


@BOTH
async def test_a_collector_under_another(sync: bool) -> None:
    trained, between = make_policy(), make_policy()
    above = MemoryWeightSyncScheme(timeout=PATIENCE)
    above.init_on_sender(model_id="policy", model=trained, num_workers=1)
    receiving = copy.copy(above)
    options = {"sync": sync, "weight_recv_schemes": {"policy": receiving}, "worker_idx": 0}
    connecting = asyncio.create_task(above.connect())
    async with collecting(ENVS, between, **options) as collector:
        await connecting
        assert collector.worker_idx == 0
        for version in range(1, 5):
            mark(trained, version)
            report = await above.send()
            assert report.ok
            assert between.module.first == version
            await collector.receive_weights()
            seen = await within(anext(collector))
            while not sync and seen["marks"].min() < version:  # as above
                seen = await within(anext(collector))
            assert seen["marks"].unique().tolist() == [version]
            assert seen["policy_version"].unique().tolist() == [version + 1]  # what it began with was 0
        with pytest.raises(InvalidArgumentError, match="without weights"):
            await collector.receive_weights(trained)
    await above.aclose()


async def test_weights_for_the_collectors_own_policy() -> None:
    policy, other = make_policy(), make_policy()
    async with collecting(ENVS, policy) as collector:
        with pytest.raises(NotInitializedError, match="weight_recv_schemes"):
            await collector.receive_weights()
        mark(other, 3)
        await collector.receive_weights(other)
        assert policy.module.last == 3
        await collector.update_policy_weights_()
        assert (await anext(collector))["marks"].unique().tolist() == [3]
    async with collecting(ENVS) as collector:
        assert collector.get_cached_weights() is None
        with pytest.raises(NotInitializedError, match="whose policy is a module"):
            await collector.receive_weights(other)


async def test_attributes_of_a_replay_buffer() -> None:
    class Replay:
        capacity = 3

        def extend(self, frames: Any) -> None: ...

    async with collecting(ENVS, replay_buffer=Replay()) as collector:
        assert collector.getattr_rb("capacity") == 3
    async with collecting(ENVS) as collector:
        with pytest.raises(NotInitializedError, match="replay_buffer="):
            collector.getattr_rb("capacity")


@BOTH
async def test_a_model_without_a_scheme_below_is_updated_here_only(sync: bool) -> None:
    trained, between = make_policy(), make_policy()
    above = MemoryWeightSyncScheme(timeout=PATIENCE)
    above.init_on_sender(model_id="policy.module.net", model=trained.module.net, num_workers=1)
    options = {"sync": sync, "weight_recv_schemes": {"policy.module.net": copy.copy(above)}, "worker_idx": 0}
    connecting = asyncio.create_task(above.connect())
    async with collecting(ENVS, between, **options) as collector:
        await connecting
        with torch.no_grad():
            trained.module.net.bias.fill_(7)
        assert (await above.send()).ok
        assert between.module.net.bias.tolist() == [7] * 3
        assert collector.policy_version == 0
        await within(anext(collector))
    await above.aclose()
