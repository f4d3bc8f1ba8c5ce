"""The tasks of an endpoint that connects again."""

from __future__ import annotations

import asyncio

from aiosync.transports._tasks import BackgroundTasks
from tests.kit.clock import within


async def test_tasks_run_after_a_start_that_was_cancelled_and_after_an_end() -> None:
    tasks, ran = BackgroundTasks("aiosync-test"), asyncio.Event()

    async def run() -> None:
        ran.set()
        await asyncio.Event().wait()

    for turns in range(4):
        starting = asyncio.create_task(tasks.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            await tasks.aclose()
        ran.clear()
        await tasks.start()
        tasks.spawn(run)
        await within(ran.wait())
        await tasks.aclose()
        ran.clear()
        tasks.spawn(run)
        await asyncio.sleep(0)
        assert not ran.is_set()
