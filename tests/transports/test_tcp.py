"""TCP: sets of workers that change, links that break, and who is let in."""

from __future__ import annotations

import asyncio
import copy
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from aiosync import (
    AiosyncError,
    InvalidArgumentError,
    RemoteApplyError,
    SyncEvent,
    SyncTimeoutError,
    TCPWeightSyncScheme,
    UnknownWorkerError,
    WorkerLostError,
)
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.proxy import ChaosProxy
from tests.kit.tcp import TOKEN, break_off, join, make_worker, sender_of

# -- elastic ---------------------------------------------------------------------------------------


async def test_workers_come_and_go() -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        first, second, late = (make_worker(scheme.address) for _ in range(3))
        await join(scheme, first, second)
        assert {first.scheme.worker_idx, second.scheme.worker_idx} == {0, 1}
        fill(model, 1)
        assert set((await scheme.send()).workers) == {0, 1}
        await late.connect()
        await late.serve()
        assert late.scheme.worker_idx == 2
        assert value_of(late.model) == 1
        assert list(scheme.workers) == [0, 1, 2]
        # the worker knows first: its acknowledgement is still on its way
        await eventually(
            lambda: all(s.connected and s.version == 1 and s.lag == 0 for s in scheme.workers.values()),
            "the newcomer has acknowledged",
        )
        assert all(s.peer.startswith("127.0.0.1:") for s in scheme.workers.values())
        gone = first.scheme.worker_idx
        assert gone is not None
        left = sorted({0, 1, 2} - {gone})
        await first.close()
        await eventually(lambda: list(scheme.workers) == left, "its leaving is noticed")
        fill(model, 2)
        assert sorted((await scheme.send()).workers) == left
        with pytest.raises(UnknownWorkerError):
            await scheme.send(worker_ids=gone)
        for worker in (second, late):
            await worker.close()
        await eventually(lambda: not scheme.workers, "everybody has left")
        fill(model, 3)
        report = await scheme.send()
        assert report.version == 3
        assert report.workers == {}
        again = make_worker(scheme.address)
        await again.connect()
        assert again.scheme.worker_idx == 0
        assert value_of(again.model) == 3
        await again.close()


async def test_too_few_workers() -> None:
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        connecting = asyncio.create_task(scheme.connect(min_workers=2, timeout=BRIEF))
        await worker.connect()
        with pytest.raises(SyncTimeoutError, match="1 of 2 workers have connected"):
            await connecting
        await scheme.connect(min_workers=1)
        await worker.close()


async def test_some_of_a_fixed_number_are_enough() -> None:
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=3)
    workers = [make_worker(scheme.address) for _ in range(3)]
    await join(scheme, *workers[:2])
    await workers[2].connect()
    await eventually(lambda: all(s.version == 0 for s in scheme.workers.values()), "all three are there")
    for worker in workers:
        await worker.close()
    await scheme.aclose()


# -- links that break ------------------------------------------------------------------------------


async def test_a_worker_connects_again_by_itself() -> None:
    model = Uniform()
    heard: list[SyncEvent] = []
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        worker = make_worker(proxy.address)
        worker.scheme.on_event(heard.append)
        await join(scheme, worker)
        for version in range(1, 4):
            proxy.cut()
            await eventually(lambda: not scheme.workers, "the cut is noticed")
            fill(model, version)
            await scheme.send()  # no worker is connected
            await eventually(lambda: value_of(worker.model) == scheme.version, "it is back, with the newest")
            assert worker.scheme.version == version
        assert worker.scheme.ended is None
        kinds = [event.kind for event in heard]
        assert kinds.count("lost") == kinds.count("connected") - 1 == 3
        await worker.close()


async def test_a_sender_that_is_started_again() -> None:
    model = Uniform()
    async with sender_of(model) as first:
        address = first.address
        worker = make_worker(address)
        await join(first, worker)
        for version in range(1, 4):
            fill(model, version)
            await first.send()
        # It dies without a goodbye.
        break_off(first)
    assert worker.scheme.ended is None
    assert value_of(worker.model) == 3
    fill(model, 7)
    second = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE)
    second.init_on_sender(model_id="policy", model=model)
    await second.connect()
    assert value_of(worker.model) == 7
    assert worker.scheme.version == second.version == 0
    fill(model, 8)
    assert (await second.send()).ok
    assert value_of(worker.model) == 8
    await worker.close()
    await second.aclose()


