"""G8: a slow receiver skips to the newest version; nothing queues up, and memory is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import eventually, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster

SENDS = 50


async def test_a_blocked_worker_does_not_slow_the_sender(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=2, sync=False) as cluster:
        scheme, (slow, quick) = cluster.scheme, cluster.workers.values()
        slot = scheme.stats.memory // 2
        blocking = slow.begin(scenarios.block)
        await slow.says("blocked")
        for version in range(1, SENDS + 1):
            fill(cluster.model, version)
            report = await scheme.send()
            assert report.version == version
            assert {r.status for r in report.workers.values()} == {"published"}
            assert scheme.stats.memory <= 3 * slot
        await scheme.wait_ack(1)
        assert await quick.run(scenarios.report) == {"version": SENDS, "value": SENDS}
        assert scheme.stats.lag == {0: SENDS, 1: 0}
        slow.tell("go")
        await within(blocking)
        await scheme.wait_ack()
        assert await slow.run(scenarios.report) == {"version": SENDS, "value": SENDS}
        stats = await slow.run(scenarios.stats)
        assert stats["updates"] <= 4  # version 0, what was under way, the newest
        assert stats["skipped"] == SENDS + 1 - stats["updates"]
        assert scheme.stats.lag == {0: 0, 1: 0}


async def test_a_pinned_worker_does_not_slow_the_sender(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=2, sync=False) as cluster:
        scheme, (slow, quick) = cluster.scheme, cluster.workers
        slot = scheme.stats.memory // 2
        async with slow.scheme.pinned():
            for version in range(1, SENDS + 1):
                fill(cluster.model, version)
                await scheme.send()
                assert scheme.stats.memory <= 3 * slot
                assert value_of(slow.model) == 0
        await scheme.wait_ack()
        for worker in (slow, quick):
            assert worker.scheme.version == SENDS
            assert value_of(worker.model) == SENDS
        assert slow.scheme.stats.updates <= 4
        assert slow.scheme.stats.skipped == SENDS + 1 - slow.scheme.stats.updates


async def test_the_healthy_keep_up_beside_a_pinned_worker(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=2, sync=False) as cluster:
        slow, quick = cluster.workers
        async with slow.scheme.pinned():
            for version in range(1, 6):
                fill(cluster.model, version)
                await cluster.scheme.send()
                await cluster.scheme.wait_ack(1)
                assert value_of(quick.model) == version


async def test_a_worker_that_does_not_receive_jumps_to_the_newest(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, serve=False, sync=False) as cluster:
        worker = cluster.workers[0]
        for version in range(1, SENDS + 1):
            fill(cluster.model, version)
            await cluster.scheme.send()
        weights: Any = await worker.scheme.receive()
        while worker.scheme.version < SENDS:
            weights = await worker.scheme.receive()
        assert value_of(weights.values(True, True)) == SENDS
        assert value_of(worker.model) == SENDS
        assert worker.scheme.stats.updates <= 3
        assert await worker.scheme.receive(timeout=0) is None


async def test_memory_of_big_models(case: SchemeCase) -> None:
    model = lambda: Uniform(tensors=2, size=1 << 18)  # noqa: E731 - a factory as short as it gets
    async with LocalCluster(case, workers=3, model=model, sync=False) as cluster:
        scheme = cluster.scheme
        slot = scheme.stats.memory // 2
        assert slot >= 2 << 20
        async with cluster.workers[0].scheme.pinned():
            for version in range(1, 10):
                fill(cluster.model, version)
                await scheme.send()
                await scheme.wait_ack([1, 2])
                assert scheme.stats.memory <= 4 * slot
        await scheme.wait_ack()
        assert [value_of(w.model) for w in cluster.workers] == [9, 9, 9]


async def test_more_than_one_send_at_a_time(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        reports = await within(asyncio.gather(*(cluster.scheme.send() for _ in range(10))))
        assert sorted(r.version for r in reports) == list(range(1, 11))
        assert all(r.ok for r in reports)
        assert cluster.scheme.worker_versions == {0: 10, 1: 10}


@pytest.mark.parametrize("slots", [2, 3, 5])
async def test_as_many_slots_as_are_asked_for(case: SchemeCase, slots: int) -> None:
    async with LocalCluster(case, workers=2, max_slots=slots) as cluster:
        one = cluster.scheme.stats.memory // 2
        for version in range(1, 10):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert cluster.scheme.stats.memory <= slots * one
            assert [value_of(w.model) for w in cluster.workers] == [version, version]


async def test_readers_that_overlap_do_not_keep_fast_updates_out(case: SchemeCase) -> None:
    """An update that waits for readers is replaced by newer ones, but not for ever."""
    async with LocalCluster(case, workers=1, sync=False) as cluster:
        (worker,), stop = cluster.workers, asyncio.Event()

        async def read(first: int) -> None:
            await asyncio.sleep(0.01 * first)
            while not stop.is_set():
                async with worker.scheme.pinned() as version:
                    seen = value_of(worker.model)
                    await asyncio.sleep(0.08)
                    assert seen == value_of(worker.model) == version

        async def train() -> None:
            version = 0
            while not stop.is_set():
                version += 1
                fill(cluster.model, version)
                await cluster.scheme.send(wait=False)
                await asyncio.sleep(0.002)

        tasks = [asyncio.create_task(work) for work in (*map(read, range(8)), train())]
        seen: set[int] = set()
        while len(seen) < 5:
            await eventually(lambda: worker.scheme.version not in seen, "another version")
            seen.add(worker.scheme.version)
        stop.set()
        await within(asyncio.gather(*tasks))
