"""The same lines with torchrl's schemes and with the blocking twins."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl import weight_update
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

import aiosync
from aiosync import NotConnectedError, collectors, sync
from tests.compat.policies import FRAMES, collecting, make_env, make_policy, mark
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform, fill, value_of

BOTH = pytest.mark.parametrize("library", [weight_update, sync], ids=["torchrl", "aiosync"])


# -- a scheme that is initialised before it is handed to the collector ------


@BOTH
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_initialised_before_the_collector_has_it(library: Any, kind: Any) -> None:
    policy = make_policy()
    weights = TensorDict.from_module(policy).data.clone().share_memory_()
    scheme = library.SharedMemWeightSyncScheme()
    scheme.init_on_sender(params_map={0: weights, 1: weights})
    with collecting(kind, policy, {"policy": scheme}, total_frames=3 * FRAMES) as collector:
        for _ in collector:
            mark(policy, 7)
            collector.update_policy_weights_(policy)
        assert scheme.weights["module", "first"].eq(7).all()


async def test_initialised_before_our_collector_has_it() -> None:
    policy = make_policy()
    weights = TensorDict.from_module(policy).data.clone()
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(params_map={0: weights, 1: weights})
    schemes = {"policy": scheme}
    options: Any = {"frames_per_batch": FRAMES, "weight_sync_schemes": schemes}
    async with collectors.MultiSyncCollector([make_env] * 2, policy, **options) as collector:
        mark(policy, 3)
        await collector.update_policy_weights_(policy)
        batch = await anext(collector)
        assert batch["marks"].eq(3).all()
    assert scheme.model_id == "policy"


# -- no scheme at all ------


@BOTH
def test_every_call_of_no_scheme_succeeds(library: Any) -> None:
    weights = TensorDict(w=torch.ones(2))
    scheme = library.NoWeightSyncScheme()
    transport = scheme.create_transport(pipe=None)
    assert transport.check_connection()
    scheme.init_on_sender("policy")
    assert scheme.initialized_on_sender
    scheme.send(weights)
    scheme.connect()
    assert scheme.synchronized_on_sender
    scheme.send(weights=weights, worker_ids=[0])
    assert scheme.prepare_weights(weights, "policy", scheme.strategy)["w"].eq(1).all()
    worker = library.NoWeightSyncScheme()
    worker.init_on_receiver(model_id="policy")
    worker.connect(worker_idx=0)
    assert worker.receive(timeout=0.1) is None
    worker.shutdown()
    scheme.shutdown()
    scheme.shutdown()


async def test_no_scheme_has_endpoints_too() -> None:
    each: Any
    for each in (aiosync.NoWeightSyncScheme(), sync.NoWeightSyncScheme()):
        for endpoint in (each.get_sender(), each.create_sender()):
            assert endpoint.version == 0
        assert each.prepare_weights() is None
    scheme = aiosync.NoWeightSyncScheme()
    sender, receiver, transport = (
        scheme.get_sender(),
        scheme.get_receiver(),
        scheme.create_transport(worker_idx=0),
    )
    assert (await sender.send({"w": torch.ones(1)})).ok
    received: Any = await receiver.receive(0.1)
    assert received is None
    await transport.send_weights({})
    await transport.wait_ack()
    received = await transport.receive_weights(timeout=0.1)
    assert received is None
    scheme.init_on_sender(model_id="policy")
    await scheme.connect()
    await scheme.aclose()
    assert not scheme.initialized_on_sender


# -- senders and receivers ------


async def test_a_sender_and_a_receiver_have_the_schemes_calls() -> None:
    model, target = Uniform(), Uniform()
    scheme = aiosync.MemoryWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    sender = scheme.get_sender()
    assert sender is scheme.create_sender() and sender.version == -1
    with pytest.raises(NotConnectedError):
        await sender.send(model)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    receiver = worker.get_receiver()
    with pytest.raises(NotConnectedError):
        await receiver.receive(0.1)
    await within(asyncio.gather(scheme.connect(), worker.connect()))
    assert scheme.get_sender() is sender and worker.get_receiver() is receiver

    fill(model, 1)
    assert (await sender.send_async(model)).version == 1
    weights = await receiver.receive(PATIENCE)
    assert isinstance(weights, TensorDict) and value_of(target) == 1
    assert (await sender.wait_async(timeout=PATIENCE)).ok
    async with worker.receiving():
        fill(model, 2)
        assert (await sender.update_weights(model)).version == 2
        fill(model, 3)
        assert (await sender.send(worker_ids=0, timeout=PATIENCE)).version == 3
        assert (await sender.wait_ack([0])).ok
    assert value_of(target) == 3
    assert await receiver.receive(0.01) is not None  # version 3, which no call has returned
    assert await receiver.receive(0.01) is None
    await worker.aclose()
    await scheme.aclose()
    with pytest.raises(NotConnectedError):
        scheme.get_sender()
    with pytest.raises(NotConnectedError):
        worker.get_receiver()


def test_the_twins_endpoints_block() -> None:
    model, target = Uniform(), Uniform()
    scheme = sync.MemoryWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    sender = scheme.create_sender()
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    receiver = worker.create_receiver()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(worker.connect)
        scheme.connect()
        connecting.result(PATIENCE)
    fill(model, 1)
    assert sender.send(model).ok and sender.version == receiver.version == 1
    fill(model, 2)
    sender.send_async()
    assert sender.wait_async(timeout=PATIENCE).ok and value_of(target) == 2
    assert isinstance(receiver.receive(0.1), TensorDict)
    assert {name: float(value.mean()) for name, value in receiver.weights.items()}
    receiver.apply_weights({name: torch.full_like(p, 9) for name, p in target.state_dict().items()})
    assert value_of(target) == 9
    assert sender.update_weights(model).version == 3 and list(sender.workers) == [0]
    worker.close()
    scheme.close()


# -- what init_on_sender takes ------


def _uniform_weights() -> Any:
    return TensorDict({"net": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"params_map": {}},
        {"params_map": {0: None}},
        {"params_map": {"0": _uniform_weights()}},
        {"params_map": {0: _uniform_weights()}, "weights": _uniform_weights()},
        {"params_map": {0: _uniform_weights()}, "devices": ["cpu"]},
        {"params_map": {0: _uniform_weights()}, "num_workers": 1},
        {"weights": _uniform_weights(), "devices": ["no-such-device"]},
        {"weights": _uniform_weights(), "device_map_fn": 3, "num_workers": 1},
        {"weights": _uniform_weights(), "device_map_fn": lambda worker, weights: None, "num_workers": 1},
    ],
)
@pytest.mark.parametrize("scheme", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
def test_wrong_values_are_value_errors(scheme: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "params_map" in wrong else "device"):
        getattr(sync, scheme)().init_on_sender(**wrong)


@BOTH
def test_combinations_that_torchrl_refuses_too(library: Any) -> None:
    weights = _uniform_weights()
    for wrong in ({"devices": ["cpu"]}, {"num_workers": 1}, {"weights": weights}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            library.SharedMemWeightSyncScheme().init_on_sender(params_map={0: weights}, **wrong)


def test_a_groups_device_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiosync.sender import worker_plan

    cuda = torch.device("cuda", 0)

    def placed(device: Any) -> torch.device:  # this machine has no GPU: "meta" stands for one
        return cuda if torch.device(device).type == "meta" else worker_plan.CPU

    monkeypatch.setattr(worker_plan, "_as_device", placed)
    there = _uniform_weights().to("meta")
    for weights in (
        there,
        {"net": {"weight": torch.ones(1, device="meta")}},
        torch.nn.Linear(1, 1, device="meta"),
    ):
        plan = worker_plan.make_plan(worker_plan.SenderArguments(params_map={0: weights}), per_worker=False)
        assert [group.device for group in plan.groups] == [cuda]
    arguments = worker_plan.SenderArguments(
        weights=_uniform_weights(),
        num_workers=2,
        device_map_fn=lambda worker, weights: weights.to("meta") if worker else weights,
    )
    plan = worker_plan.make_plan(arguments, per_worker=False)
    assert [group.device for group in plan.groups] == [worker_plan.CPU, cuda]


class _Fallback:
    """A context of torchrl's kind, without a policy of its own."""

    policy_device = ("cpu",)
    num_workers = 1

    def __init__(self, fallback: Any, cached: Any = None) -> None:
        self._fallback_policy = fallback
        self.cached = cached

    def get_cached_weights(self, model_id: str) -> Any:
        """Weights that torchrl's collectors keep for each device."""
        return self.cached if model_id == "value" else None