async def test_a_sender_that_does_not_come_back() -> None:
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address, reconnect_for=BRIEF)
        await join(scheme, worker)
        break_off(scheme)
        listener: Any = scheme.shared_transport
        listener.stop()
        await eventually(lambda: worker.scheme.ended is not None, "it has ended")
        await worker.rest()
        assert worker.lost is not None
        assert value_of(worker.model) == 0
        await worker.close()


async def test_a_goodbye_is_no_loss() -> None:
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
    await eventually(lambda: worker.scheme.ended is not None, "it has heard the goodbye")
    await worker.close()
    assert worker.lost is None


@pytest.mark.parametrize("size", [16, 1 << 19])
async def test_a_link_cut_a_hundred_times(size: int) -> None:
    model, dice = Uniform(size=size), random.Random(size)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        workers = [make_worker(proxy.address, Uniform(-1.0, size=size)) for _ in range(2)]
        await join(scheme, *workers)
        for _ in range(100):
            at = proxy.passed["to_worker"] + dice.randrange(2 * 4 * 4 * size)
            sending = asyncio.create_task(_send_something(scheme, model, dice))
            await eventually(lambda: sending.done() or proxy.passed["to_worker"] >= at, "something moves")  # noqa: B023
            proxy.cut()
            await within(sending)
            assert all(value_of(worker.model) >= -1 for worker in workers)  # of one version, whichever
        fill(model, 1000)
        final = (await _sent(scheme)) or scheme.version
        await eventually(
            lambda: all(worker.scheme.version == final for worker in workers), "everybody has the newest"
        )
        for worker in workers:
            assert value_of(worker.model) == 1000
            assert worker.scheme.ended is None
            await worker.close()


@pytest.mark.parametrize("reconnect_for", [0, PATIENCE])
async def test_a_link_cut_in_the_middle_of_the_first_version(reconnect_for: float) -> None:
    size = 1 << 19
    async with sender_of(Uniform(3.0, size=size)) as scheme, ChaosProxy(scheme.address) as proxy:
        await join(scheme, first := make_worker(scheme.address, Uniform(-1.0, size=size)))
        proxy.weather["to_worker"].cut_after = size
        worker = make_worker(proxy.address, Uniform(-1.0, size=size), reconnect_for=reconnect_for)
        connecting = asyncio.create_task(worker.connect())
        if reconnect_for:
            await eventually(lambda: proxy.accepted > 2, "it connects again")
            proxy.weather["to_worker"].cut_after = None
            await within(connecting)
            assert value_of(worker.model) == 3
        else:
            with pytest.raises(WorkerLostError):
                await within(connecting)
            assert value_of(worker.model) == -1
        for each in (first, worker):
            await each.close()


async def _send_something(scheme: TCPWeightSyncScheme, model: nn.Module, dice: random.Random) -> int:
    fill(model, dice.randrange(1000))
    return await _sent(scheme)


async def _sent(scheme: TCPWeightSyncScheme) -> int:
    with suppress(WorkerLostError):
        await scheme.send()
    return scheme.version


async def test_a_flipped_bit_in_the_weights() -> None:
    size = 1 << 18
    model = Uniform(size=size)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        worker = make_worker(proxy.address, Uniform(-1.0, size=size))
        await join(scheme, worker)
        passed = proxy.passed["to_worker"]
        proxy.weather["to_worker"].flip = {passed + 2 * size, passed + 3 * size}
        fill(model, 1)
        with pytest.raises(RemoteApplyError, match="damaged"):
            await scheme.send()
        assert value_of(worker.model) == 0
        fill(model, 2)
        assert (await scheme.send()).ok
        assert value_of(worker.model) == 2
        await worker.close()


