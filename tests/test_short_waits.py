"""Waits in which the event loop stays awake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest

from aiosync._short_waits import ShortWaits


class _Clock:
    """Goes on by 10 µs each time that somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


@pytest.fixture(autouse=True)
def _clock() -> Iterator[None]:
    with mock.patch("aiosync._short_waits.time.perf_counter", _Clock()):
        yield


async def _turns(waits: ShortWaits, waiter: asyncio.Future[None], *, at_most: int = 100) -> int:
    """Begin a wait; return in how many of the next turns the loop had no time to sleep."""
    loop, count = asyncio.get_running_loop(), 0
    with mock.patch.object(loop, "call_soon", wraps=loop.call_soon) as called:
        waits.begin(waiter)
        for _ in range(at_most):
            before = called.call_count
            await asyncio.sleep(0)
            count += any(call.args[0] == waits._turn for call in called.call_args_list[before:])
    return count


async def test_it_is_awake_until_the_answer() -> None:
    waits, loop = ShortWaits(), asyncio.get_running_loop()
    for _ in range(3):
        waiter: asyncio.Future[None] = loop.create_future()
        loop.call_soon(waiter.set_result, None)
        assert await _turns(waits, waiter) <= 2
        assert waits._skip == 0


async def test_it_sleeps_if_there_is_none_and_then_more_often() -> None:
    waits, loop = ShortWaits(), asyncio.get_running_loop()
    awake = [await _turns(waits, loop.create_future()) for _ in range(100)]
    assert [number for number, turns in enumerate(awake) if turns] == [0, 2, 6, 14, 30, 62, 94]
    assert max(awake) < 40, "300 µs"
    waiter: asyncio.Future[None] = loop.create_future()
    waiter.set_result(None)
    for _ in range(40):
        await _turns(waits, waiter, at_most=2)
    assert await _turns(waits, loop.create_future())  # an answer in time: the loop stays awake again


async def test_a_cancelled_wait_ends_it() -> None:
    waits, waiter = ShortWaits(), asyncio.get_running_loop().create_future()
    waits.begin(waiter)
    waiter.cancel()
    assert await _turns(waits, waiter, at_most=3) == 0
