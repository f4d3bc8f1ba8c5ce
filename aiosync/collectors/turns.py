"""When a rollout, which need not await anything, gives the event loop a turn."""

from __future__ import annotations

import asyncio
import select
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

IsDue: TypeAlias = Callable[[], bool]
"""Returns whether the event loop is to have a turn now. A rollout calls it after each frame."""

_OFTEN = 4e-3
"""Most seconds between two turns of an event loop that cannot be asked whether anything waits for it."""

_RARELY = 10e-3
"""Most seconds between two turns of one that can. Only its timers, and callbacks that an environment has
scheduled, wait so long."""

_ITERATIONS = 8
"""Iterations of the loop in a turn of one that can be asked: what has arrived resolves a future, that wakes a
task, and so on, without anything that arrives. More of such steps than these wait for the next turn."""

_FEWER_ITERATIONS = 4
"""The same of one that cannot be asked."""

_LEAST = 0.5e-3
"""Least seconds between two turns that were due because something had arrived. Otherwise a descriptor that
stays readable, of an environment for example, would cost a turn after each frame."""


class Turns:
    """The turns of the running event loop.

    A turn takes as long as half a step of a small environment, and moves the code of that out of the
    processor's caches. So a worker's own event loop gets a turn as soon as a command, an update or anything
    else has arrived, and hardly another one. uvloop's loops can be asked that on Linux: the descriptor of the
    loop's epoll instance is readable then.

    Args:
        own_loop: whether the event loop runs this worker alone. If not, its other tasks get regular turns.
        each_frame: whether there is a turn after each frame, as several rollouts take turns.
    """

    def __init__(self, *, own_loop: bool, each_frame: bool = False) -> None:
        # uvloop does not document this method. Without it turns are more frequent, and nothing else changes.
        backend: Any = getattr(asyncio.get_running_loop(), "_get_backend_id", None)
        self._poll: Callable[[int], list[tuple[int, int]]] | None = None
        self._seconds = 0.0 if each_frame else _OFTEN
        self._iterations = 1 if each_frame else _FEWER_ITERATIONS
        if own_loop and not each_frame and backend is not None and sys.platform == "linux":
            poll = select.poll()
            poll.register(backend(), select.POLLIN)
            self._poll, self._iterations = poll.poll, _ITERATIONS

    def begin(self) -> IsDue:
        """Return what says when the next turn is due, counted from now."""
        clock, poll, now = time.perf_counter, self._poll, time.perf_counter()
        if poll is None:
            until = now + self._seconds
            return lambda: clock() >= until
        least, most = now + _LEAST, now + _RARELY

        def is_due() -> bool:
            at = clock()
            return at >= least and (at >= most or bool(poll(0)))

        return is_due

    async def give(self) -> None:
        """Give the event loop a turn."""
        for _ in range(self._iterations):
            await asyncio.sleep(0)
