"""G1: no public coroutine waits for ever; the error names worker, phase and version."""

from __future__ import annotations

import asyncio
import contextvars
import time

import pytest

from aiosync import InvalidArgumentError, SyncTimeoutError
from tests.kit import scenarios
from tests.kit.cases import SchemeCase
from tests.kit.clock import BRIEF, PATIENCE, within
from tests.kit.local import LocalCluster
from tests.kit.models import fill, value_of
from tests.kit.processes import ProcessCluster


async def test_send_ends_when_no_worker_answers(case: SchemeCase) -> None:
    async with LocalCluster(case, serve=False) as cluster:
        started = time.monotonic()
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.send(timeout=BRIEF)
        assert BRIEF / 2 < time.monotonic() - started < PATIENCE / 2
        assert caught.value.workers == (0, 1)
        assert caught.value.worker == 0
        assert caught.value.version == 1
        assert caught.value.phase == "stage"
        assert caught.value.seconds == BRIEF
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.report is not None
        assert {r.status for r in caught.value.report.workers.values()} == {"timeout"}


async def test_send_names_only_the_late_worker(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        late = cluster.workers[1]
        await late.rest()
        fill(cluster.model, 1)
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.send(timeout=BRIEF)
        assert caught.value.workers == (1,)
        assert value_of(cluster.workers[0].model) == 1
        await late.serve()
        report = await cluster.scheme.wait_ack()
        assert report.workers[1].version == 1
        assert value_of(late.model) == 1


async def test_send_ends_while_a_worker_is_pinned(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        fill(cluster.model, 1)
        pinned = cluster.workers[1]
        async with pinned.scheme.pinned() as version:
            with pytest.raises(SyncTimeoutError) as caught:
                await cluster.scheme.send(timeout=BRIEF)
            assert version == pinned.scheme.version == 0
            assert value_of(pinned.model) == 0
        assert caught.value.workers == (1,)
        assert caught.value.phase == "commit"
        await cluster.scheme.wait_ack()
        assert value_of(pinned.model) == 1


async def test_pinned_ends_while_a_commit_waits_for_another_reader(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        worker = cluster.workers[0].scheme

        async def another_reader() -> None:
            async with worker.pinned(timeout=BRIEF):
                raise AssertionError("went in past a commit that waits")

        async with worker.pinned():
            with pytest.raises(SyncTimeoutError):
                await cluster.scheme.send(timeout=BRIEF)  # its commit waits from now on
            # A task made in a pinned body would be part of it: this one gets a context of its own.
            context = contextvars.Context()
            other = asyncio.get_running_loop().create_task(another_reader(), context=context)
            with pytest.raises(SyncTimeoutError) as caught:
                await within(other)
            assert caught.value.phase == "pin"
        await cluster.scheme.wait_ack()
        assert worker.version == 1


async def test_connect_ends_when_a_worker_never_comes(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    try:
        absent, present = cluster.workers
        arriving = asyncio.create_task(present.connect())
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.connect(timeout=BRIEF)
        assert 0 in caught.value.workers  # on a busy machine the other one may need longer, too
        await within(arriving)
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.connect(timeout=BRIEF)
        assert caught.value.workers == (0,)
        assert caught.value.phase == "connect"
        assert caught.value.version == 0
        # Called again it goes on waiting, and the worker that came is still there.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.scheme.connect())
            tasks.create_task(absent.connect())
        assert cluster.scheme.worker_versions == {0: 0, 1: 0}
    finally:
        await cluster.close()


async def test_a_workers_connect_ends_when_there_is_no_sender(case: SchemeCase) -> None:
    cluster = LocalCluster(case, workers=1)
    try:
        worker = cluster.workers[0]
        with pytest.raises(SyncTimeoutError) as caught:
            await worker.connect(timeout=BRIEF)
        assert caught.value.phase == "connect"
    finally:
        await cluster.close()


async def test_wait_ack_ends(case: SchemeCase) -> None:
    async with LocalCluster(case, serve=False) as cluster:
        await cluster.scheme.send(wait=False)
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.wait_ack(timeout=BRIEF)
        assert caught.value.workers == (0, 1)
        assert caught.value.version == 1


async def test_receive_without_news_is_none(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, serve=False) as cluster:
        worker = cluster.workers[0].scheme
        assert await worker.receive(timeout=BRIEF) is None
        assert await worker.receive(timeout=0) is None


async def test_the_schemes_own_timeout_counts(case: SchemeCase) -> None:
    async with LocalCluster(case, serve=False, timeout=PATIENCE) as cluster:
        assert cluster.scheme.timeout == PATIENCE
    async with LocalCluster(case, workers=1, serve=False, timeout=BRIEF * 10) as cluster:
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.send()
        assert caught.value.seconds == BRIEF * 10


def test_the_environments_timeout_counts(case: SchemeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = case.build(1, {})
    monkeypatch.delenv("AIOSYNC_TIMEOUT", raising=False)
    assert recipe.scheme.timeout == 120.0
    monkeypatch.setenv("AIOSYNC_TIMEOUT", "7.5")
    assert recipe.scheme.timeout == 7.5
    recipe.close()


@pytest.mark.parametrize("timeout", [-1.0, float("inf"), float("nan")])
async def test_a_deadline_that_is_none_is_refused(case: SchemeCase, timeout: float) -> None:
    async with LocalCluster(case, workers=1) as cluster:
        with pytest.raises(InvalidArgumentError, match="timeout"):
            await cluster.scheme.send(timeout=timeout)
        with pytest.raises(InvalidArgumentError, match="timeout"):
            await cluster.workers[0].scheme.receive(timeout=timeout)


async def test_a_stopped_worker_costs_the_deadline(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        cluster.workers[0].stop()
        fill(cluster.model, 1)
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.send(timeout=BRIEF)
        assert caught.value.workers == (0,)
        assert caught.value.version == 1
        with pytest.raises(SyncTimeoutError):
            await cluster.scheme.wait_ack(timeout=BRIEF)
        assert await cluster.workers[1].run(scenarios.report) == {"version": 1, "value": 1}
        # Closing does not wait for it either.
        await within(cluster.scheme.aclose())


async def test_a_blocked_worker_costs_the_deadline(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        blocking = cluster.workers[1].begin(scenarios.block)
        await cluster.workers[1].says("blocked")
        fill(cluster.model, 1)
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.send(timeout=BRIEF)
        assert caught.value.workers == (1,)
        cluster.workers[1].tell("go")
        await within(blocking)
        await cluster.scheme.wait_ack()
        assert await cluster.workers[1].run(scenarios.report) == {"version": 1, "value": 1}
