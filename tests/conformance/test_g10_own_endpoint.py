"""G10: closing is idempotent and closes this endpoint only; nothing happens behind anybody's back."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import aiosync
from aiosync import NotConnectedError
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import within
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of
from tests.kit.processes import ProcessCluster

ROUNDS = 60


async def test_closing_twice_and_at_the_same_time(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        for worker in cluster.workers:
            await worker.rest()
        for scheme in (cluster.workers[0].scheme, cluster.scheme):
            await within(asyncio.gather(scheme.aclose(), scheme.aclose(), scheme.shutdown()))
            await scheme.aclose()


async def test_closing_what_was_never_connected(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    await cluster.workers[0].scheme.aclose()
    await cluster.scheme.aclose()
    await cluster.close()


async def test_a_worker_that_closes_leaves_its_siblings(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=3) as cluster:
        await cluster.workers[0].close()
        for version in (1, 2, 3):
            fill(cluster.model, version)
            await cluster.scheme.send(worker_ids=[1, 2])
            assert [value_of(w.model) for w in cluster.workers] == [0, version, version]


async def test_a_process_that_closes_leaves_its_siblings(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case, workers=2) as cluster:
        leaving, staying = cluster.workers[0], cluster.workers[1]
        await leaving.run(scenarios.unserve)
        await leaving.run(scenarios.aclose)
        fill(cluster.model, 1)
        await cluster.scheme.send(worker_ids=1)
        assert await staying.run(scenarios.report) == {"version": 1, "value": 1}


async def test_the_model_stays_whole_when_the_sender_closes(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        fill(cluster.model, 4)
        await cluster.scheme.send()
        await cluster.scheme.aclose()
        for worker in cluster.workers:
            await within(worker.scheme.wait_closed())
            assert value_of(worker.model) == 4
            assert worker.scheme.version == 1


async def test_a_model_outlives_its_endpoint(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        fill(cluster.model, 4)
        await cluster.scheme.send()
        leaving = cluster.workers[0]
        await leaving.close()
        for version in (5, 6, 7):
            fill(cluster.model, version)
            await cluster.scheme.send(worker_ids=1)
        assert value_of(leaving.model) == 4
        fill(leaving.model, 9)  # its own memory now
        assert value_of(cluster.workers[1].model) == 7


async def test_a_closed_endpoint_says_so(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        worker = cluster.workers[0]
        await worker.close()
        with pytest.raises(NotConnectedError, match="init_on_receiver"):
            await worker.scheme.receive()
        await cluster.scheme.aclose()
        with pytest.raises(NotConnectedError, match="init_on_sender"):
            await cluster.scheme.send()


async def test_rounds_of_connect_send_close_leave_nothing(case: SchemeCase) -> None:
    # What is left is counted for every test, by the conftest.
    for _ in range(ROUNDS):
        async with LocalCluster(case, workers=1) as cluster:
            await cluster.scheme.send()


@pytest.mark.soak
async def test_hundreds_of_rounds_leave_nothing(case: SchemeCase) -> None:
    for _ in range(300):
        async with LocalCluster(case, workers=2) as cluster:
            await cluster.scheme.send()


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_hundreds_of_rounds_of_processes_leave_nothing(process_case: SchemeCase) -> None:
    for _ in range(300):
        async with ProcessCluster(process_case, workers=1) as cluster:
            await cluster.scheme.send()


def test_nothing_has_a_finaliser() -> None:
    package = Path(aiosync.__file__).parent
    found = [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    assert found == []
