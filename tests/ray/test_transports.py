"""Ray's transports, used alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiosync
from aiosync import InvalidArgumentError, RayActorTransport, RayTransport, RemoteApplyError
from tests.kit.clock import PATIENCE, within
from tests.kit.models import Uniform, fill
from tests.ray.actors import Holder, Module, Receiving
from tests.ray.hosts import start_one

ray = pytest.importorskip("ray")


@pytest.mark.parametrize("make", [RayTransport, RayActorTransport])
async def test_without_an_actor(make: type[Any]) -> None:
    transport: Any = make()
    assert isinstance(transport, aiosync.Transport)
    await transport.setup_connection_and_weights_on_sender()
    await transport.send_weights(Uniform(1.0))
    await transport.send_weights_async(Uniform(1.0))
    with pytest.raises(RuntimeError, match="send_weights_async"):
        await transport.wait_ack()
    assert await transport.receive_weights(0.0) is None
    with pytest.raises(InvalidArgumentError, match="no object"):
        await getattr(transport, "call")("value")  # noqa: B009
    await transport.aclose()


async def test_an_actor_with_a_model() -> None:
    actor, model = start_one(Holder), Uniform(3.0)
    transport = RayTransport(remote_collector=actor, timeout=PATIENCE)
    await transport.send_weights(model)
    assert await actor.value.remote() == 3
    fill(model, 4.0)
    await transport.send_weights_async(model)
    await transport.wait_ack()
    assert await transport.call("value") == 4
    await transport.aclose()
    ray.kill(actor)


async def test_an_actor_with_a_transport() -> None:
    actor, model = start_one(Receiving, "one name"), Uniform(3.0)
    transport = RayTransport(
        remote_actor=actor, worker_idx=3, connection_info_name="one name", timeout=PATIENCE
    )
    receiving = asyncio.ensure_future(actor.receive.remote(2))
    await transport.send_weights(model)
    fill(model, 4.0)
    await transport.send_weights(model)
    assert await within(receiving) == 4
    await transport.aclose()
    ray.kill(actor)


@pytest.mark.parametrize("method", ["tensordict", "state_dict"])
async def test_an_actor_that_updates_its_model(method: Any) -> None:
    actor, model = start_one(Module, Uniform(-1.0)), Uniform(3.0)
    transport = RayActorTransport(update_method=method, timeout=PATIENCE)
    transport.set_actor(actor)
    await transport.send_weights(model)
    assert await actor.calls.remote() == [(method, 3.0)]
    fill(model, 13.0)
    with pytest.raises(RemoteApplyError, match="thirteen is refused"):
        await transport.send_weights(model)
    with pytest.raises(InvalidArgumentError, match="create another transport"):
        transport.set_actor(start_one(Module, Uniform(-1.0)))
    await transport.aclose()
    ray.kill(actor)
