"""Turns: whoever waits does so until its deadline, whenever it came."""

from __future__ import annotations

import asyncio

import pytest

from aiosync._deadline import Deadline
from aiosync.errors import SyncTimeoutError
from aiosync.schemes.turns import Turns


async def _hold(turns: Turns, until: asyncio.Event) -> None:
    async with turns.turn():
        await until.wait()


async def test_who_comes_between_a_release_and_the_next_ones_waking_has_a_deadline_too() -> None:
    turns, over = Turns(), asyncio.Event()
    async with turns.turn(Deadline.after(5)):
        other = asyncio.create_task(_hold(turns, over))
        await asyncio.sleep(0)
    # The other one has been woken for it, and does not run yet.
    assert turns.taken
    with pytest.raises(SyncTimeoutError):
        async with asyncio.timeout(30), turns.turn(Deadline.after(0.05)):
            pass
    over.set()
    await other
    assert not turns.taken


async def test_one_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    turns, over = Turns(), asyncio.Event()
    first, second = (asyncio.create_task(_hold(turns, over)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert turns.taken
    over.set()
    await first
    async with turns.turn(Deadline.after(5)):
        pass
    assert not turns.taken


@pytest.mark.parametrize("woken", [True, False])
async def test_one_that_is_cancelled_just_when_it_gets_it_hands_it_on(woken: bool) -> None:
    turns, over = Turns(), asyncio.Event()
    async with turns.turn():
        second, third = (asyncio.create_task(_hold(turns, over)) for _ in range(2))
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
    assert not turns.taken


async def test_one_after_the_other() -> None:
    turns = Turns()
    order: list[int] = []

    async def take(number: int) -> None:
        async with turns.turn(Deadline.after(30)):
            order.append(number)
            await asyncio.sleep(0)
            order.append(number)

    await asyncio.gather(*map(take, range(5)))
    assert order == [number for number in range(5) for _ in range(2)]
