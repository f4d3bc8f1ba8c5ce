"""Transports alone: the same lines with torchrl's classes, which block, and with ours, which are awaited."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

import aiosync

theirs = pytest.importorskip("torchrl.weight_update")

pytestmark = pytest.mark.filterwarnings("ignore")

both = pytest.mark.parametrize("lib", [theirs, aiosync], ids=["torchrl", "aiosync"])

SECONDS = 20.0


async def done(result: Any) -> Any:
    """Return what a call of torchrl's returned, or what awaiting ours returns."""
    return await result if inspect.isawaitable(result) else result


async def closed(*transports: Any) -> None:
    """Close ours; torchrl's have no end."""
    for each in transports:
        if isinstance(each, aiosync.Transport):
            await each.aclose()


def weights_of(value: float) -> TensorDictBase:
    return TensorDict({"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)})


@both
async def test_mp_queue(lib: Any) -> None:
    queue: Any = multiprocessing.Queue()
    ack_queue: Any = multiprocessing.Queue()
    sender, receiver = lib.MPTransport(queue, ack_queue, 10.0), lib.MPTransport(queue, timeout=SECONDS)
    assert (receiver.timeout, receiver.weight_queue, receiver.ack_queue) == (SECONDS, queue, None)
    await done(sender.setup_connection_and_weights_on_sender())
    assert await done(sender.send_weights_async(weights_of(1.0), "policy")) is None
    found = await done(receiver.setup_connection_and_weights_on_receiver(worker_idx=0))
    assert (found == weights_of(1.0)).all()
    model = torch.nn.Linear(3, 2)
    await done(sender.send_weights_async(weights_of(2.0)))
    found = await done(
        receiver.receive_weights(SECONDS, model=model, strategy=lib.WeightStrategy("tensordict"))
    )
    assert (found == weights_of(2.0)).all()
    assert model.weight.tolist() == [[2.0] * 3] * 2
    await closed(sender, receiver)
    for each in (queue, ack_queue):
        each.close()
        each.join_thread()


@both
async def test_a_message_that_is_none(lib: Any) -> None:
    queue: Any = multiprocessing.Queue()
    queue.put(((None, None), "close"))
    receiver = lib.MPTransport(queue, timeout=SECONDS)
    with pytest.raises(ValueError, match=r"(?i)expected"):
        await done(receiver.receive_weights(SECONDS))
    await closed(receiver)
    queue.close()
    queue.join_thread()


@both
async def test_shared_memory(lib: Any) -> None:
    transport = lib.SharedMemTransport()
    for call in (
        lambda: transport.unique_weights,
        lambda: transport.send_weights(weights_of(1.0)),
        transport.setup_connection_and_weights_on_sender,
        lambda: transport.setup_connection_and_weights_on_receiver(worker_idx=0),
    ):
        with pytest.raises(RuntimeError):
            await done(call())
    queues: Any = {0: multiprocessing.SimpleQueue(), 1: multiprocessing.SimpleQueue()}
    shared = weights_of(0.0)
    transport.register_weights({0: shared, 1: shared}, queues)
    await done(transport.send_weights(weights_of(1.0)))
    assert (transport.unique_weights[0] == weights_of(1.0)).all()
    await done(transport.send_weights({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}))
    assert (transport.unique_weights[0] == weights_of(0.0)).all()
    with pytest.raises(ValueError):
        await done(transport.send_weights({0: weights_of(1.0), 1: weights_of(2.0)}))
    await done(transport.send_ack())
    await closed(transport)


@both
async def test_shared_memory_per_worker(lib: Any) -> None:
    transport = lib.SharedMemTransport()
    queues: Any = {0: multiprocessing.SimpleQueue(), 1: multiprocessing.SimpleQueue()}
    transport.register_weights({0: weights_of(0.0), 1: weights_of(0.0)}, queues, per_worker=True)
    assert len(transport.unique_weights) == 2
    await done(transport.send_weights({0: weights_of(1.0), 1: weights_of(2.0)}))
    await done(transport.send_weights(weights_of(3.0), worker_ids=[1]))
    assert [each["bias"].tolist() for each in transport.unique_weights] == [[1.0, 1.0], [3.0, 3.0]]
    with pytest.raises(ValueError):
        await done(transport.send_weights({7: weights_of(1.0)}))
    await closed(transport)


@both
@pytest.mark.parametrize("kind", ["RPCTransport", "DistributedTransport", "RayTransport"])
async def test_without_a_target(lib: Any, kind: str) -> None:
    if kind == "RayTransport":
        pytest.importorskip("ray")
    arguments = {"weights_buffer": weights_of(0.0)} if kind == "DistributedTransport" else {}
    transport = getattr(lib, kind)(**arguments)
    assert await done(transport.send_weights(weights_of(1.0))) is None
    assert await done(transport.send_weights_async(weights_of(1.0))) is None
    assert await done(transport.setup_connection_and_weights_on_sender()) is None
    if kind == "RayTransport":
        with pytest.raises(RuntimeError, match="send_weights_async"):
            await done(transport.wait_ack())
        transport.set_model(torch.nn.Linear(3, 2))
    else:
        assert await done(transport.wait_ack()) is None
    if kind == "DistributedTransport":
        assert await done(transport.receive_weights(0.0)) is None
        assert await done(transport.send_initial_weights(weights_of(1.0))) is None
        assert await done(transport.setup_connection_and_weights_on_receiver(worker_idx=0)) is None
    if kind == "RPCTransport":
        assert await done(transport.receive_weights(0.0)) is None
        with pytest.raises(RuntimeError, match="worker_rank must be set"):
            await done(getattr(lib, kind)("name", object()).send_weights(weights_of(1.0)))
    await closed(transport)


async def test_all_keep_one_contract() -> None:
    made = [
        aiosync.SharedMemTransport(),
        aiosync.MPTransport(None),
        aiosync.TCPTransport(),
        aiosync.DistributedTransport(weights_buffer=None),
        aiosync.RPCTransport(),
        aiosync.RayTransport(),
        aiosync.RayActorTransport(),
    ]
    for each in made:
        assert isinstance(each, aiosync.Transport)
        assert not each.check_connection()
        await asyncio.gather(each.aclose(), each.aclose())
