"""Weights on a GPU take the same path: an arena on the device, shared by CUDA IPC."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
import torch

from aiosync import SyncTimeoutError
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, occupy, value_of
from tests.kit.processes import ProcessCluster

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda:0"


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_on_one_device(case: SchemeCase, commit: str) -> None:
    source = Uniform().to(DEVICE)
    init = {"model": source, "devices": [DEVICE, DEVICE]}
    async with LocalCluster(case, model=lambda: Uniform().to(DEVICE), init=init, commit=commit) as cluster:
        for version in range(1, 5):
            fill(source, version)
            await cluster.scheme.send()
            fill(source, -1)
            assert [value_of(w.model) for w in cluster.workers] == [version, version]
            assert all(p.is_cuda for w in cluster.workers for p in w.model.parameters())


async def test_from_a_device_to_the_cpu_and_back(case: SchemeCase) -> None:
    source = Uniform().to(DEVICE)
    models = {0: Uniform(), 1: Uniform().to(DEVICE)}
    init = {"model": source, "devices": ["cpu", DEVICE]}
    async with LocalCluster(case, worker_models=models, init=init) as cluster:
        for version in range(1, 4):
            fill(source, version)
            await cluster.scheme.send()
            assert [value_of(w.model) for w in cluster.workers] == [version, version]


@pytest.mark.parametrize("side", [False, True], ids=["default-stream", "side-stream"])
@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_queued_work_reads_one_version(process_case: SchemeCase, commit: str, side: bool) -> None:
    """A worker whose kernels are queued for a while, as one that never reads a result back."""
    async with ProcessCluster(process_case, workers=1, size=1 << 22, device=DEVICE, commit=commit) as cluster:
        worker = cluster.workers[0]
        for version in range(1, 9):
            fill(cluster.model, version)
            await cluster.scheme.send()
            if version % 4 == 1:
                assert await worker.run(scenarios.queue_read, seconds=0.3, side=side) == version
            if version % 4 == 0:
                assert await worker.run(scenarios.queued_read) == [version - 3]


@pytest.mark.parametrize("size", [16, 1 << 22])
async def test_sends_what_is_queued(process_case: SchemeCase, size: int) -> None:
    """The optimizer's step is queued in a stream of its own when the weights are sent."""
    stream = torch.cuda.Stream(DEVICE)
    async with ProcessCluster(process_case, size=size, device=DEVICE) as cluster:
        for version in range(1, 4):
            with torch.cuda.stream(stream):
                occupy(DEVICE, 0.2)
                fill(cluster.model, version)
            await cluster.scheme.send()
            for worker in cluster.workers.values():
                assert await worker.run(scenarios.report) == {"version": version, "value": version}


@pytest.mark.parametrize("size", [16, 1 << 22])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
async def test_the_loop_runs_while_the_device_is_busy(
    process_case: SchemeCase, device: str, size: int
) -> None:
    """``device``: the workers'."""
    async with ProcessCluster(process_case, size=size, device=device, source=DEVICE) as cluster:
        await cluster.scheme.send()
        fill(cluster.model, 1)
        occupy(DEVICE, 2.0)
        worst, last = 0.0, time.perf_counter()
        sending = asyncio.create_task(cluster.scheme.send())
        while not sending.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        await sending
        assert worst < 0.5
        for worker in cluster.workers.values():
            assert (await worker.run(scenarios.report))["value"] == 1


@pytest.mark.parametrize("size", [16, 1 << 22])
@pytest.mark.parametrize("commit", ["flip", "copy"])
@pytest.mark.parametrize(("source", "device"), [(DEVICE, DEVICE), ("cpu", DEVICE), (DEVICE, "cpu")])
async def test_between_processes(
    process_case: SchemeCase, source: str, device: str, commit: str, size: int
) -> None:
    async with ProcessCluster(
        process_case, size=size, device=device, source=source, commit=commit
    ) as cluster:
        for version in range(1, 5):
            fill(cluster.model, version)
            await cluster.scheme.send()
            fill(cluster.model, -1)
            for worker in cluster.workers.values():
                assert await worker.run(scenarios.report) == {"version": version, "value": version}


async def test_a_send_is_given_up_while_the_device_is_busy(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, size=1 << 22, device=DEVICE) as cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        fill(cluster.model, 2)
        occupy(DEVICE, 3.0)
        began = time.perf_counter()
        with pytest.raises(SyncTimeoutError):
            await cluster.scheme.send(timeout=0.3)
        assert time.perf_counter() - began < 2.0
        fill(cluster.model, 3)
        version = (await cluster.scheme.send()).version
        for worker in cluster.workers.values():
            assert await worker.run(scenarios.report) == {"version": version, "value": 3}


async def test_a_worker_keeps_its_weights_when_the_sender_has_gone(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, size=1 << 22, device=DEVICE) as cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        await cluster.scheme.aclose()
        torch.cuda.empty_cache()
        other = [torch.full((1 << 22,), 7.0, device=DEVICE) for _ in range(64)]  # where the slots were
        torch.cuda.synchronize()
        for worker in cluster.workers.values():
            assert (await worker.run(scenarios.report))["value"] == 1
        del other


async def test_a_worker_keeps_its_weights_until_it_has_noticed(process_case: SchemeCase) -> None:
    """One worker has closed. The other one stands still while the sender closes and its memory is reused."""
    async with ProcessCluster(process_case, size=1 << 22, device=DEVICE) as cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        await cluster.workers[0].run(scenarios.unserve)
        await cluster.workers[0].run(scenarios.aclose)
        assert await cluster.workers[1].run(scenarios.queue_read, seconds=2.0, side=True) == 1
        await cluster.scheme.aclose()
        torch.cuda.empty_cache()
        other = [torch.full((1 << 22,), 7.0, device=DEVICE) for _ in range(64)]
        torch.cuda.synchronize()
        assert await cluster.workers[1].run(scenarios.queued_read) == [1]
        assert (await cluster.workers[1].run(scenarios.report))["value"] == 1
        del other


async def test_memory_of_the_device_is_given_back(process_case: SchemeCase) -> None:
    """One worker is killed while it has mapped the slots, the other one closes and ends."""
    nbytes = 4 * (1 << 22) * 4
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        async with ProcessCluster(process_case, size=1 << 22, device=DEVICE) as cluster:
            fill(cluster.model, 1)
            await cluster.scheme.send()
            cluster.workers[0].kill()
            await cluster.workers[0].ended()
            model = cluster.model
        del model, cluster
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() <= before + nbytes // 2
