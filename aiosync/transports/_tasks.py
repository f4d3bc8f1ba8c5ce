"""The task group of a connected endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aiosync.transports._offload import uninterrupted


class BackgroundTasks:
    """Owns the background tasks of one endpoint.

    The task that enters an anyio task group has to exit it, but different tasks may call ``connect`` and
    ``aclose``. So ``connect`` starts a task that enters the group, and ``aclose`` ends that task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._group: TaskGroup | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Start the task group. If the caller is cancelled, nothing is left running."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._main(ready), name=self._name)
        try:
            await ready.wait()
        except BaseException:
            await self.aclose()
            raise

    def spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run ``function(*args)`` as a task. It must not raise: an error would cancel the other tasks."""
        if self._group is not None and not self._stop.is_set():
            self._group.start_soon(function, *args)

    async def aclose(self) -> None:
        """Cancel all tasks and wait until they have ended; idempotent."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await uninterrupted(lambda _: self._ended(task))

    async def _ended(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        task.result()

    async def _main(self, ready: asyncio.Event) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            ready.set()
            await self._stop.wait()
            group.cancel_scope.cancel()
