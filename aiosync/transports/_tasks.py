"""The tasks of a connected endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiosync.transports._offload import uninterrupted


def is_cancelled(error: BaseException) -> bool:
    """Whether the running task was cancelled with this. Otherwise something that it awaited was."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class BackgroundTasks:
    """Owns the background tasks of one endpoint.

    The task that enters a task group has to exit it, but different tasks may call ``connect`` and ``aclose``.
    So ``connect`` starts a task that enters the group, and ``aclose`` ends that task.

    The group is asyncio's own. Callbacks of the event loop spawn tasks too, and where sniffio is installed
    anyio finds no event loop in a callback.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Start the task group, also after :meth:`aclose`. If the caller is cancelled, nothing is left
        running."""
        ready, self._stop = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._main(ready, self._stop), name=self._name)
        try:
            await ready.wait()
        except BaseException:
            await self.aclose()
            raise

    def spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run ``function(*args)`` as a task. It must not raise: an error would cancel the other tasks."""
        if self._group is not None and not self._stop.is_set():
            task = self._group.create_task(function(*args))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def aclose(self) -> None:
        """Cancel all tasks and wait until they have ended; idempotent."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await uninterrupted(lambda _: self._ended(task))

    async def _ended(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        task.result()

    async def _main(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as self._group:
            ready.set()
            await stop.wait()
            for task in self._running:
                task.cancel()
