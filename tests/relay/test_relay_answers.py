"""When a relay answers its trainer, and what with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiosync
from aiosync import HandshakeError, TCPWeightSyncScheme, WeightRelay, WorkerLostError
from aiosync.relay import forwarder
from aiosync.schemes.state import Secret
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.models import Uniform, fill, value_of
from tests.kit.ports import free_port
from tests.kit.proxy import ChaosProxy
from tests.kit.relay import beside_a_silent_worker, connect, relay_below, serve
from tests.kit.seams import waits_for_readers
from tests.kit.tcp import TOKEN, make_worker, sender_of

LARGE = 1 << 19  # four tensors of 2 MiB


@pytest.mark.parametrize("before", ["no trainer", "another token", "closed"])
async def test_a_relay_that_connects_a_second_time(before: str) -> None:
    model, address = Uniform(), f"tcp://127.0.0.1:{free_port()}"
    scheme = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=model)
    above = TCPWeightSyncScheme(address, token=TOKEN, timeout=BRIEF if before == "no trainer" else PATIENCE)
    below = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN, timeout=PATIENCE)
    relay = WeightRelay(above, below, model_id="policy")
    try:
        if before == "no trainer":
            with pytest.raises((WorkerLostError, aiosync.SyncTimeoutError)):
                await relay.connect()
        await scheme.connect(min_workers=0)
        if before == "another token":
            right, above._token = above._token, Secret(b"another token")
            with pytest.raises(HandshakeError):
                await relay.connect()
            above._token = right
        elif before == "closed":
            await relay.connect()
            await relay.aclose()
        await within(relay.connect(PATIENCE))
        worker = make_worker(relay.address)
        await serve(worker)
        for version in (1, 2):
            fill(model, version)
            assert (await within(scheme.send())).ok
            assert value_of(worker.model) == version
        await worker.close()
    finally:
        await within(relay.aclose())
        await within(scheme.aclose())


async def test_a_silent_worker_is_no_failure_of_a_version_that_has_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a trainer's own worker: the relay passes on the newer version, and answers for that."""
    monkeypatch.setattr(forwarder, "LATE_AFTER", BRIEF)
    model = Uniform()
    async with beside_a_silent_worker(model) as (scheme, relay, worker):
        for version in range(1, 6):
            fill(model, version)
            await scheme.send(wait=False)  # it would raise what the relay has answered before
            await eventually(lambda: value_of(worker.model) == version, "the others have it")  # noqa: B023
        assert relay.ended is None


async def test_a_partial_update_stays_one_below_a_relay_with_a_silent_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay has given the version before up, so the trainer does not know that the relay has it."""
    monkeypatch.setattr(forwarder, "LATE_AFTER", BRIEF)
    model = Uniform()
    async with beside_a_silent_worker(model) as (scheme, _, worker):
        own, sent = worker.model.values[:2]
        own.data.fill_(-5)
        for version in range(1, 5):
            weights = {"values.1": torch.full_like(sent, version)}
            await scheme.send(weights, strict=False, wait=False)
            await eventually(lambda: worker.model.values[1][0] == version, "it has it")  # noqa: B023
            assert worker.model.values[0].unique().tolist() == [-5]


async def test_a_version_that_has_a_newer_one_before_workers_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarder, "LATE_AFTER", BRIEF)
    staging, notified = asyncio.Event(), asyncio.Event()
    stage = forwarder.RelayForwarder.stage

    async def held_up(applier: forwarder.RelayForwarder, pending: Any) -> None:
        staging.set()
        await notified.wait()
        await stage(applier, pending)

    monkeypatch.setattr(forwarder.RelayForwarder, "stage", held_up)
    model = Uniform()
    notified.set()
    async with beside_a_silent_worker(model) as (scheme, _, worker):
        notified.clear()
        staging.clear()
        fill(model, 1)
        await scheme.send(wait=False)
        await within(staging.wait())
        fill(model, 2)
        await scheme.send(wait=False)
        await asyncio.sleep(BRIEF)
        notified.set()
        await eventually(lambda: value_of(worker.model) == 2, "the newest", PATIENCE / 2)


async def test_an_update_that_takes_longer_to_arrive_than_the_relay_waits_for_answers() -> None:
    seconds = 6 * BRIEF
    model = Uniform(size=LARGE)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        async with relay_below(proxy.address, timeout=seconds) as relay:
            await connect(scheme, relay)
            worker = make_worker(relay.address, Uniform(-1.0, size=LARGE))
            await serve(worker)
            proxy.weather["to_worker"].rate = 4 * 4 * LARGE / (2 * seconds)
            fill(model, 1)
            assert (await within(scheme.send())).ok
            assert value_of(worker.model) == 1
            await worker.close()


async def test_a_joint_update_of_which_one_relay_is_lost() -> None:
    """Its part below the other relay is called off at once."""
    policy, value = Uniform(), Uniform(size=LARGE)
    async with sender_of(policy) as one, sender_of(value) as other, ChaosProxy(other.address) as proxy:
        async with relay_below(one.address) as left, relay_below(proxy.address) as right:
            await connect(one, left)
            await connect(other, right)
            parts: list[Any] = [
                make_worker(left.address),
                make_worker(right.address, Uniform(-1.0, size=LARGE)),
            ]
            for part in parts:
                part.init(worker_idx=3)
            await serve(*parts)
            fill(policy, 1)
            fill(value, 1)
            proxy.weather["to_worker"].truncate_after = proxy.passed["to_worker"] + (1 << 20)
            joint = asyncio.create_task(_send_both(one, other))
            await eventually(lambda: waits_for_readers(parts[0].scheme), "one part waits for the other")
            proxy.cut()
            await asyncio.wait([joint], timeout=PATIENCE / 2)
            assert joint.done()
            assert isinstance(joint.exception(), aiosync.AiosyncError)
            await eventually(lambda: not waits_for_readers(parts[0].scheme), "it is called off")
            assert [value_of(part.model) for part in parts] == [0, 0]
            for part in parts:
                await part.close()


async def _send_both(*schemes: TCPWeightSyncScheme) -> None:
    async with aiosync.atomic(*schemes):
        pass
