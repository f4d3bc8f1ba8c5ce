"""Closing an endpoint ends its calls that are under way."""

from __future__ import annotations

import asyncio

import pytest

from aiosync import NotConnectedError, WorkerLostError
from aiosync._endpoint import OpenCalls
from tests.kit.clock import BRIEF, PATIENCE, within


async def test_stop_ends_the_body() -> None:
    calls = OpenCalls()

    async def wait() -> None:
        async with calls.call(PATIENCE):
            await asyncio.Event().wait()

    waiting = [asyncio.create_task(wait()) for _ in range(2)]
    await asyncio.sleep(0)
    await within(calls.stop())
    for task in waiting:
        with pytest.raises(NotConnectedError):
            await task
    with pytest.raises(NotConnectedError):
        await within(wait())
    await within(calls.stop())


@pytest.mark.parametrize("timeout", [0.0, PATIENCE])
async def test_stop_waits_for_a_body_that_takes_its_time(timeout: float) -> None:
    """Also for one whose own deadline has passed already."""
    calls, ended, begun = OpenCalls(), False, asyncio.Event()

    async def wait() -> None:
        nonlocal ended
        async with calls.call(timeout):
            try:
                await asyncio.Event().wait()
            finally:
                begun.set()
                await asyncio.sleep(BRIEF)
                ended = True

    waiting = asyncio.create_task(wait())
    if not timeout:
        await within(begun.wait())
    else:
        await asyncio.sleep(0)
    await within(calls.stop())
    assert ended
    with pytest.raises(NotConnectedError):
        await waiting


async def test_an_error_that_the_end_causes_does_not_hide_it() -> None:
    calls = OpenCalls()

    async def wait() -> None:
        async with calls.call(PATIENCE):
            try:
                await asyncio.Event().wait()
            finally:
                raise WorkerLostError((), "because of the end")

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await within(calls.stop())
    with pytest.raises(NotConnectedError):
        await waiting


async def test_a_deadline_is_a_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        async with OpenCalls().call(0.0):
            await asyncio.Event().wait()