@pytest.mark.parametrize("what", ["cut_after", "half_close_after", "truncate_after"])
async def test_a_stream_that_stops_in_the_middle(what: str) -> None:
    size = 1 << 18
    model = Uniform(size=size)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        healthy = make_worker(scheme.address, Uniform(-1.0, size=size))
        hurt = make_worker(proxy.address, Uniform(-1.0, size=size))
        await join(scheme, healthy, hurt)
        weather = proxy.weather["to_worker"]
        setattr(weather, what, proxy.passed["to_worker"] + 2 * size)
        fill(model, 1)
        with pytest.raises(WorkerLostError if what != "truncate_after" else SyncTimeoutError):
            await scheme.send(timeout=BRIEF if what == "truncate_after" else None)
        assert value_of(healthy.model) == 1
        assert value_of(hurt.model) == 0
        setattr(weather, what, None)
        proxy.cut()
        await eventually(lambda: hurt.scheme.version == 1, "it is back")
        assert value_of(hurt.model) == 1
        for worker in (healthy, hurt):
            await worker.close()


async def test_a_slow_link_slows_nobody_else() -> None:
    size = 1 << 20
    model = Uniform(size=size)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        fast = [make_worker(scheme.address, Uniform(-1.0, size=size)) for _ in range(2)]
        slow = make_worker(proxy.address, Uniform(-1.0, size=size))
        await join(scheme, *fast, slow)
        proxy.weather["to_worker"].rate = 40e6
        for version in range(1, 11):
            fill(model, version)
            await scheme.send(wait=False)
            await scheme.wait_ack([w.scheme.worker_idx for w in fast])  # type: ignore[misc]
            assert [value_of(worker.model) for worker in fast] == [version, version]
        assert slow.scheme.version < 10
        assert scheme.stats.memory <= 3 * 4 * 4 * size
        await eventually(lambda: slow.scheme.version == 10, "latest wins")
        assert slow.scheme.stats.skipped > 0
        assert value_of(slow.model) == 10
        for worker in (*fast, slow):
            await worker.close()


async def test_a_stopped_worker_costs_no_memory() -> None:
    size = 1 << 20
    model = Uniform(size=size)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        well = make_worker(scheme.address, Uniform(-1.0, size=size))
        stopped = make_worker(proxy.address, Uniform(-1.0, size=size))
        await join(scheme, well, stopped)
        proxy.weather["to_worker"].rate = 1.0
        for version in range(1, 6):
            fill(model, version)
            with pytest.raises(SyncTimeoutError):
                await scheme.send(timeout=BRIEF)
            assert value_of(well.model) == version
        assert scheme.stats.memory == 2 * 4 * 4 * size
        proxy.weather["to_worker"].rate = 0.0
        proxy.cut()
        await eventually(lambda: stopped.scheme.version == 5, "it is back")
        for worker in (well, stopped):
            await worker.close()


async def test_connections_in_another_order() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        proxy.hold.clear()
        workers = [make_worker(proxy.address) for _ in range(3)]
        joining = asyncio.create_task(join(scheme, *workers))
        await eventually(lambda: proxy.accepted == 3, "all have connected")
        proxy.release()
        await within(joining)
        fill(model, 1)
        assert len((await scheme.send()).workers) == 3
        for worker in workers:
            await worker.close()


async def test_a_pickled_scheme_knows_the_real_port() -> None:
    async with sender_of(Uniform()) as scheme:
        assert not scheme.address.endswith(":0")
        twin = copy.copy(scheme)
        assert isinstance(twin, TCPWeightSyncScheme)
        assert twin.address == scheme.address
        unaware = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN)
        unaware.init_on_receiver(model_id="policy", model=Uniform())
        with pytest.raises(AiosyncError, match="has no port yet"):
            await unaware.connect()


