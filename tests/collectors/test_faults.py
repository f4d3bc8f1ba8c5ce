"""Workers that are killed, hang or crash, in each phase; and many collectors, one after another."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiosync import SyncTimeoutError, WorkerLostError
from aiosync.collectors import Collector, MultiCollector
from tests.collectors.kit import ENVS, check, collecting, pid_of
from tests.collectors.worlds import AsyncCounting, Counting, Failing, Odd, make_policy
from tests.kit.clock import PATIENCE, SCALE, eventually, within
from tests.kit.leaks import Snapshot
from tests.kit.marked import mark

BOTH = pytest.mark.parametrize("sync", [True, False])
NOTICED = 1.0 * SCALE
"""Seconds in which a dead worker has to be named."""


async def _sending(collector: MultiCollector, policy: Any) -> None:
    await anext(collector)
    for version in range(1, 2000):
        mark(policy, version)
        await collector.update_policy_weights_()
        await asyncio.sleep(0.001)


async def _iterating(collector: MultiCollector, policy: Any) -> None:
    async for _ in collector:
        pass


async def _pausing(collector: MultiCollector, policy: Any) -> None:
    await anext(collector)
    for _ in range(1000):
        async with collector.pause():
            await asyncio.sleep(0.001)
        await anext(collector)


async def _resetting(collector: MultiCollector, policy: Any) -> None:
    for _ in range(2000):
        await collector.reset()
        await asyncio.sleep(0.001)


PHASES: dict[str, Callable[[MultiCollector, Any], Awaitable[None]]] = {
    "iterate": _iterating,
    "send": _sending,
    "pause": _pausing,
    "reset": _resetting,
}


def _pid(collector: MultiCollector, worker: int) -> int:
    found = pid_of(collector, worker)
    assert found is not None
    return found


@BOTH
@pytest.mark.parametrize("phase", PHASES)
async def test_a_worker_is_killed(phase: str, sync: bool) -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=sync) as collector:
        running = asyncio.ensure_future(PHASES[phase](collector, policy))
        await asyncio.sleep(0.2)
        assert not running.done()
        os.kill(_pid(collector, 1), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"worker 1 lost"):
            await within(running)
        assert time.monotonic() - killed < NOTICED


@BOTH
@pytest.mark.parametrize("phase", PHASES)
async def test_a_killed_worker_is_replaced(phase: str, sync: bool) -> None:
    policy = make_policy()
    async with collecting(ENVS, policy, sync=sync, restart_workers=1) as collector:
        running = asyncio.ensure_future(PHASES[phase](collector, policy))
        await asyncio.sleep(0.2)
        before = _pid(collector, 1)
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: pid_of(collector, 1) not in (None, before), "there is another")
        await asyncio.sleep(0.2)
        assert not running.done(), running
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        mark(policy, collector.policy_version + 1)
        await collector.update_policy_weights_()
        for _ in range(4):
            check(await anext(collector))


@BOTH
@pytest.mark.parametrize("phase", PHASES)
async def test_a_worker_hangs(phase: str, sync: bool) -> None:
    policy = make_policy()
    started = time.monotonic()
    async with collecting(ENVS, policy, sync=sync, timeout=1.5 * SCALE) as collector:
        running = asyncio.ensure_future(PHASES[phase](collector, policy))
        await asyncio.sleep(0.2)
        pid = _pid(collector, 1)
        os.kill(pid, signal.SIGSTOP)
        if phase == "iterate" and not sync:  # the others continue, and no call waits for this one
            await asyncio.sleep(0.5)
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        else:
            with pytest.raises(SyncTimeoutError, match="worker 1"):
                await within(running)
    assert time.monotonic() - started < PATIENCE
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@BOTH
async def test_an_error_that_is_larger_than_a_socket(sync: bool) -> None:
    envs = [Counting, functools.partial(Failing, "step", "at length")]
    async with collecting(envs, make_policy(), sync=sync) as collector:
        with pytest.raises(Odd, match=r"in stepx+"):
            for _ in range(100):
                await within(anext(collector))


@BOTH
async def test_a_worker_that_hangs_while_it_is_ended(sync: bool) -> None:
    async with collecting(ENVS, make_policy(), sync=sync) as collector:
        await anext(collector)
        pids = [_pid(collector, worker) for worker in range(2)]
        os.kill(pids[0], signal.SIGSTOP)
        started = time.monotonic()
        await collector.aclose(timeout=0.5)
        assert time.monotonic() - started < 5 * SCALE
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@BOTH
async def test_a_worker_that_is_killed_while_it_is_ended(sync: bool) -> None:
    async with collecting(ENVS, make_policy(), sync=sync) as collector:
        await anext(collector)
        pid = _pid(collector, 1)
        os.kill(pid, signal.SIGSTOP)  # so that it does not end by itself
        closing = asyncio.ensure_future(collector.aclose())
        await asyncio.sleep(0.1)
        assert not closing.done()
        os.kill(pid, signal.SIGKILL)
        await within(closing, 2 * SCALE)


@BOTH
async def test_an_end_that_is_cancelled(sync: bool) -> None:
    collector = MultiCollector(ENVS, make_policy(), sync=sync, start_method="forkserver", timeout=2 * SCALE)
    await collector.connect()
    await anext(collector)
    pids = [_pid(collector, worker) for worker in range(2)]
    os.kill(pids[1], signal.SIGSTOP)
    closing = asyncio.ensure_future(collector.aclose())
    await asyncio.sleep(0.1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(closing)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    await collector.aclose()


class Closing(Counting):
    """Hangs, dies or raises where it is closed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def close(self) -> None:
        """See :class:`Closing`."""
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Odd("in close", 1)


