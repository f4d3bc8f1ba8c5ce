"""Fixtures for all tests: the server that workers are forked from, and the leak check."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Iterator

import pytest
import uvloop

from tests.kit.leaks import Snapshot
from tests.kit.processes import warm_up

CHECKED = ("tests.conformance", "tests.transports", "tests.schemes", "tests.protocol", "tests.sync")
"""Packages whose every test is checked for leaks."""


async def _nothing() -> None:
    await asyncio.sleep(0)


@pytest.fixture(scope="session")
def warm() -> None:
    """What is made once per process is made before anything is counted."""
    warm_up()
    asyncio.run(_nothing())
    uvloop.run(_nothing())


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Every task that the test's loop ran has ended when the test has."""
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    if left:
        # What is about to end has one turn of the loop to do so.
        await asyncio.wait(left, timeout=0.05)
    left = {task for task in left if not task.done()}
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(autouse=True)
def no_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads, descriptors, children, shared memory and tasks are back where they were."""
    module = request.module.__name__
    if not module.startswith(CHECKED):
        yield
        return
    request.getfixturevalue("warm")
    gc.collect()
    before = Snapshot.take()
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("no_task_left")
    yield
    left = before.left_since()
    assert not left, f"left behind: {left}"
