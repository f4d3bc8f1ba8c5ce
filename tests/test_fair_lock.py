"""FairLock: a call waits until its deadline at most, and in the order of arrival."""

from __future__ import annotations

import asyncio

import pytest

from aiosync._deadline import Deadline, FairLock
from aiosync.errors import SyncTimeoutError


async def _hold(lock: FairLock, until: asyncio.Event) -> None:
    async with lock.hold():
        await until.wait()


async def test_who_comes_between_a_release_and_the_next_ones_waking_has_a_deadline_too() -> None:
    lock, over = FairLock(), asyncio.Event()
    async with lock.hold(Deadline.after(5)):
        other = asyncio.create_task(_hold(lock, over))
        await asyncio.sleep(0)
    # The other one has been woken for it, and does not run yet.
    assert lock.locked
    with pytest.raises(SyncTimeoutError):
        async with asyncio.timeout(30), lock.hold(Deadline.after(0.05)):
            pass
    over.set()
    await other
    assert not lock.locked


async def test_one_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    lock, over = FairLock(), asyncio.Event()
    first, second = (asyncio.create_task(_hold(lock, over)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert lock.locked
    over.set()
    await first
    async with lock.hold(Deadline.after(5)):
        pass
    assert not lock.locked


@pytest.mark.parametrize("woken", [True, False])
async def test_one_that_is_cancelled_just_when_it_gets_it_hands_it_on(woken: bool) -> None:
    lock, over = FairLock(), asyncio.Event()
    async with lock.hold():
        second, third = (asyncio.create_task(_hold(lock, over)) for _ in range(2))
        await asyncio.sleep(0)
        if not woken:
            second.cancel()  # before it is handed to it, and nothing runs in between
    if woken:
        second.cancel()
    over.set()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await second
        await third
    assert not lock.locked


async def test_one_after_the_other() -> None:
    lock = FairLock()
    order: list[int] = []

    async def take(number: int) -> None:
        async with lock.hold(Deadline.after(30)):
            order.append(number)
            await asyncio.sleep(0)
            order.append(number)

    await asyncio.gather(*map(take, range(5)))
    assert order == [number for number in range(5) for _ in range(2)]
