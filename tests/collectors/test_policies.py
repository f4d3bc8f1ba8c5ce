"""How policies reach the workers: without the weights that a scheme sends, and with all else."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from aiosync import (
    InvalidArgumentError,
    SharedMemWeightSyncScheme,
    UnknownModelError,
    UnpicklableError,
    UnsupportedTensorError,
)
from aiosync.collectors import Collector, MultiCollector
from aiosync.collectors.pickling import PolicySkeleton
from tests.collectors.kit import ENVS, check, collecting, specs_of, workers_of
from tests.collectors.worlds import Counting, make_policy
from tests.kit.clock import PATIENCE, within
from tests.kit.marked import Marked, mark

# -- what travels -----------------------------------------------------------------------------------------


class Odds(nn.Module):
    """Has every kind of tensor that a module can have, and acts by the sum of all."""

    table: Tensor
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.linear.weight
        self.twin = nn.Parameter(self.linear.bias.data)  # other object, same memory
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.frozen.label = "kept"  # type: ignore[attr-defined]
        self.narrow = nn.Parameter(torch.rand(2, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 2)  # keeps weak references to its parameters
        self.register_buffer("running", torch.rand(2))
        self.register_buffer("table", torch.rand(2), persistent=False)
        self.plain = torch.rand(2)
        self.view = self.narrow.detach()[:1]
        self.nested = {"list": [torch.rand(1)], "parameter": self.frozen}

    def values(self) -> list[Tensor]:
        """All tensors."""
        own = [*self.parameters(), *self.buffers(), self.plain, self.view, *self.nested["list"]]
        return [tensor.detach().float().clone() for tensor in own]

    def forward(self, observation: Tensor) -> Tensor:
        with torch.no_grad():
            self.lstm(torch.zeros(1, 1, 4))
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    @property
    def report(self) -> list[Any]:
        """All tensors, and what is tied."""
        tied = self.tied.weight is self.linear.weight, self.twin.data_ptr() == self.linear.bias.data_ptr()
        kept = self.nested["parameter"] is self.frozen, getattr(self.frozen, "label", None)
        grads = [p.requires_grad for p in self.parameters()]
        return [self.values(), tied, kept, grads]


def same(found: list[Any], expected: list[Any]) -> bool:
    """Whether two reports are equal."""
    values = zip(found[0], expected[0], strict=True)
    return found[1:] == expected[1:] and all(torch.equal(one, other) for one, other in values)


async def test_every_kind_of_tensor_arrives_and_is_updated() -> None:
    policy = Odds()
    async with collecting(ENVS, policy, restart_workers=1) as collector:
        assert all(same(report, policy.report) for report in await reports(collector))
        await within(anext(collector))
        with torch.no_grad():
            policy.linear.weight.add_(1)
            policy.running.add_(1)
        await collector.update_policy_weights_()
        assert all(same(report, policy.report) for report in await reports(collector))
        (first, _) = workers_of(collector)
        first.host.kill()
        while workers_of(collector)[0] is first:
            await within(anext(collector))
        assert all(same(report, policy.report) for report in await reports(collector)), "after a restart"


async def reports(collector: MultiCollector) -> list[Any]:
    """What each worker's policy has."""
    return await collector._call_all("get_attribute", PATIENCE, "policy", "report")


async def test_the_trainer_keeps_no_copies_of_the_weights() -> None:
    large = Marked(actions=3)
    large.register_parameter("large", nn.Parameter(torch.zeros(500_000)))
    async with collecting(ENVS, large) as collector:
        await within(anext(collector))
        specs = specs_of(collector)
        assert sum(len(pickle.dumps(spec.make_policy)) for spec in specs) < 20_000
        assert specs[0].make_policy.func.__self__ is specs[1].make_policy.func.__self__  # type: ignore[union-attr]


async def test_a_policy_in_this_process() -> None:
    policy = Odds()
    async with Collector(Counting, policy, frames_per_batch=10) as collector:
        (report,) = await reports(collector)
        assert same(report, policy.report)


async def test_weights_that_no_scheme_sends_travel() -> None:
    policy = make_policy()
    mark(policy, 5)
    schemes = {"policy.module.net": SharedMemWeightSyncScheme(timeout=PATIENCE)}
    async with collecting(ENVS, policy, weight_sync_schemes=schemes) as collector:
        assert (await within(anext(collector)))["marks"].unique().tolist() == [5]
        large = nn.Linear(1000, 1000)
        assert PolicySkeleton(large, []).nbytes > 4_000_000
        assert PolicySkeleton(large, [large]).nbytes < 4_000
        assert len(PolicySkeleton(lambda x: x, []).make(None)(3) * [0]) == 3


def test_a_sharded_policy_is_whole_in_a_worker() -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        policy = nn.Linear(6, 2)
        policy.weight = nn.Parameter(tensor.distribute_tensor(policy.weight.detach(), mesh))
        made = PolicySkeleton(policy, [policy]).make(None)
    finally:
        dist.destroy_process_group()
    assert type(made.weight) is nn.Parameter
    assert made.weight.is_meta
    assert made.weight.shape == (2, 6)


