"""How torchrl's multi-process collectors use schemes: their own, and those that they are given."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import RandomPolicy
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme

from tests.compat.suite.marking import (
    Marked,
    collecting,
    fill,
    make_env,
    make_policy,
    until,
)

SCHEMES = [None, SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
GIVEN = SCHEMES[1:]
COLLECTORS = [MultiSyncCollector, MultiAsyncCollector]


def _with(scheme: Any) -> dict[str, Any]:
    return {} if scheme is None else {"weight_sync_schemes": {"policy": scheme()}}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_each_form_of_an_update(kind: Any, scheme: Any) -> None:
    policy = make_policy()
    with collecting(kind, policy, **_with(scheme)) as collector:
        made = collector._weight_sync_schemes["policy"]
        assert isinstance(made, scheme or SharedMemWeightSyncScheme)
        batches = iter(collector)
        until(batches, 0.0)
        other = make_policy()
        forms: list[Any] = [
            lambda: collector.update_policy_weights_(),
            lambda: collector.update_policy_weights_(None),
            lambda: collector.update_policy_weights_(policy),
            lambda: collector.update_policy_weights_(other),
            lambda: collector.update_policy_weights_(TensorDict.from_module(policy)),
            lambda: collector.update_policy_weights_(TensorDict.from_module(policy).lock_()),
            lambda: collector.update_policy_weights_(TensorDict.from_module(other).data.clone()),
            lambda: collector.update_policy_weights_(policy_or_weights=TensorDict.from_module(other).data),
            lambda: collector.update_policy_weights_(weights_dict={"policy": TensorDict.from_module(other)}),
            lambda: collector.update_policy_weights_(weights_dict={"policy": other}),
            lambda: collector.update_policy_weights_(policy, model_id="policy"),
            lambda: collector.update_policy_weights_(policy, worker_ids=[0, 1]),
        ]
        for number, update in enumerate(forms, start=1):
            fill(policy, number)
            fill(other, number)
            update()
            until(batches, number)
        with pytest.raises(KeyError):
            collector.update_policy_weights_(weights_dict={"critic": policy})
        until(batches, len(forms))


@pytest.mark.parametrize("scheme", GIVEN)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_factory_alone_with_a_scheme_that_has_a_model(kind: Any, scheme: Any) -> None:
    given = scheme()
    given.init_on_sender(model=make_policy(), devices=["cpu"] * 2, model_id="policy")
    weights = TensorDict.from_module(make_policy(3.0))
    options = {"policy_factory": make_policy, "weight_sync_schemes": {"policy": given}}
    with collecting(kind, **options, init_random_frames=-1, max_frames_per_traj=50) as collector:
        collector.update_policy_weights_(weights)
        batches = iter(collector)
        until(batches, 3.0)
        for tensor in weights.values(True, True):
            tensor.data.fill_(4.0)
        collector.update_policy_weights_(weights)
        until(batches, 4.0)


class _Unpicklable(Marked):
    def __getstate__(self) -> Any:
        raise RuntimeError("not to be pickled")


@pytest.mark.parametrize("scheme", GIVEN)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_policy_that_cannot_be_pickled_beside_a_factory(kind: Any, scheme: Any) -> None:
    keys: Any = {"in_keys": ["observation"], "out_keys": ["action", "mark", "stamp"]}
    policy = TensorDictModule(_Unpicklable(), **keys)
    with collecting(kind, policy, policy_factory=make_policy, **_with(scheme)) as collector:
        batches = iter(collector)
        next(batches)
        fill(policy, 1)
        collector.update_policy_weights_()
        until(batches, 1)


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize("how", ["one buffer for all", "a buffer each", "named"])
def test_a_scheme_with_a_map_of_weights(kind: Any, how: str) -> None:
    policy = make_policy()
    weights = TensorDict.from_module(policy)
    weights.share_memory_()
    scheme = SharedMemWeightSyncScheme()
    if how == "a buffer each":
        scheme.init_on_sender(params_map={n: weights.data.clone().share_memory_() for n in range(2)})
    else:
        name: dict[str, Any] = {"model_id": "policy"} if how == "named" else {}
        scheme.init_on_sender(params_map=dict.fromkeys(range(2), weights), **name)
    with collecting(kind, policy, weight_sync_schemes={"policy": scheme}) as collector:
        batches = iter(collector)
        next(batches)
        fill(policy, 1)
        collector.update_policy_weights_()
        until(batches, 1)
        assert weights["module", "mark"].item() == 1.0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", [Collector, *COLLECTORS])
def test_updates_while_a_buffer_is_filled(kind: Any, scheme: Any) -> None:
    env = CountingEnv()
    net = nn.Linear(env.observation_spec["observation"].shape[-1], 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    policy = TensorDictSequential(
        TensorDictModule(lambda x: x.float(), in_keys=["observation"], out_keys=["action"]),
        TensorDictModule(net, in_keys=["action"], out_keys=["action"]),
        TensorDictModule(lambda x: x.to(torch.int8), in_keys=["action"], out_keys=["action"]),
    )
    weights = TensorDict.from_module(policy).data.clone()
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    single = kind is Collector
    if single and scheme is not None:
        pytest.skip("a collector in one process has no workers")
    collector = kind(
        env if single else [CountingEnv] * 2,
        policy,
        replay_buffer=buffer,
        total_frames=-1,
        frames_per_batch=16,
        **_with(scheme),
    )
    try:
        collector.start()
        _wait(lambda: len(buffer) >= 16)
        _wait(lambda: bool((buffer[-16:]["action"] == 0).all()))
        weights["module", "1", "module", "bias"] += 1
        collector.update_policy_weights_(weights)
        _wait(lambda: bool((buffer[-16:]["action"] == 1).all()))
    finally:
        collector.async_shutdown(timeout=10)


def _wait(holds: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_state_dicts_of_the_collector(kind: Any, scheme: Any) -> None:
    policy = TensorDictModule(nn.LazyLinear(7), in_keys=["observation"], out_keys=["action"])
    policy(ContinuousActionVecMockEnv().reset())
    collector = kind(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        device=[torch.device("cpu")] * 2,
        frames_per_batch=20,
        total_frames=-1,
        **_with(scheme),
    )
    try:
        for _ in range(2):
            states = collector.state_dict()
            for worker in range(2):
                found = states[f"worker{worker}"]["policy_state_dict"]
                torch.testing.assert_close(found, policy.state_dict())
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(torch.randn_like(parameter))
            collector.update_policy_weights_()
        collector.load_state_dict(collector.state_dict())
    finally:
        collector.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_at_each_batch(scheme: Any) -> None:
    policy = make_policy()
    with collecting(MultiSyncCollector, policy, update_at_each_batch=True, **_with(scheme)) as collector:
        batches = iter(collector)
        for number in range(1, 4):
            fill(policy, number)
            until(batches, number)


@pytest.mark.parametrize("worker", [0, [0]])
def test_an_update_of_one_worker(worker: Any) -> None:
    policy = make_policy()
    given = {"policy": MultiProcessWeightSyncScheme()}
    options = {"cat_results": "stack", "weight_sync_schemes": given}
    with collecting(MultiSyncCollector, policy, **options) as collector:
        batches = iter(collector)
        next(batches)
        weights = TensorDict.from_module(make_policy(5.0)).data.clone()
        collector.update_policy_weights_(weights, worker_ids=worker)
        for _ in range(20):
            batch = next(batches)
        assert batch["mark"][0].unique().tolist() == [5.0]
        assert batch["mark"][1].unique().tolist() == [0.0]


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(7)

    def forward(self, observation: torch.Tensor) -> Any:
        action = self.net(observation)
        return action, action.sum(), action.max()


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_policy_that_is_wrapped(kind: Any) -> None:
    policy = _Plain()
    policy(ContinuousActionVecMockEnv().reset()["observation"])
    collector = kind([ContinuousActionVecMockEnv] * 2, policy, frames_per_batch=20, total_frames=-1)
    try:
        batches = iter(collector)
        assert (next(batches)["action"] != 0).any()
        for parameter in policy.parameters():
            parameter.data.zero_()
        collector.update_policy_weights_()
        until(batches, 0.0, ("action",))
    finally:
        collector.shutdown()


class _Nothing(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., 0] > 0


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.cell = nn.LSTM(4, 2, batch_first=True)
        self.cell.flatten_parameters()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        out, _ = self.cell(self.norm.eval()(observation.reshape(1, 4)).unsqueeze(0))
        action: torch.Tensor = out.reshape(2).argmax(-1)
        return action


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("transient", torch.zeros(3), persistent=False)
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        action: torch.Tensor = self.two(self.one(observation) * self.frozen).sum(-1) > 0
        return action


@pytest.mark.parametrize("model", [_Nothing, _Recurrent, _Tied])
@pytest.mark.parametrize("kind", COLLECTORS)
def test_policies_of_many_kinds_with_the_default_scheme(kind: Any, model: Any) -> None:
    module = TensorDictSequential(
        TensorDictModule(model(), in_keys=["observation"], out_keys=["action"]),
        TensorDictModule(lambda a: a.long(), in_keys=["action"], out_keys=["action"]),
    )
    with collecting(kind, module, device="cpu") as collector:
        collector.set_seed(3)
        batches = iter(collector)
        for _ in range(3):
            next(batches)
            collector.update_policy_weights_()
            collector.update_policy_weights_(TensorDict.from_module(module))


@pytest.mark.parametrize("kind", COLLECTORS)
def test_no_module_at_all(kind: Any) -> None:
    with collecting(kind, RandomPolicy(make_env().action_spec)) as collector:
        assert next(iter(collector)).numel() == 16
    with collecting(kind, RandomPolicy(make_env().action_spec), total_frames=32) as collector:
        assert sum(batch.numel() for batch in collector) == 32


@pytest.mark.parametrize("backend", ["shared", "thread", "process", "multiprocessing"])
def test_schemes_by_name(backend: str) -> None:
    made = WeightSyncScheme.from_backend(backend)
    wanted = SharedMemWeightSyncScheme if backend in ("shared", "thread") else MultiProcessWeightSyncScheme
    assert type(made) is wanted
    policy = make_policy()
    with collecting(MultiSyncCollector, policy, weight_sync_schemes={"policy": made}) as collector:
        fill(policy, 1)
        collector.update_policy_weights_()
        until(iter(collector), 1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_an_update_before_the_first_batch(kind: Any, scheme: Any) -> None:
    policy = make_policy()
    with collecting(kind, policy, **_with(scheme)) as collector:
        fill(policy, 7)
        collector.update_policy_weights_()
        until(iter(collector), 7)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_versions(scheme: Any) -> None:
    policy = make_policy()
    with collecting(MultiSyncCollector, policy, track_policy_version=True, **_with(scheme)) as collector:
        batches = iter(collector)
        next(batches)
        for number in range(1, 4):
            fill(policy, number)
            collector.update_policy_weights_()
            until(batches, number, ("mark", "stamp", ("next", "policy_version")))


def test_a_collector_that_is_never_shut_down() -> None:
    collector = MultiSyncCollector([make_env] * 2, make_policy(), frames_per_batch=16, total_frames=32)
    assert sum(batch.numel() for batch in collector) == 32
    del collector


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_collector_with_the_same_policy(scheme: Any) -> None:
    policy = make_policy()
    for number in range(1, 3):
        with collecting(MultiSyncCollector, policy, **_with(scheme)) as collector:
            fill(policy, number)
            collector.update_policy_weights_()
            until(iter(collector), number)
