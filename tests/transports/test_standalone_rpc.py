"""The transport of torch RPC, used alone."""

from __future__ import annotations

import asyncio

import pytest
from torch.distributed import rpc

from aiosync import RPCTransport
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform, fill
from tests.kit.rpc import in_a_process
from tests.transports.rpc_objects import Collector, Receiving
from tests.transports.test_rpc import others, world_of


async def test_without_an_object() -> None:
    transport = RPCTransport()
    await transport.setup_connection_and_weights_on_sender()
    await transport.send_weights(Uniform(1.0))
    await transport.send_weights_async(Uniform(1.0))
    await transport.wait_ack()
    assert await transport.receive_weights(0.0) is None
    await transport.aclose()


@in_a_process
async def test_an_object_with_a_model_and_one_with_a_transport() -> None:
    async with world_of(2):
        (beside, own), model = others(), Uniform(3.0)
        with pytest.raises(RuntimeError, match="worker_rank must be set"):
            await RPCTransport(beside, rpc.remote(beside, Collector)).send_weights(model)
        first = RPCTransport(beside, rpc.remote(beside, Collector), Collector, beside.id, timeout=PATIENCE)
        await first.send_weights(model)
        assert (await first.call("values"))[0] == 3
        second = RPCTransport(own, rpc.remote(own, Receiving), Receiving, own.id, timeout=PATIENCE)
        receiving = asyncio.create_task(second.call("receive", 2))
        await second.send_weights(model)
        fill(model, 4.0)
        await second.send_weights_async(model)
        await second.wait_ack()
        assert await within(receiving) == 4
        fill(model, 5.0)
        await first.send_weights(model)
        assert await first.call("values") == (5.0, [3.0, 5.0])
        await asyncio.gather(first.aclose(), second.aclose())
