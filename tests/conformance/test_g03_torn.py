"""G3: no torn read, no alias of the trainer's memory, no commit inside ``pinned()``."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import steps, within
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of
from tests.kit.processes import ProcessCluster, Scenario, Worker


async def _send_until_read(cluster: ProcessCluster, scenario: Scenario, count: int) -> None:
    """Back-to-back sends, with the trainer's tensors spoilt in between, until all reads are done."""
    readers = [w.begin(scenario, count=count) for w in cluster.workers.values()]
    version = 0
    while version < 30 or not all(w.heard("done") or r.done() for w, r in _pairs(cluster, readers)):
        version += 1
        fill(cluster.model, version)
        await cluster.scheme.send()
        fill(cluster.model, -7.0)  # never sent: nobody may ever see it
    for worker in cluster.workers.values():
        worker.tell("enough")
    for reader in readers:
        result = await within(reader)
        assert result["reads"] >= count
        assert result["distinct"] > 1


def _pairs(
    cluster: ProcessCluster, readers: list[asyncio.Future[Any]]
) -> zip[tuple[Worker, asyncio.Future[Any]]]:
    return zip(cluster.workers.values(), readers, strict=True)


@pytest.mark.parametrize("scenario", [scenarios.read, scenarios.read_pinned])
async def test_no_read_is_torn(process_case: SchemeCase, scenario: Scenario) -> None:
    count = 5_000 if scenario is scenarios.read else 300
    async with ProcessCluster(process_case, tensors=8, size=8192) as cluster:
        await _send_until_read(cluster, scenario, count)


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_no_read_in_a_million_is_torn(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, tensors=8, size=8192, timeout=60.0) as cluster:
        await _send_until_read(cluster, scenarios.read, 500_000)


async def test_a_change_without_send_is_never_seen(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        for version in range(1, 8):
            fill(cluster.model, version)
            await cluster.scheme.send()
            fill(cluster.model, -7)
            await steps(20)
            for worker in cluster.workers:
                assert value_of(worker.model) == version
                assert value_of(worker.scheme.weights.values(True, True)) == version


async def test_the_same_dict_sent_again_and_again_is_copied_each_time(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        weights = {name: p.detach() for name, p in cluster.model.named_parameters()}
        for version in range(1, 8):
            for tensor in weights.values():
                tensor.fill_(version)
            await cluster.scheme.send(weights)
            for tensor in weights.values():
                tensor.fill_(-7)
            assert value_of(cluster.workers[0].model) == version


async def test_parameters_keep_their_identity(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        model = cluster.workers[0].model
        before = list(model.parameters())
        for version in range(1, 5):
            fill(cluster.model, version)
            await cluster.scheme.send()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in before)


async def test_pinned_holds_the_version(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        worker = cluster.workers[0]
        async with worker.scheme.pinned() as version:
            assert version == 0
            for value in (1, 2):
                fill(cluster.model, value)
                await cluster.scheme.send(wait=False)
                await cluster.scheme.wait_ack(1)
                assert value_of(worker.model) == 0
                assert worker.scheme.version == 0
        await cluster.scheme.wait_ack()
        assert worker.scheme.version == 2
        assert value_of(worker.model) == 2


async def test_pinned_may_be_nested_while_a_commit_waits(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        async with worker.scheme.pinned() as outer:
            fill(cluster.model, 1)
            send = asyncio.create_task(cluster.scheme.send())
            await steps(30)
            async with worker.scheme.pinned() as inner:
                assert inner == outer == 0
                assert value_of(worker.model) == 0
            await steps(30)
            assert value_of(worker.model) == 0
        await within(send)
        assert value_of(worker.model) == 1


async def test_a_task_made_in_a_pinned_body_is_part_of_it(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]

        async def nested() -> int:
            async with worker.scheme.pinned() as version:
                await steps(5)
                return version

        async with worker.scheme.pinned():
            send = asyncio.create_task(cluster.scheme.send())
            await steps(30)
            assert await within(asyncio.create_task(nested())) == 0
        await within(send)


async def test_many_pinned_tasks_do_not_starve_commits(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        stop = False

        async def reader() -> int:
            reads = 0
            while not stop:
                async with worker.scheme.pinned() as version:
                    await steps(3)
                    assert value_of(worker.model) == version
                    await steps(3)
                reads += 1
            return reads

        # Overlapping readers: there is never a moment without one, unless they are held back.
        readers = [asyncio.create_task(reader()) for _ in range(5)]
        for version in range(1, 30):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert value_of(worker.model) == version
        stop = True
        assert all([await within(task) > 0 for task in readers])


async def test_sends_do_not_starve_pinned_tasks(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, sync=False) as cluster:
        worker = cluster.workers[0]
        stop = False

        async def sender() -> None:
            while not stop:
                await cluster.scheme.send()
                await steps(1)

        sending = asyncio.create_task(sender())
        for _ in range(50):
            async with worker.scheme.pinned():
                await steps(2)
        stop = True
        await within(sending)


async def test_a_generator_left_in_a_pinned_body_does_not_hold_commits_up(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]

        async def rollout() -> AsyncIterator[int]:
            async with worker.scheme.pinned() as version:
                yield version

        async def abandon() -> None:
            async for _ in rollout():
                break

        # The loop closes an abandoned generator in a task, and so in a context, of its own.
        await asyncio.get_running_loop().create_task(abandon(), context=contextvars.Context())
        await steps(10)
        fill(cluster.model, 1)
        await cluster.scheme.send()
        assert value_of(worker.model) == 1


async def test_an_error_in_a_pinned_body_lets_go(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0]
        with pytest.raises(ZeroDivisionError):
            async with worker.scheme.pinned():
                raise ZeroDivisionError
        fill(cluster.model, 1)
        await cluster.scheme.send()
        assert value_of(worker.model) == 1


async def test_pinned_in_a_process(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=1) as cluster:
        worker = cluster.workers[0]
        pinned = worker.begin(scenarios.pin)
        assert await worker.says("pinned") == 0
        fill(cluster.model, 1)
        send = asyncio.create_task(cluster.scheme.send())
        assert (await worker.run(scenarios.report))["value"] == 0
        worker.tell("unpin")
        seen = await within(pinned)
        assert [s["value"] for s in seen] == [0, 0]
        await within(send)
        assert await worker.run(scenarios.report) == {"version": 1, "value": 1}
