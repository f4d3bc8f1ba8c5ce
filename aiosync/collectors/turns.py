"""When a rollout, which need not await anything, gives the event loop a turn."""

from __future__ import annotations

import asyncio
import select
import sys
import time
import types
from collections.abc import Callable, Generator
from typing import Any

clock = time.perf_counter
"""The clock of turns, in seconds."""

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

_ASKING = 0.5e-3
"""Least seconds between two questions whether something has arrived. To ask after each frame would cost 2 %
of a small environment's frames: a system call moves their code out of the processor's caches."""


class NextTurn:
    """When the event loop is to have its next turn. A rollout asks after each frame.

    Args:
        least: seconds from now before which no turn is due.
        most: seconds from now after which one is due in any case.
        poll: called with 0 in between; returns whether something has arrived. None: a turn is due.

    Attributes:
        not_before: no turn is due before this time of :data:`clock`. A rollout with short steps need not ask
            before then.
    """

    __slots__ = ("_latest", "_poll", "not_before")

    def __init__(self, least: float, most: float, poll: Callable[[int], object] | None = None) -> None:
        now = clock()
        self.not_before, self._latest = now + least, now + most
        self._poll = poll

    def is_due(self) -> bool:
        """Return whether the turn is due now."""
        now = clock()
        if now < self.not_before:
            return False
        if now >= self._latest or self._poll is None or self._poll(0):
            return True
        self.not_before = now + _ASKING
        return False

    def delivered(self) -> None:
        """A batch was delivered. If the loop cannot be asked, the turn is due: other tasks may wait for the
        batch. If it can, another process has got the batch, and its answer makes a turn due."""
        if self._poll is None:
            self.not_before = self._latest = 0.0


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

    def begin(self) -> NextTurn:
        """Return when the next turn is due, counted from now."""
        if self._poll is None:
            return NextTurn(self._seconds, self._seconds)
        return NextTurn(_LEAST, _RARELY, self._poll)

    @types.coroutine
    def give(self) -> Generator[None, None, None]:
        """Give the event loop a turn."""
        for _ in range(self._iterations):
            yield  # as asyncio.sleep(0) does, in less time
