"""G9: cancelling any call at any await leaves nothing behind, and the next call works."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

import aiosync
from aiosync import SyncTimeoutError, WorkerLostError
from tests.kit.cases import SchemeCase
from tests.kit.clock import BRIEF, eventually, steps, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of

POINTS = 24
"""How many turns of the loop, at most, a call is given before it is cancelled."""

SMALL = (4, 16)
LARGE = (8, 1 << 17)
"""4 MiB: copied in a thread."""


async def cancelled_after(turns: int, call: Awaitable[object]) -> bool:
    """Start ``call``, cancel it ``turns`` turns later; returns whether it was still running."""
    task = asyncio.ensure_future(call)
    await steps(turns)
    running = not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await within(task)
    return running


def _models(shape: tuple[int, int]) -> Callable[[], Uniform]:
    return lambda: Uniform(tensors=shape[0], size=shape[1])


async def _sound(cluster: LocalCluster, value: float) -> None:
    """Sends go through, versions go up, memory stays, and no weight is half applied."""
    before = cluster.scheme.version
    for _ in range(4):
        fill(cluster.model, value)
        await cluster.scheme.send()
    assert cluster.scheme.version == before + 4
    for worker in cluster.workers:
        assert worker.scheme.version == before + 4
        assert value_of(worker.model) == value


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("wait", [True, False])
async def test_send(case: SchemeCase, shape: tuple[int, int], wait: bool) -> None:
    async with LocalCluster(case, model=_models(shape)) as cluster:
        slot = cluster.scheme.stats.memory // 2
        for turns in range(POINTS):
            fill(cluster.model, turns)
            await cancelled_after(turns, cluster.scheme.send(wait=wait))
            for worker in cluster.workers:
                assert 0 <= value_of(worker.model) <= 100 + turns
            if turns % 4 == 3:
                await _sound(cluster, 100 + turns)
            # A slot that only a call of torch.distributed still reads does not count until that has returned.
            await eventually(lambda: cluster.scheme.stats.memory <= 3 * slot, "no slot is left over")


async def test_send_while_the_copy_runs(case: SchemeCase) -> None:
    shape = (4, 1 << 21)
    async with LocalCluster(case, workers=1, model=_models(shape)) as cluster:
        for turns in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
            fill(cluster.model, turns)
            await cancelled_after(turns, cluster.scheme.send())
            value_of(cluster.workers[0].model)
        await _sound(cluster, 7)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_send_while_a_worker_holds_it_up(case: SchemeCase, shape: tuple[int, int]) -> None:
    async with LocalCluster(case, model=_models(shape)) as cluster:
        worker = cluster.workers[0]
        for number in range(6):
            fill(cluster.model, 50 + number)
            async with worker.scheme.pinned():
                before = value_of(worker.model)
                assert await cancelled_after(POINTS, cluster.scheme.send())
                assert value_of(worker.model) == before
            await cluster.scheme.wait_ack()
        await _sound(cluster, 3)


async def test_send_while_it_waits_for_another(case: SchemeCase) -> None:
    async with LocalCluster(case, model=_models(LARGE)) as cluster:
        for turns in range(8):
            first = asyncio.create_task(cluster.scheme.send())
            await steps(2)
            await cancelled_after(turns, cluster.scheme.send())
            assert (await within(first)).ok
        await _sound(cluster, 3)


async def test_wait_ack(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        async with cluster.workers[0].scheme.pinned():
            await cluster.scheme.send(wait=False)
            for turns in range(6):
                assert await cancelled_after(turns, cluster.scheme.wait_ack())
        await cluster.scheme.wait_ack()
        await _sound(cluster, 3)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_receive(case: SchemeCase, shape: tuple[int, int]) -> None:
    async with LocalCluster(case, workers=1, model=_models(shape), serve=False) as cluster:
        worker = cluster.workers[0]
        for turns in range(POINTS):
            fill(cluster.model, turns)
            await cluster.scheme.send(wait=False)
            await cancelled_after(turns, worker.scheme.receive())
            assert value_of(worker.model) in range(turns + 1)
            while worker.scheme.version < cluster.scheme.version:
                assert await worker.scheme.receive() is not None  # no update is lost
            assert value_of(worker.model) == turns
            await cluster.scheme.wait_ack()


async def test_receive_by_its_deadline(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, model=_models(LARGE), serve=False) as cluster:
        worker = cluster.workers[0]
        for number in range(1, 12):
            fill(cluster.model, number)
            await cluster.scheme.send(wait=False)
            await worker.scheme.receive(timeout=1e-4 * number)
            while worker.scheme.version < cluster.scheme.version:
                await worker.scheme.receive()
            assert value_of(worker.model) == number


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_receiving(case: SchemeCase, shape: tuple[int, int]) -> None:
    async def serve(cluster: LocalCluster) -> None:
        async with cluster.workers[0].scheme.receiving():
            await asyncio.Event().wait()

    async with LocalCluster(case, workers=1, model=_models(shape), serve=False) as cluster:
        worker = cluster.workers[0]
        for turns in range(POINTS):
            fill(cluster.model, turns)
            await cluster.scheme.send(wait=False)
            await cancelled_after(turns, serve(cluster))
            assert value_of(worker.model) in range(turns + 1)
        await worker.serve()
        await cluster.scheme.wait_ack()
        await _sound(cluster, 3)


async def test_pinned(case: SchemeCase) -> None:
    async def pin(cluster: LocalCluster) -> None:
        async with cluster.workers[0].scheme.pinned():
            await steps(3)

    async with LocalCluster(case, workers=1) as cluster:
        for turns in range(6):
            await cancelled_after(turns, pin(cluster))
        async with cluster.workers[0].scheme.pinned():
            send = asyncio.create_task(cluster.scheme.send())
            await steps(POINTS)
            loop = asyncio.get_running_loop()
            for turns in range(6):
                outside = loop.create_task(pin(cluster), context=contextvars.Context())
                await cancelled_after(turns, outside)
        await within(send)
        await _sound(cluster, 3)


async def test_connect_of_the_sender(case: SchemeCase) -> None:
    cluster = LocalCluster(case, model=_models(LARGE))
    try:
        for turns in range(POINTS):
            assert await cancelled_after(turns, cluster.scheme.connect())
        await within(cluster.connect())
        await _sound(cluster, 3)
    finally:
        await cluster.close()


async def test_connect_of_the_sender_and_nothing_else(case: SchemeCase) -> None:
    for turns in range(0, POINTS, 3):
        cluster = LocalCluster(case, model=_models(LARGE))
        await cancelled_after(turns, cluster.scheme.connect())
        await cluster.close()


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_connect_of_a_worker(case: SchemeCase, shape: tuple[int, int]) -> None:
    for turns in range(0, POINTS, 2):
        cluster = LocalCluster(case, workers=1, model=_models(shape))
        try:
            sending = asyncio.create_task(cluster.scheme.connect())
            worker = cluster.workers[0]
            running = await cancelled_after(turns, worker.connect())
            if running:
                await within(worker.connect())
            try:
                await within(sending)
            except WorkerLostError:  # it was told that the worker left; the next call goes on
                await within(cluster.scheme.connect())
            await worker.serve()
            await _sound(cluster, 3)
        finally:
            await cluster.close()


async def test_aclose_of_the_sender(case: SchemeCase) -> None:
    for turns in range(8):
        cluster = LocalCluster(case)
        await cluster.connect()
        await cancelled_after(turns, cluster.scheme.aclose())
        await cluster.close()
        for worker in cluster.workers:
            assert value_of(worker.model) == 0


async def test_aclose_of_a_worker(case: SchemeCase) -> None:
    for turns in range(8):
        async with LocalCluster(case) as cluster:
            leaving = cluster.workers[0]
            await leaving.rest()
            await cancelled_after(turns, leaving.scheme.aclose())
            await leaving.scheme.aclose()
            fill(cluster.model, 1)
            await cluster.scheme.send(worker_ids=1)
            assert value_of(cluster.workers[1].model) == 1
            assert value_of(leaving.model) == 0


@asynccontextmanager
async def two_models(
    case: SchemeCase, shape: tuple[int, int] = SMALL
) -> AsyncIterator[tuple[LocalCluster, LocalCluster]]:
    """A policy and a value net on the same two workers."""
    async with LocalCluster(case, model=_models(shape)) as policy:
        async with LocalCluster(case, model=_models(shape)) as value:
            yield policy, value


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
async def test_atomic(case: SchemeCase, shape: tuple[int, int]) -> None:
    async def both(policy: LocalCluster, value: LocalCluster) -> None:
        async with aiosync.atomic(policy.scheme, value.scheme):
            pass

    async with two_models(case, shape) as (policy, value):
        for turns in range(POINTS):
            fill(policy.model, turns)
            fill(value.model, turns)
            await cancelled_after(turns, both(policy, value))
            for worker, other in zip(policy.workers, value.workers, strict=True):
                assert value_of(worker.model) == value_of(other.model)
            if turns % 4 == 3:
                await within(both(policy, value))
                for worker, other in zip(policy.workers, value.workers, strict=True):
                    assert value_of(worker.model) == value_of(other.model) == turns
        await _sound(policy, 3)
        await _sound(value, 3)


async def test_aclose_while_a_send_waits_for_answers(case: SchemeCase) -> None:
    async with LocalCluster(case, serve=False) as cluster:
        send = asyncio.create_task(cluster.scheme.send())
        await steps(POINTS)
        await within(cluster.scheme.aclose())
        # It ends at once, and does not wait out its deadline for workers that cannot answer any more.
        with pytest.raises(aiosync.AiosyncError) as caught:
            await within(send, BRIEF * 20)
        assert not isinstance(caught.value, SyncTimeoutError)


async def test_aclose_while_a_send_copies(case: SchemeCase) -> None:
    for turns in range(0, POINTS, 3):
        async with LocalCluster(case, model=_models(LARGE)) as cluster:
            send = asyncio.create_task(cluster.scheme.send())
            await steps(turns)
            await within(cluster.scheme.aclose())
            with suppress(aiosync.AiosyncError):
                await within(send, BRIEF * 20)
            for worker in cluster.workers:
                assert value_of(worker.model) == 0


async def test_aclose_while_a_send_waits_for_a_slot(case: SchemeCase) -> None:
    async with LocalCluster(case, model=_models(LARGE), max_slots=2, serve=False) as cluster:
        sends = [asyncio.create_task(cluster.scheme.send()) for _ in range(4)]
        await eventually(lambda: cluster.scheme.version >= 1, "the first is published")
        await within(cluster.scheme.aclose())
        results = await within(asyncio.gather(*sends, return_exceptions=True), BRIEF * 40)
        assert all(isinstance(result, aiosync.AiosyncError) for result in results)


async def test_entering_a_scheme_that_cannot_connect_leaves_nothing(case: SchemeCase) -> None:
    before = asyncio.all_tasks()
    cluster = LocalCluster(case, workers=1, timeout=BRIEF)
    try:
        with pytest.raises(SyncTimeoutError):
            async with cluster.scheme:
                raise AssertionError("there is no worker")
        # Nobody would call aclose(): the block was not entered.
        assert asyncio.all_tasks() == before
        assert not cluster.scheme.initialized_on_sender
    finally:
        await cluster.close()
