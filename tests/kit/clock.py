"""The tests' one clock: every wait has a deadline, and every deadline comes from here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["BRIEF", "PATIENCE", "PROGRAM", "SCALE", "eventually", "steps", "within"]

T = TypeVar("T")

SCALE = float(os.environ.get("AIOSYNC_TEST_SCALE", "1"))
"""Set it above 1 on a slow or a busy machine."""

PATIENCE = 30.0 * SCALE
"""Seconds for what has to happen. Only a failing test waits that long."""

PROGRAM = 8 * PATIENCE
"""Seconds for a whole program, which starts interpreters and clusters of its own. If others take the cores it
takes ten times as long as on an idle machine; only one that hangs takes all of this."""

BRIEF = 0.3 * SCALE
"""Seconds for a deadline that has to pass. Each test that has one waits that long."""


async def within(awaitable: Awaitable[T], seconds: float = PATIENCE) -> T:
    """Await it, or fail after ``seconds``."""
    async with asyncio.timeout(seconds):
        return await awaitable


async def eventually(done: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Let the loop turn until ``done()``, for what no event tells of; fail after ``seconds``."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not done():
        if loop.time() > until:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.001)  # gives other processes the core; nothing is assumed of its length


async def steps(count: int) -> None:
    """Let the loop turn ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)
