"""The one task of a live endpoint: it holds the task group that owns all its other tasks.

An anyio task group has to be left by the task that entered it, but ``connect`` and ``aclose`` may be
called by different tasks. So ``connect`` starts this one, and ``aclose`` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aiosync.transports._offload import uninterrupted

__all__ = ["BackgroundTasks"]


class BackgroundTasks:
    """Owns the background tasks of one endpoint."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._group: TaskGroup | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Start the task; if cancelled here, nothing is left running."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._main(ready), name=self._name)
        try:
            await ready.wait()
        except BaseException:
            await self.aclose()
            raise

    def spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run ``function(*args)`` as a task of this endpoint; it must let no error out."""
        if self._group is not None and not self._stop.is_set():
            self._group.start_soon(function, *args)

    async def aclose(self) -> None:
        """Cancel every task and wait for its end; idempotent."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await uninterrupted(lambda _: _end_of(task))

    async def _main(self, ready: asyncio.Event) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            ready.set()
            await self._stop.wait()
            group.cancel_scope.cancel()


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
    task.result()
