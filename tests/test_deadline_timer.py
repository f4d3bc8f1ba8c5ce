"""One timer for many calls with a deadline: each ends at its own, and none of them sets a timer again."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiosync._deadline import Deadline, DeadlineTimer


def _new() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each timer that the event loop is asked for."""
    asked: list[float] = []
    loop_class = asyncio.BaseEventLoop
    call_later = loop_class.call_later

    def counted(loop: asyncio.BaseEventLoop, delay: float, *args: object, **options: object) -> object:
        asked.append(delay)
        return call_later(loop, delay, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop_class, "call_later", counted)
    return asked


@pytest.mark.parametrize("order", [(0.05, 0.1, 0.15), (0.15, 0.1, 0.05), (0.1, 0.15, 0.05)])
async def test_each_wait_ends_at_its_own_deadline(order: tuple[float, ...]) -> None:
    timer = DeadlineTimer()
    ended: list[float] = []

    async def wait(seconds: float) -> None:
        deadline = Deadline.after(seconds)
        await timer.wait(_new(), deadline)
        assert not deadline.remaining()
        ended.append(seconds)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for seconds in order:
            group.create_task(wait(seconds))
    assert ended == sorted(order)


async def test_a_deadline_that_has_passed(timers: list[float]) -> None:
    timer = DeadlineTimer()
    async with asyncio.timeout(10):
        await timer.wait(_new(), Deadline.after(-1))


async def test_calls_with_the_same_seconds_share_one_timer(timers: list[float]) -> None:
    timer = DeadlineTimer()
    for _ in range(100):
        waiter = _new()
        asyncio.get_running_loop().call_soon(waiter.set_result, None)
        await timer.wait(waiter, Deadline.after(60))
    assert len(timers) == 1
    timer.close()


async def test_an_earlier_deadline_sets_the_timer_anew(timers: list[float]) -> None:
    timer = DeadlineTimer()
    late = asyncio.create_task(timer.wait(_new(), Deadline.after(60)))
    await asyncio.sleep(0)
    started = time.monotonic()
    await timer.wait(_new(), Deadline.after(0.05))
    assert time.monotonic() - started < 30
    # It has been set again for the one that still waits.
    assert not late.done() and len(timers) == 3
    late.cancel()
    timer.close()


async def test_an_interrupt_while_the_timer_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = DeadlineTimer()

    class Interrupt(BaseException):
        pass

    def interrupted(*args: object) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", interrupted)
        with pytest.raises(Interrupt):
            await timer.wait(_new(), Deadline.after(0.05))
    async with asyncio.timeout(10):
        await timer.wait(_new(), Deadline.after(0.1))


async def test_closing_ends_those_that_wait() -> None:
    timer = DeadlineTimer()
    calls = [asyncio.create_task(timer.wait(_new(), Deadline.after(60))) for _ in range(3)]
    await asyncio.sleep(0)
    timer.close()
    async with asyncio.timeout(10):
        await asyncio.gather(*calls)


async def test_a_cancelled_wait_leaves_nothing() -> None:
    timer = DeadlineTimer()
    waiter = _new()
    call = asyncio.create_task(timer.wait(waiter, Deadline.after(0.05)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(10):
        await timer.wait(_new(), Deadline.after(0.1))  # the timer of the cancelled one fires meanwhile
    assert waiter.cancelled()
