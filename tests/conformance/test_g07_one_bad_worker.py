"""G7: a worker that dies or hangs hurts only itself, and is named within a second."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiosync import SyncTimeoutError, WorkerLostError
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import BRIEF, SCALE, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of
from tests.kit.processes import ProcessCluster

SOON = 1.0 * max(1.0, SCALE)
"""Seconds within which a death has to be noticed."""


async def test_killed_before_a_send(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=3) as cluster:
        scheme = cluster.scheme
        gone = asyncio.Event()
        scheme.on_event(lambda event: gone.set() if event.kind == "lost" else None)
        cluster.workers[1].kill()
        killed = time.monotonic()
        await within(gone.wait())
        assert time.monotonic() - killed < SOON
        fill(cluster.model, 1)
        with pytest.raises(WorkerLostError) as caught:
            await scheme.send()
        assert caught.value.workers == (1,)
        report = caught.value.report
        assert report is not None
        assert report.version == scheme.version == 1
        assert {w: r.status for w, r in report.workers.items()} == {
            0: "applied",
            1: "lost",
            2: "applied",
        }
        for index in (0, 2):
            found = await cluster.workers[index].run(scenarios.report)
            assert found == {"version": 1, "value": 1}


async def test_killed_during_a_send(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=3) as cluster:
        victim = cluster.workers[1]
        blocking = victim.begin(scenarios.block)
        await victim.says("blocked")
        fill(cluster.model, 1)
        send = asyncio.create_task(cluster.scheme.send())
        await eventually(lambda: cluster.scheme.worker_versions == {0: 1, 1: 0, 2: 1}, "the healthy have it")
        assert not send.done()
        victim.kill()
        killed = time.monotonic()
        with pytest.raises(WorkerLostError) as caught:
            await within(send)
        assert time.monotonic() - killed < SOON
        assert caught.value.workers == (1,)
        assert caught.value.report is not None
        assert caught.value.report.workers[0].status == "applied"
        assert blocking.cancelled() or not blocking.done() or blocking.exception() is not None
        for index in (0, 2):
            found = await cluster.workers[index].run(scenarios.report)
            assert found == {"version": 1, "value": 1}
        # It stays named, and the others go on.
        fill(cluster.model, 2)
        with pytest.raises(WorkerLostError):
            await cluster.scheme.send()
        await cluster.scheme.send(worker_ids=[0, 2])
        assert cluster.scheme.worker_versions[2] == 3


async def test_killed_while_pinned(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        victim = cluster.workers[0]
        victim.begin(scenarios.pin)
        await victim.says("pinned")
        fill(cluster.model, 1)
        send = asyncio.create_task(cluster.scheme.send())
        await eventually(lambda: cluster.scheme.worker_versions[1] == 1, "the healthy one has it")
        victim.kill()
        with pytest.raises(WorkerLostError) as caught:
            await within(send, SOON * 5)
        assert caught.value.workers == (0,)


async def test_a_process_that_ends_without_a_word(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        cluster.workers[0].begin(scenarios.dirty_exit)
        await cluster.workers[0].ended()
        with pytest.raises(WorkerLostError) as caught:
            await cluster.scheme.send()
        assert caught.value.workers == (0,)


async def test_all_are_killed(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        for worker in cluster.workers.values():
            worker.kill()
        for worker in cluster.workers.values():
            await worker.ended()
        with pytest.raises(WorkerLostError) as caught:
            await cluster.scheme.send()
        assert caught.value.workers == (0, 1)


async def test_stopped_and_continued(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=3) as cluster:
        stopped = cluster.workers[2]
        stopped.stop()
        for version in (1, 2, 3):
            fill(cluster.model, version)
            with pytest.raises(SyncTimeoutError) as caught:
                await cluster.scheme.send(timeout=BRIEF)
            assert caught.value.workers == (2,)
            assert caught.value.report is not None
            assert caught.value.report.workers[0].status == "applied"
            for index in (0, 1):
                found = await cluster.workers[index].run(scenarios.report)
                assert found == {"version": version, "value": version}
        stopped.resume()
        report = await cluster.scheme.wait_ack()
        assert report.workers[2].version == 3
        assert await stopped.run(scenarios.report) == {"version": 3, "value": 3}
        fill(cluster.model, 4)
        assert (await cluster.scheme.send()).ok
        # It never takes in all four: at most the one that was on its way to it when it was stopped.
        assert (await stopped.run(scenarios.stats))["updates"] <= 4


async def test_killed_with_on_failure_drop(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=3, on_failure="drop") as cluster:
        cluster.workers[1].kill()
        await cluster.workers[1].ended()
        fill(cluster.model, 1)
        report = await cluster.scheme.send()
        assert report.dropped == (1,)
        assert report.workers[1].status == "lost"
        assert report.workers[0].status == report.workers[2].status == "applied"
        report = await cluster.scheme.send()
        assert report.ok
        assert set(report.workers) == {0, 2}
        assert cluster.scheme.worker_versions == {0: 2, 2: 2}


async def test_late_with_on_failure_drop(case: SchemeCase) -> None:
    async with LocalCluster(case, on_failure="drop") as cluster:
        hung = cluster.workers[1]
        await hung.rest()
        fill(cluster.model, 1)
        report = await cluster.scheme.send(timeout=BRIEF)
        assert report.dropped == (1,)
        assert report.workers[1].status == "timeout"
        for version in range(2, 8):
            fill(cluster.model, version)
            assert (await cluster.scheme.send()).ok
            assert value_of(cluster.workers[0].model) == version
            # What it has stays whole, whatever the sender writes now.
            assert value_of(hung.model) == 0
            assert hung.scheme.version == 0
        await within(hung.scheme.wait_closed())


async def test_the_last_worker_is_dropped(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, on_failure="drop") as cluster:
        await cluster.workers[0].rest()
        assert (await cluster.scheme.send(timeout=BRIEF)).dropped == (0,)
        report = await cluster.scheme.send()
        assert report.workers == {}


async def test_a_send_to_nobody(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        report = await cluster.scheme.send(worker_ids=[])
        assert report.workers == {}
        assert (await cluster.scheme.send()).ok
