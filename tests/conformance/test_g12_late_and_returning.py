"""G12: who comes late, or again, gets the newest version, and the others do not notice."""

from __future__ import annotations

import asyncio

import pytest

from aiosync import SyncTimeoutError, WorkerLostError
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import BRIEF, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster


async def test_a_worker_that_comes_late(case: SchemeCase) -> None:
    cluster = LocalCluster(case, workers=2)
    early, late = cluster.workers
    try:
        connecting = asyncio.create_task(cluster.scheme.connect(timeout=BRIEF))
        await early.connect()
        await early.serve()
        with pytest.raises(SyncTimeoutError) as caught:
            await connecting
        assert caught.value.workers == (1,)
        assert caught.value.phase == "connect"
        going_on = asyncio.create_task(cluster.scheme.connect())
        await late.connect()
        await within(going_on)
        await late.serve()
        fill(cluster.model, 1)
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [1, 1]
    finally:
        await cluster.close()


@pytest.mark.parametrize("size", [16, 1 << 17])
async def test_a_worker_that_leaves_and_returns(case: SchemeCase, size: int) -> None:
    async with LocalCluster(case, workers=2, model=lambda: Uniform(size=size)) as cluster:
        leaving, staying = cluster.workers
        for version in range(1, 6):
            await leaving.close()
            fill(cluster.model, version)
            with pytest.raises(WorkerLostError) as caught:
                await cluster.scheme.send()
            assert caught.value.workers == (0,)
            assert value_of(staying.model) == version
            leaving.init()
            await leaving.connect()
            assert leaving.scheme.version == version
            assert value_of(leaving.model) == version
            await leaving.serve()
        fill(cluster.model, 6)
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [6, 6]
        assert staying.scheme.stats.updates == 7


@pytest.mark.parametrize("while_sending", [False, True])
async def test_a_killed_worker_is_started_again(process_case: SchemeCase, while_sending: bool) -> None:
    if not process_case.respawns:
        return  # the caller's pipe has gone with its process
    async with ProcessCluster(process_case, workers=2) as cluster:
        scheme = cluster.scheme
        for version in (1, 2, 3):
            cluster.workers[0].kill()
            await cluster.workers[0].ended()
            fill(cluster.model, version)
            with pytest.raises(WorkerLostError):
                await scheme.send()
            assert not scheme.workers[0].connected
            assert 0 <= scheme.worker_versions[0] < scheme.worker_versions[1] == scheme.version
            cluster.spawn(0)
            connecting = asyncio.create_task(cluster.connect_worker(0))
            if while_sending:
                while not connecting.done():
                    await scheme.send(worker_ids=1)
            await within(connecting)
            await eventually(lambda: scheme.workers[0].connected, "it has joined")
            report = await scheme.send()
            assert report.ok
            found = await cluster.workers[0].run(scenarios.report)
            assert found == {"version": scheme.version, "value": version}
        assert (await cluster.workers[1].run(scenarios.stats))["failures"] == 0


async def test_a_dropped_worker_returns(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=2, on_failure="drop") as cluster:
        hung, healthy = cluster.workers
        await hung.rest()
        assert (await cluster.scheme.send(timeout=BRIEF)).dropped == (0,)
        await hung.close()
        hung.init()
        await hung.connect()
        await hung.serve()
        fill(cluster.model, 8)
        report = await cluster.scheme.send()
        assert set(report.workers) == {0, 1}
        assert [value_of(w.model) for w in (hung, healthy)] == [8, 8]


async def test_connecting_again_without_a_sender(case: SchemeCase) -> None:
    # A worker may well be up before its trainer: a connect that timed out can be called again.
    cluster = LocalCluster(case, workers=1)
    worker = cluster.workers[0]
    try:
        for _ in range(3):
            with pytest.raises((SyncTimeoutError, WorkerLostError)):
                await worker.connect(timeout=BRIEF / 3)
        connecting = asyncio.create_task(cluster.scheme.connect())
        await worker.connect()
        await worker.serve()
        try:
            await within(connecting)
        except WorkerLostError:  # it saw one of those that had given up
            await cluster.scheme.connect()
        fill(cluster.model, 1)
        await cluster.scheme.send()
        assert value_of(worker.model) == 1
    finally:
        await cluster.close()
