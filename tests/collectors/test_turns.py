"""When a rollout gives its event loop a turn."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from aiosync.collectors import turns
from aiosync.collectors.turns import NextTurn, Turns

LONG = 1000.0

can_be_asked = pytest.mark.skipif(sys.platform != "linux", reason="loops can be asked on Linux only")


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on uvloop's event loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


@contextmanager
def watched_pipe(read: Callable[[int], object]) -> Iterator[int]:
    """A pipe that the running loop watches: ``read`` gets the end to read. Yields the end to write."""
    readable, written = os.pipe()
    loop = asyncio.get_running_loop()
    loop.add_reader(readable, read, readable)
    try:
        yield written
    finally:
        loop.remove_reader(readable)
        os.close(readable)
        os.close(written)


@pytest.fixture(autouse=True)
def _no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a turn be due only because something has arrived."""
    monkeypatch.setattr(turns, "_LEAST", 0.0)
    monkeypatch.setattr(turns, "_ASKING", 0.0)
    monkeypatch.setattr(turns, "_OFTEN", LONG)
    monkeypatch.setattr(turns, "_RARELY", LONG)


@can_be_asked
@on_uvloop
async def test_a_turn_is_due_when_a_descriptor_is_readable() -> None:
    own = Turns(own_loop=True)
    got: list[bytes] = []
    with watched_pipe(lambda readable: got.append(os.read(readable, 1))) as written:
        await asyncio.sleep(0)
        turn = own.begin()
        assert not turn.is_due()
        os.write(written, b"a")
        assert turn.is_due() and turn.is_due()
        await asyncio.sleep(0)
        assert got == [b"a"]
        assert not turn.is_due()


@can_be_asked
@on_uvloop
async def test_a_turn_is_due_when_a_thread_has_scheduled_a_callback() -> None:
    own = Turns(own_loop=True)
    loop = asyncio.get_running_loop()
    called = asyncio.Event()
    await asyncio.sleep(0)  # the loop watches its own descriptors from its first turn on
    turn = own.begin()
    assert not turn.is_due()
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(called.set,))
    thread.start()
    thread.join()
    assert turn.is_due()
    await called.wait()
    assert not turn.is_due()


@can_be_asked
@on_uvloop
async def test_a_turn_is_long_enough_for_the_tasks_that_are_woken_by_what_has_arrived() -> None:
    """As for a command: a reader resolves a future, for which one task waits, for which another one waits."""
    own = Turns(own_loop=True)
    arrived, done = asyncio.Event(), asyncio.Event()

    def read(readable: int) -> None:
        os.read(readable, 1)
        arrived.set()

    async def command() -> None:
        await asyncio.wait([asyncio.ensure_future(arrived.wait())])

    async def handle() -> None:
        await asyncio.gather(command())
        done.set()

    with watched_pipe(read) as written:
        task = asyncio.create_task(handle())
        await own.give()
        os.write(written, b"a")
        assert own.begin().is_due()
        await own.give()
        assert done.is_set()
        await task


@can_be_asked
@on_uvloop
async def test_turns_for_what_has_arrived_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Turns(own_loop=True)
    monkeypatch.setattr(turns, "_LEAST", LONG)
    monkeypatch.setattr(turns, "_RARELY", 2 * LONG)
    with watched_pipe(lambda _: None) as written:  # it stays readable
        await asyncio.sleep(0)
        os.write(written, b"a")
        assert not own.begin().is_due()


@can_be_asked
@on_uvloop
async def test_a_turn_is_due_after_some_time_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Turns(own_loop=True)
    monkeypatch.setattr(turns, "_RARELY", 0.0)
    assert own.begin().is_due()


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.asyncio
async def test_a_loop_that_is_not_asked_gets_its_turns_in_time(
    own_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Turns(own_loop=own_loop)  # asyncio's loop cannot be asked, nor is another one's
    asyncio.get_running_loop().call_soon_threadsafe(lambda: None)
    assert not others.begin().is_due()
    monkeypatch.setattr(turns, "_OFTEN", 0.0)
    assert Turns(own_loop=own_loop).begin().is_due()


@pytest.mark.asyncio
async def test_several_rollouts_take_turns_frame_by_frame() -> None:
    assert Turns(own_loop=True, each_frame=True).begin().is_due()


def test_the_loop_is_asked_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, arrived = 0.0, 0, False

    def poll(_: int) -> bool:
        nonlocal asked
        asked += 1
        return arrived

    monkeypatch.setattr(turns, "clock", lambda: now)
    monkeypatch.setattr(turns, "_ASKING", 2.0)
    turn = NextTurn(1.0, 10.0, poll)
    assert not turn.is_due() and not asked
    for now, times in ((1.0, 1), (2.5, 1), (3.0, 2), (3.5, 2)):  # noqa: B007 - the clock returns it
        assert not turn.is_due() and asked == times
    arrived = True
    assert not turn.is_due()
    now = 5.0
    assert turn.is_due() and turn.is_due()
    now, arrived = 10.0, False
    assert turn.is_due()


def test_a_batch_for_another_process_makes_no_turn_due(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = False
    turn = NextTurn(0.0, LONG, lambda _: arrived)
    monkeypatch.setattr(turns, "_ASKING", 0.0)
    turn.delivered()
    assert not turn.is_due()
    arrived = True
    assert turn.is_due()


def test_a_batch_of_a_loop_that_is_not_asked_goes_to_its_other_tasks_at_once() -> None:
    turn = NextTurn(LONG, LONG)
    turn.delivered()
    assert turn.is_due()
