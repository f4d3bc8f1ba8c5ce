"""How torchrl's schemes behave, said in torchrl's names alone: run by tools/torchrl_suite.py with both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import multiprocessing as mp
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
SECONDS = 30.0


def _worker(scheme: Any, index: int, pipe: Any) -> None:
    """Answers with what its model's weights are, each time that it is asked."""
    model = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    while pipe.recv() == "weights":
        pipe.send((model.weight.unique().tolist(), model.bias.unique().tolist()))
    scheme.shutdown()


def _fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


class _Workers:
    def __init__(self, scheme: Any, model: nn.Module, count: int) -> None:
        self.scheme = scheme
        scheme.init_on_sender(model=model, devices=[torch.device("cpu")] * count, model_id="policy")
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_worker, args=(scheme, index, theirs))
            for index, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def weights(self, index: int) -> Any:
        self.pipes[index].send("weights")
        assert self.pipes[index].poll(SECONDS)
        return self.pipes[index].recv()

    def until(self, index: int, value: float) -> None:
        """Wait until a worker has these weights: an acknowledgement may be sent before that."""
        deadline = time.monotonic() + SECONDS
        while self.weights(index) != ([value], [value]):
            assert time.monotonic() < deadline, self.weights(index)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send("end")
        for process in self.processes:
            process.join(SECONDS)
        self.scheme.shutdown()


@contextmanager
def _connected(scheme: Any, model: nn.Module, count: int = 2) -> Iterator[_Workers]:
    workers = _Workers(scheme, model, count)
    try:
        scheme.connect()
        yield workers
    finally:
        workers.close()


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_workers_begin_with_the_senders_weights_and_follow(kind: Callable[..., Any], strategy: str) -> None:
    model = nn.Linear(4, 2)
    _fill(model, 1.0)
    scheme = kind(strategy=strategy)
    assert scheme.strategy_str == strategy and not scheme.initialized_on_sender
    with _connected(scheme, model) as workers:
        assert scheme.initialized_on_sender and scheme.synchronized_on_sender
        for index in range(2):
            workers.until(index, 1.0)
        for value in (2.0, 3.0):
            _fill(model, value)
            scheme.send(weights=TensorDict.from_module(model).data)
            for index in range(2):
                workers.until(index, value)


@pytest.mark.parametrize("worker_ids", [0, [0]])
def test_some_workers(worker_ids: Any) -> None:
    model = nn.Linear(4, 2)
    _fill(model, 1.0)
    scheme = MultiProcessWeightSyncScheme()
    with _connected(scheme, model) as workers:
        workers.until(1, 1.0)
        _fill(model, 5.0)
        scheme.send(weights=TensorDict.from_module(model).data.clone(), worker_ids=worker_ids)
        workers.until(0, 5.0)
        assert workers.weights(1) == ([1.0], [1.0])


@pytest.mark.parametrize("kind", SCHEMES)
def test_sending_before_there_is_anything_to_send(kind: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError):
        kind().send()


def test_by_name() -> None:
    made = WeightSyncScheme.from_backend("shared")
    assert isinstance(made, WeightSyncScheme)
    with pytest.raises(ValueError, match="backend"):
        WeightSyncScheme.from_backend("pigeon")


@pytest.mark.parametrize("kind", SCHEMES)
def test_what_a_scheme_is(kind: Callable[..., Any]) -> None:
    scheme = kind()
    assert isinstance(scheme, WeightSyncScheme)
    assert scheme.model_id is None and scheme.worker_idx is None and scheme.context is None
    scheme.model_id = "policy"
    assert scheme.model_id == "policy"


def _make_env() -> Any:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class _Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(()))
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(observation).argmax(-1), self.mark.detach().expand(observation.shape[:-1]).clone()


def _make_policy() -> Any:
    return TensorDictModule(_Marked(), in_keys=["observation"], out_keys=["action", "mark"])


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("collector", [MultiSyncCollector, MultiAsyncCollector])
def test_collectors(kind: Callable[..., Any], collector: Callable[..., Any]) -> None:
    policy = _make_policy()
    collecting = collector(
        [_make_env] * 2,
        policy,
        frames_per_batch=32,
        total_frames=32 * 8,
        weight_sync_schemes={"policy": kind()},
    )
    try:
        seen = set()
        for number, batch in enumerate(collecting, start=1):
            seen |= set(batch["mark"].unique().tolist())
            _fill(policy.module, float(number))
            collecting.update_policy_weights_(TensorDict.from_module(policy).data)
        assert 0.0 in seen and max(seen) >= 5.0
    finally:
        collecting.shutdown()


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_factory_beside_the_policy(kind: Callable[..., Any]) -> None:
    policy = _make_policy()
    _fill(policy.module, 4.0)
    collecting = MultiSyncCollector(
        [_make_env] * 2,
        policy,
        policy_factory=_make_policy,
        frames_per_batch=32,
        total_frames=64,
        weight_sync_schemes={"policy": kind()},
    )
    try:
        for batch in collecting:
            assert batch["mark"].unique().tolist() == [4.0]
    finally:
        collecting.shutdown()


def test_versions_are_tracked() -> None:
    policy = _make_policy()
    collecting = MultiSyncCollector(
        [_make_env] * 2,
        policy,
        frames_per_batch=32,
        total_frames=32 * 4,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
        track_policy_version=True,
    )
    try:
        for number, batch in enumerate(collecting):
            assert batch["next", "policy_version"].unique().tolist() == [number]
            collecting.update_policy_weights_()
    finally:
        collecting.shutdown()


def test_nothing_to_do_in_one_process() -> None:
    policy = _make_policy()
    collecting = Collector(
        _make_env,
        policy,
        frames_per_batch=16,
        total_frames=48,
        weight_sync_schemes={"policy": NoWeightSyncScheme()},
    )
    for number, batch in enumerate(collecting):
        assert batch["mark"].unique().tolist() == [float(number)]
        _fill(policy.module, float(number + 1))
        collecting.update_policy_weights_()
    collecting.shutdown()