@pytest.mark.parametrize("model_id", ["policy", "value"])
async def test_what_a_context_has_instead_of_a_model(model_id: str) -> None:
    model = Uniform()
    fill(model, 4)
    context = _Fallback(model, TensorDict.from_module(model).data)
    scheme = aiosync.SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id=model_id, context=context)
    prepared = scheme.prepare_weights(None, model_id, scheme.strategy, context)
    assert all(value.eq(4).all() for value in prepared.values(True, True))
    theirs = weight_update.MultiProcessWeightSyncScheme()
    if model_id == "policy":  # torchrl 0.14.1 reads get_cached_weights nowhere
        found = theirs.prepare_weights(None, "policy", theirs.strategy, context)
        assert set(found.keys(True, True)) == set(prepared.keys(True, True))
    await scheme.aclose()


async def test_as_many_workers_as_pipes() -> None:
    import multiprocessing

    ends = [multiprocessing.Pipe() for _ in range(2)]
    scheme = aiosync.MultiProcessWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(), pipes=[ours for ours, _ in ends])
    assert sorted(scheme._plan.workers) == [0, 1]  # type: ignore[union-attr]
    await scheme.aclose()
    for pair in ends:
        for end in pair:
            end.close()


# -- constructors ------


@BOTH
@pytest.mark.parametrize(
    ("name", "given", "strategy"),
    [
        ("SharedMemWeightSyncScheme", ("tensordict", False, True), "tensordict"),
        ("MultiProcessWeightSyncScheme", ("state_dict", True), "state_dict"),
        ("DistributedWeightSyncScheme", ("gloo", True, 60.0), "tensordict"),
        ("RPCWeightSyncScheme", ("state_dict",), "state_dict"),
        ("RayWeightSyncScheme", ("state_dict", "gloo"), "state_dict"),
        ("RayWeightSyncScheme", ("tensordict", "nccl"), "tensordict"),
        ("RayModuleTransformScheme", ("state_dict", "gloo"), "state_dict"),
        ("NoWeightSyncScheme", ("tensordict",), "tensordict"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_positional_arguments(library: Any, name: str, given: tuple[Any, ...], strategy: str) -> None:
    assert getattr(library, name)(*given).strategy_str == strategy


@pytest.mark.parametrize(
    "name", sorted({name for name in sync.__all__ if name.endswith("Scheme")} - {"WeightSyncScheme"})
)
def test_the_repr_of_a_scheme_whose_constructor_failed(name: str) -> None:
    for cls in (getattr(aiosync, name), getattr(sync, name)):
        scheme = cls.__new__(cls)
        with pytest.raises(aiosync.InvalidArgumentError):
            scheme.__init__(timeout=-1.0)
        assert name in repr(scheme) and "constructor failed" in repr(scheme)