async def test_bits_of_every_kind_arrive() -> None:
    values = torch.tensor([0x7FC0_0001, 0x8000_0000, 0xFF80_0000, 1], dtype=torch.uint32).view(torch.float32)
    weights = {"odd": values, "empty": torch.zeros(0), "flag": torch.tensor([True, False])}
    scheme = TCPWeightSyncScheme(token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", weights=weights, num_workers=1)
    receiver = copy.copy(scheme)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    receiver.init_on_receiver(model_id="policy", model=target, worker_idx=0)
    await asyncio.gather(scheme.connect(), receiver.connect())
    for name, tensor in weights.items():
        assert torch.equal(tensor.view(torch.uint8), target[name].view(torch.uint8))
    await receiver.aclose()
    await scheme.aclose()


# -- codecs ----------------------------------------------------------------------------------------


def _nudge(model: nn.Module, dice: torch.Generator, share: float = 0.01) -> None:
    """Change a few of the elements a little, as an optimizer with a small step would."""
    with torch.no_grad():
        for parameter in model.parameters():
            where = torch.rand(parameter.shape, generator=dice) < share
            parameter.mul_(torch.where(where, 1.01, 1.0))


def _alike(model: nn.Module, worker: LocalWorker) -> bool:
    pairs = zip(model.parameters(), worker.model.parameters(), strict=True)
    return all(torch.equal(ours.bfloat16().float(), theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("codec", ["zstd", "delta"])
async def test_encoded_updates_are_bit_exact(codec: str) -> None:
    dice = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 900), nn.BatchNorm1d(900), nn.Linear(900, 3))
    async with sender_of(model, codec=codec, cast=torch.bfloat16) as scheme:
        workers = [make_worker(scheme.address, copy.deepcopy(model)) for _ in range(2)]
        await join(scheme, *workers)
        before = scheme.stats.wire_nbytes
        for version in range(1, 21):
            _nudge(model, dice)
            await scheme.send(worker_ids=[0, 1] if version % 3 else [0])
        await scheme.send()
        assert all(_alike(model, worker) for worker in workers)
        full = sum(p.numel() for p in model.parameters()) * 2 * (2 * 21 - 6)
        sent = scheme.stats.wire_nbytes - before
        assert sent < full / (3 if codec == "delta" else 1)
        for worker in workers:
            await worker.close()


async def test_a_base_that_the_worker_wrote_into() -> None:
    dice = torch.Generator().manual_seed(1)
    model = nn.Linear(300, 300)
    async with sender_of(model, codec="delta") as scheme:
        worker = make_worker(scheme.address, copy.deepcopy(model))
        await join(scheme, worker)
        for _ in range(3):
            _nudge(model, dice)
            with torch.no_grad():
                worker.model.weight.add_(1.0)
            assert (await scheme.send()).ok
            assert torch.equal(model.weight, worker.model.weight)
            assert torch.equal(model.bias, worker.model.bias)
        assert worker.scheme.stats.failures == 0
        await worker.close()


async def test_a_part_takes_no_more_than_its_blocks() -> None:
    model = Uniform(tensors=8, size=1 << 18)  # a block each
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address, Uniform(-1.0, tensors=8, size=1 << 18))
        await join(scheme, worker)
        before = scheme.stats.wire_nbytes
        part = {"values.3": torch.full((1 << 18,), 3.0)}
        await scheme.send(part, strict=False)
        assert scheme.stats.wire_nbytes - before < 2 * (1 << 20)
        values = [value_of([parameter]) for parameter in worker.model.parameters()]
        assert values == [0, 0, 0, 3, 0, 0, 0, 0]
        await worker.close()


async def test_who_has_the_newest_is_sent_nothing() -> None:
    model = Uniform(size=1 << 18)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        worker = make_worker(proxy.address, Uniform(-1.0, size=1 << 18))
        await join(scheme, worker)
        fill(model, 1)
        await scheme.send()
        before = proxy.passed["to_worker"]
        proxy.cut()
        await eventually(
            lambda: proxy.accepted == 2 and any(s.version == 1 for s in scheme.workers.values()), "it is back"
        )
        assert proxy.passed["to_worker"] - before < 10_000
        fill(model, 2)
        await scheme.send()
        assert value_of(worker.model) == 2
        await worker.close()


async def test_a_worker_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Uniform()
    async with sender_of(model, codec="delta") as scheme:
        worker = make_worker(scheme.address)
        with monkeypatch.context() as patch:
            patch.setattr("aiosync.receiver.connection.known_encodings", list)
            await join(scheme, worker)
        fill(model, 1)
        await scheme.send()
        assert value_of(worker.model) == 1
        await worker.close()


def test_without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiosync.weights.codec.xxhash", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install .*\[tcp\]"):
        TCPWeightSyncScheme()
