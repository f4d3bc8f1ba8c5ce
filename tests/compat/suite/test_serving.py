"""Weights for torchrl's evaluators and inference servers."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn
from torchrl.collectors import Evaluator
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

from tests.compat.suite.marking import fill, make_env, make_policy

GIVEN = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


def _marks(batch: Any) -> dict[str, Any]:
    return {"mark": float(batch["mark"].unique()), "stamp": float(batch["stamp"].unique())}


@pytest.mark.parametrize("scheme", [None, *GIVEN])
def test_an_evaluator_in_a_process(scheme: Any) -> None:
    given = {} if scheme is None else {"weight_sync_schemes": {"policy": scheme()}}
    evaluator = Evaluator(
        make_env,
        policy_factory=_factory,
        max_steps=8,
        backend="process",
        metrics_fn=_marks,
        **given,
    )
    try:
        trained = make_policy()
        for number, weights in enumerate(
            [trained, TensorDict.from_module(trained), TensorDict.from_module(trained).data], start=1
        ):
            fill(trained, number)
            found = evaluator.evaluate(weights=weights, step=number)
            assert found["eval/mark"] == number and found["eval/stamp"] == number
        fill(trained, 9)
        evaluator.trigger_eval(weights_dict={"policy": trained}, step=9)
        found = evaluator.wait(timeout=60)
        assert found is not None and found["eval/mark"] == 9
    finally:
        evaluator.shutdown()


def _factory(env: Any = None) -> Any:
    return make_policy()


def test_an_evaluator_in_a_thread() -> None:
    evaluator = Evaluator(make_env(), make_policy(), max_steps=8, metrics_fn=_marks)
    try:
        trained = make_policy(4.0)
        assert evaluator.evaluate(weights=trained, step=0)["eval/mark"] == 4
    finally:
        evaluator.shutdown()


@pytest.mark.parametrize("scheme", GIVEN)
def test_an_inference_server(scheme: Any) -> None:
    served, trained = make_policy(), make_policy(1.0)
    sender = scheme()
    sender.init_on_sender(model_id="policy", model=trained, devices=[torch.device("cpu")])
    receiver = copy.copy(sender) if hasattr(type(sender), "__copy__") else _as_in_a_worker(sender)
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    with InferenceServer(served, ThreadingTransport(), weight_sync=receiver) as server:
        client = server.client()
        connecting.join(60)
        for number in range(2, 5):
            fill(trained, number)
            sender.send(weights=TensorDict.from_module(trained).data)
            deadline = time.monotonic() + 30
            while (answer := client(TensorDict({"observation": torch.randn(4)})))["mark"] != number:
                assert time.monotonic() < deadline, answer["mark"]
        assert server.policy_version >= 3
    receiver.shutdown()
    sender.shutdown()


def _as_in_a_worker(sender: Any) -> Any:
    receiver = object.__new__(type(sender))
    receiver.__setstate__(sender.__getstate__())
    return receiver


def _worker(scheme: Any, results: Any, ready: Any) -> None:
    model = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    scheme.connect(worker_idx=0)
    results.put(("initial", model.bias.data[0].item()))
    ready.set()
    scheme.receive()
    deadline = time.monotonic() + 30
    while model.bias.data[0].item() != 4.0 and time.monotonic() < deadline:
        time.sleep(0.05)
    results.put(("updated", model.bias.data[0].item()))


@pytest.mark.parametrize("form", ["TensorDict", "module", "devices alone"])
@pytest.mark.parametrize("scheme", GIVEN)
def test_a_scheme_by_itself(scheme: Any, form: str) -> None:
    spawn = mp.get_context("spawn")
    model = nn.Linear(4, 2)
    model.bias.data.fill_(2.0)
    sender = scheme(strategy="tensordict")
    given: dict[str, Any] = {"weights": TensorDict.from_module(model), "num_workers": 1}
    if form != "TensorDict":
        given = {"model": model}
    sender.init_on_sender(model_id="policy", devices=[torch.device("cpu")], **given)
    ready, results = spawn.Event(), spawn.Queue()
    worker = spawn.Process(target=_worker, args=(sender, results, ready))
    worker.start()
    sender.connect()
    assert ready.wait(60)
    model.bias.data.fill_(4.0)
    sender.send(TensorDict.from_module(model))
    found = dict(results.get(timeout=60) for _ in range(2))
    assert found == {"initial": 2.0, "updated": 4.0}
    worker.join(60)
    sender.shutdown()


def test_no_scheme_at_all() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model_id="policy")
    scheme.connect()
    scheme.send()
    assert scheme.receive() is None
    assert scheme.create_transport().check_connection()
