"""Waits that last no longer than it takes to wake a thread."""

from __future__ import annotations

import asyncio
import os
import time

_LONGEST = 0.0003  # seconds for which a loop stays awake
_MOST_SKIPPED = 31  # waits in a row in which the loop sleeps at once

# A worker may be on this processor: the kernel expects that a thread which wakes another is about to sleep.
_let_others_run = os.sched_yield if hasattr(os, "sched_yield") else lambda: None


class ShortWaits:
    """Keeps an event loop awake in waits for answers that are about to arrive.

    A small update is applied in less time than the operating system needs to put the loop's thread to sleep
    and to wake it. So the loop goes on with its turns, which look for events without waiting, and in which
    all other callbacks run. It sleeps if the answer has not arrived in time, and then in some of the next
    waits too: busy workers may need the processor.

    An object belongs to one event loop.
    """

    def __init__(self) -> None:
        self._skip = 0  # how many waits are still to be skipped
        self._skipped = 0  # how many were skipped after the last one that was too long

    def begin(self, waiter: asyncio.Future[None]) -> None:
        """Keep the running loop awake until ``waiter`` is done, or for a moment."""
        if self._skip:
            self._skip -= 1
        else:
            self._turn(asyncio.get_running_loop(), waiter, time.perf_counter() + _LONGEST)

    def _turn(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], until: float) -> None:
        if waiter.done():
            self._skipped = 0
        elif time.perf_counter() < until:
            _let_others_run()
            loop.call_soon(self._turn, loop, waiter, until)
        else:
            self._skip = self._skipped = min(2 * self._skipped + 1, _MOST_SKIPPED)
