"""The event loop behind the blocking twins: one thread per process, started by the first blocking call.

A blocking call posts its coroutine to that loop and sleeps on a lock until the coroutine has ended. The
thread is a daemon. When the process ends, endpoints that are still open are closed, in bounded time.

After a fork the child starts from nothing: the parent's thread does not exist there, and its loop must
not be touched, since the two processes share the descriptors under it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from aiosync._processors import (
    release_callers_threads,
    release_openmp_threads,
    short_time_slices,
    shorten_time_slices,
)
from aiosync.errors import BlockingCallError, NotConnectedError
from aiosync.events import logger
from aiosync.transfer.yield_request import asking_to_yield

try:
    import uvloop
except ImportError:  # it is not made for every system
    _new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_PATIENCE = 5.0
"""Seconds that closing what was left open may take at the end of the process."""

_EXIT_PRIORITY = 1000
"""Before multiprocessing joins its children, which may be waiting for our goodbye to end."""


class _Call(Generic[T]):
    """One coroutine that runs on the loop, and the thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Awaitable[T]]) -> None:
        self._loop = loop
        self._work = work
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._unwanted = False
        self._over = False
        self._context.run(release_callers_threads.set, self._release_threads)
        # For the waiting thread: what to do, None at the end of the coroutine. A signal interrupts its wait.
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    # -- in the loop's thread ---------------------------------------------------------------------

    def begin(self) -> None:
        """Start the coroutine, unless the waiting thread has cancelled it already."""
        if not self._unwanted:
            self._task = self._loop.create_task(self._main(), context=self._context)
            self._task.add_done_callback(self._end)

    async def _main(self) -> T:
        return await self._work()

    def cancel(self) -> None:
        """Cancel the coroutine, or keep it from starting. Its result is not needed."""
        self._unwanted = True
        if self._task is None:
            self._end(None)
        elif self._task.done():
            self._end(self._task)
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T] | None) -> None:
        if self._unwanted and task is not None and not task.cancelled():
            task.exception()
        if not self._over:
            self._over = True
            self._requests.put(None)

    def _release_threads(self) -> Future[None]:
        released: Future[None] = Future()

        def release() -> None:
            release_openmp_threads()
            released.set_result(None)

        if self._over:  # a task that the coroutine has started asks
            released.set_result(None)
        else:
            self._requests.put(release)
        return released

    # -- in the waiting thread --------------------------------------------------------------------

    def wait(self) -> None:
        """Sleep until the coroutine has ended; may be called again after an interrupt."""
        while not self._over and (request := self._requests.get()) is not None:
            request()

    def result(self) -> T:
        """Return what the coroutine returned, or raise what it raised."""
        task = self._task
        if task is None or task.cancelled():
            raise NotConnectedError("no blocking calls any more: this process is ending")
        return task.result()


class Portal:
    """An event loop in its own thread, and the endpoints that are closed before it ends."""

    def __init__(self) -> None:
        self._loop = _new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoints: dict[object, Callable[[], Awaitable[None]]] = {}
        # A callback that is posted before _closing is set runs before the loop ends.
        self._posting = threading.Lock()
        self._closing = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="aiosync-portal", daemon=True)
        self._thread.start()
        Finalize(None, self.close, (_EXIT_PATIENCE,), exitpriority=_EXIT_PRIORITY)

    # -- calls, from other threads ----------------------------------------------------------------

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function(*args, **kwargs)`` on the loop, in the caller's context, and wait for its result.

        A thread that runs another event loop may call too; that loop is blocked meanwhile.

        An exception that arrives in the waiting thread (KeyboardInterrupt, say) cancels the coroutine, and
        propagates when the coroutine has ended; a second one propagates at once.

        Raises:
            BlockingCallError: called in the loop's own thread.
            NotConnectedError: the process is ending.
            Exception: what the coroutine raises.
        """
        if threading.get_ident() == self._thread.ident:
            raise BlockingCallError(
                "a blocking call was made on the event loop that has to serve it (in an event hook, or "
                "in a coroutine of that loop), where it would wait for itself for ever: make it from "
                "another thread, or await the asyncio scheme of the same name instead"
            )
        call = _Call(self._loop, lambda: function(*args, **kwargs))
        try:
            with short_time_slices():  # set before the loop's thread may take this one's processor
                if self._post(call.begin):
                    call.wait()
        except BaseException:
            if self._post(call.cancel):
                call.wait()
            raise
        return call.result()

    def send(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """As :meth:`call`, for a coroutine that sends weights or waits for the answers."""
        with asking_to_yield():
            return self.call(function, *args, **kwargs)

    def _post(self, callback: Callable[[], None]) -> bool:
        with self._posting:
            if not self._closing:
                self._loop.call_soon_threadsafe(callback)
            return not self._closing

    # -- tasks and endpoints that outlive a call; in the loop's thread ----------------------------

    def start_task(self, main: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``main`` beside the calls until it ends or :meth:`end_task` ends it."""
        task = self._loop.create_task(main, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    async def end_task(self, task: asyncio.Task[None]) -> None:
        """Cancel a task of :meth:`start_task` and wait for its end; idempotent."""
        if task in self._tasks:  # a parent process's task is not in it
            task.cancel()
            await asyncio.wait([task])

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    def adopt(self, endpoint: object, close: Callable[[], Awaitable[None]]) -> None:
        """Keep a live endpoint, and call ``close()`` at the end of the process if it is still open."""
        self._endpoints[endpoint] = close

    def release(self, endpoint: object) -> None:
        """Forget an endpoint that is closed; idempotent."""
        self._endpoints.pop(endpoint, None)

    # -- the end ----------------------------------------------------------------------------------

    def close(self, patience: float) -> None:
        """Close the endpoints, cancel the tasks, and end the thread; idempotent. Waiting calls raise.

        Each step may take ``patience`` seconds. Afterwards the daemon thread is left running.
        """
        with self._posting:
            if self._closing:
                return
            self._closing = True
        self._loop.call_soon_threadsafe(lambda: self.start_task(self._wind_up(patience), "aiosync-end"))
        self._thread.join(3 * patience)

    async def _wind_up(self, patience: float) -> None:
        closing = [asyncio.ensure_future(close()) for close in self._endpoints.values()]
        if closing:
            done, _ = await asyncio.wait(closing, timeout=patience)
            for task in done:
                if not task.cancelled() and task.exception() is not None:
                    logger.debug("an endpoint did not close at exit", exc_info=task.exception())
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for other in others:
            other.cancel()
        if others:
            _, pending = await asyncio.wait(others, timeout=patience)
            if pending:
                return
        await self._loop.shutdown_asyncgens()
        self._over = True
        self._loop.stop()

    def _run(self) -> None:
        shorten_time_slices()
        while not self._over:
            # The task that raised one of these has kept it for its caller too; the other tasks continue.
            with suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_forever()
        self._loop.close()


_portal: Portal | None = None
_making = threading.Lock()
_inherited: list[Portal] = []


def portal() -> Portal:
    """This process's portal; the first call makes it."""
    global _portal
    if _portal is None:
        with _making:
            if _portal is None:
                _portal = Portal()
    return _portal


def _forked() -> None:
    """In a forked child: forget the parent's portal, but never free it.

    Freeing its loop or a connection would remove descriptors from the epoll that the parent waits on.
    """
    global _portal, _making
    _making = threading.Lock()
    if _portal is not None:
        _inherited.append(_portal)
        _portal = None


os.register_at_fork(after_in_child=_forked)
