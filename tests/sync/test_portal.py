"""What the loop of the blocking twins asks of the thread that waits for it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from aiosync._processors import release_callers_threads
from aiosync.sync import _portal
from aiosync.sync._portal import portal
from aiosync.transfer.yield_request import YieldRequest


def test_the_waiting_thread_releases_its_openmp_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(_portal, "release_openmp_threads", lambda: released.append(threading.get_ident()))

    async def long_copy() -> Future[None]:
        for _ in range(2):
            await asyncio.wrap_future(release_callers_threads.get()())
        return release_callers_threads.get()()  # the call ends before it is answered

    assert isinstance(portal().call(long_copy), Future)
    assert released[:2] == [threading.get_ident()] * 2


def test_workers_are_asked_to_yield_during_a_call_that_sends() -> None:
    request = YieldRequest()

    async def look() -> int:
        return request._byte[0]

    assert portal().send(look)
    assert not portal().call(look)  # such as receive() and stats
    assert not request._byte[0]
    request.close()


def test_nobody_is_asked_after_the_end_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_portal, "release_openmp_threads", pytest.fail)
    tasks: list[asyncio.Task[None]] = []
    go = asyncio.Event()

    async def outlive() -> None:
        await go.wait()
        await asyncio.wrap_future(release_callers_threads.get()())

    async def start() -> None:
        tasks.append(asyncio.create_task(outlive()))

    async def finish() -> None:
        go.set()
        await tasks[0]

    portal().call(start)
    portal().call(finish)