@BOTH
@pytest.mark.parametrize("how", ["hang", "kill", "raise"])
async def test_an_environment_that_does_not_close(how: str, sync: bool) -> None:
    started = time.monotonic()
    async with collecting([functools.partial(Closing, how)] * 2, sync=sync) as collector:
        await anext(collector)
        await collector.aclose(timeout=1 * SCALE)
    assert time.monotonic() - started < PATIENCE


class FailingFirst(Closing):
    """Raises in its first step."""

    def step(self, action: Any) -> Any:
        """See :class:`FailingFirst`."""
        raise Odd("in step", 1)


@pytest.mark.parametrize("how", ["hang", "kill", "raise"])
async def test_an_error_is_raised_before_the_environment_is_closed(how: str) -> None:
    async with collecting([functools.partial(FailingFirst, how)], restart_workers=1) as collector:
        with pytest.raises(Odd, match="in step"):
            await anext(collector)
        await collector.aclose(timeout=1 * SCALE)


async def test_an_error_is_raised_before_other_environments_are_cancelled() -> None:
    begun, cancelled, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(AsyncCounting):
        async def step(self, action: Any) -> Any:
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
                await released.wait()

    class Fails(AsyncCounting):
        async def step(self, action: Any) -> Any:
            await begun.wait()
            raise Odd("in step", 1)

    envs = iter([Slow(), Fails()])
    options: dict[str, Any] = {"frames_per_batch": 20, "timeout": PATIENCE}
    async with Collector(lambda: next(envs), envs_per_worker=2, **options) as collector:
        with pytest.raises(Odd, match="in step"):
            await anext(collector)
        await within(cancelled.wait())
        released.set()


@BOTH
async def test_a_start_that_is_cancelled(sync: bool) -> None:
    envs = [Counting, functools.partial(Failing, "init", "stop")]
    starting = asyncio.ensure_future(_start(envs, sync))
    await asyncio.sleep(0.5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(starting)


async def _start(envs: Any, sync: bool) -> None:
    async with collecting(envs, make_policy(), sync=sync, timeout=2 * SCALE):
        pass


@BOTH
async def test_batches_that_were_delivered_outlive_their_worker(sync: bool) -> None:
    async with collecting(ENVS, make_policy(), sync=sync) as collector:
        batch = await anext(collector)
        copy = batch.clone()
    assert (batch == copy).all()


async def test_the_others_go_on_meanwhile() -> None:
    envs = [Counting, functools.partial(AsyncCounting, 1, seconds=3600)]
    async with collecting(envs, sync=False) as collector:
        started = time.monotonic()
        for _ in range(20):
            await anext(collector)
        assert time.monotonic() - started < PATIENCE


@pytest.mark.soak
@BOTH
async def test_fifty_collectors_leave_nothing(sync: bool) -> None:
    before = None
    for number in range(50):
        policy = make_policy()
        async with collecting(ENVS, policy, sync=sync) as collector:
            for version in range(1, 3):
                check(await anext(collector))
                mark(policy, version)
                await collector.update_policy_weights_()
        if number == 0:
            before = Snapshot.take()
    assert before is not None
    left = before.left_since()
    assert not left, left
