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
    options = {"frames_per_batch": FRAMES, "weight_sync_schemes": schemes}
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
    for scheme in (aiosync.NoWeightSyncScheme(), sync.NoWeightSyncScheme()):
        for endpoint in (scheme.get_sender(), scheme.create_sender()):
            assert endpoint.version == 0
        assert scheme.prepare_weights() is None
    scheme = aiosync.NoWeightSyncScheme()
    sender, receiver = scheme.get_sender(), scheme.get_receiver()
    assert (await sender.send({"w": torch.ones(1)})).ok
    assert await receiver.receive(0.1) is None
    transport = scheme.create_transport(worker_idx=0)
    await transport.send_weights({})
    await transport.wait_ack()
    assert await transport.receive_weights(timeout=0.1) is None
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