# -- what is refused when a collector is made ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["create_env_fn", "policy", "policy_factory", "init_fn"])
def test_an_argument_that_cannot_be_pickled_is_named(name: str) -> None:
    lock = threading.Lock()

    def unpicklable(*_: Any) -> Any:
        return lock

    given: dict[str, Any] = {
        "create_env_fn": ENVS,
        name: [unpicklable] * 2 if name == "create_env_fn" else unpicklable,
    }
    with pytest.raises(UnpicklableError, match=f"{name}= cannot be pickled.*lock"):
        MultiCollector(**given)
    with pytest.raises(RuntimeError):  # as torchrl
        MultiCollector(**given)


async def test_a_policy_that_is_only_the_source_of_weights_need_not_be_pickled() -> None:
    policy = make_policy()
    policy.lock = threading.Lock()
    async with collecting(ENVS, policy, policy_factory=make_random_policy) as collector:
        mark(policy, 3)
        await collector.update_policy_weights_()
        assert (await within(anext(collector)))["marks"].unique().tolist() == [3]


# -- a factory's policy, and models without a scheme ---------------------------------------------------------


class Random(Marked):
    """Begins with random marks."""

    def __init__(self) -> None:
        super().__init__(actions=3)
        with torch.no_grad():
            self.first.copy_(torch.rand(()))
            self.last.copy_(self.first)


def make_random_policy() -> Any:
    """A policy with random weights."""
    policy = make_policy()
    policy.module = Random()
    return policy


@pytest.mark.parametrize("options", [{}, {"weight_sync_schemes": {}}])
async def test_a_factory_alone_gives_all_workers_one_version_0(options: dict[str, Any]) -> None:
    async with collecting(ENVS, policy_factory=make_random_policy, **options) as collector:
        assert len((await within(anext(collector)))["marks"].unique()) == 1
        trained = make_random_policy()
        mark(trained, 1)
        await collector.update_policy_weights_(trained)
        check(await within(anext(collector)))
        with pytest.raises(InvalidArgumentError, match="only a policy_factory"):
            await collector.update_policy_weights_()


async def test_an_empty_mapping_of_schemes_is_the_default() -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, weight_sync_schemes={}) as collector:
        mark(policy, 1)
        await collector.update_policy_weights_(model_id=None)
        check(await within(anext(collector)))
        assert collector.policy_version == 1


@pytest.mark.parametrize(
    ("factory", "why"),
    [(lambda: torch.zeros, "no modules"), ("fails here", "failed in this process: RuntimeError: not here")],
)
async def test_a_factory_without_weights_is_explained_by_the_first_update(factory: Any, why: str) -> None:
    if factory == "fails here":
        factory = _FailsIn(threading.main_thread().native_id)
    async with collecting(ENVS, policy_factory=factory) as collector:
        with pytest.raises(UnknownModelError, match=why) as caught:
            await collector.update_policy_weights_(make_policy())
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, KeyError)


class _FailsIn:
    """A factory that fails in one process."""

    def __init__(self, main: int | None) -> None:
        self.main = main

    def __call__(self) -> Any:
        if threading.main_thread().native_id == self.main:
            raise RuntimeError("not here")
        return make_policy()


async def test_updates_by_device_and_with_a_mask() -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, policy_device="cpu") as collector:
        await collector.update_policy_weights_(weights=policy.state_dict(), worker_ids=torch.device("cpu"))
        await collector.update_policy_weights_(policy=policy, worker_ids=[torch.device("cpu")])
        assert collector.policy_version == 2
        for wrong in (torch.device("meta"), 7, [0, 7], "0"):
            with pytest.raises(InvalidArgumentError, match="unknown worker"):
                await collector.update_policy_weights_(worker_ids=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="got weights and policy: expected one of them"):
            await collector.update_policy_weights_(weights=policy, policy=policy)
        with pytest.raises(
            InvalidArgumentError, match="weights_dict cannot be combined with policy_or_weights, m"
        ):
            await collector.update_policy_weights_(policy, model_id="policy", weights_dict={"policy": policy})
        with pytest.warns(DeprecationWarning, match="policy_or_weights"):
            await collector.update_policy_weights_(policy_weights=policy)
        assert collector.policy_version == 3
        for mask in ([True], [True] * 3):
            with pytest.raises(InvalidArgumentError, match=f"one value per worker, 2; got {len(mask)}"):
                await collector.reset(mask)
        with pytest.raises(InvalidArgumentError, match="no policy in this process"):
            MultiCollector(ENVS).get_model()


@pytest.mark.parametrize("kind", [Collector, MultiCollector])
async def test_weights_that_cannot_be_sent_end_the_start(kind: type[MultiCollector]) -> None:
    policy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedTensorError, match="run one forward pass first"):
        async with kind(Counting, policy, frames_per_batch=20, timeout=PATIENCE):
            pass
