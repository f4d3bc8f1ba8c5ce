"""Deadlines, and what waits for them. A public call makes one deadline and passes it through all layers."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager

import msgspec

from aiosync.errors import InvalidArgumentError, Phase, SyncTimeoutError

_FIRST_PAUSE = 0.05
"""Seconds before the first retry."""

_LONGEST_PAUSE = 2.0
"""Most seconds between two retries, before randomisation."""

_DEFAULT_TIMEOUT = 120.0
"""Seconds that a call may take if the call, the scheme and the environment give no timeout."""

LATE_AFTER = 2.0
"""Seconds without an answer and without a byte moved, after which a worker counts as unresponsive: the slots
that it holds then do not count towards ``max_slots``."""

_SAMPLE = 0.5
"""Seconds between two checks of whether bytes move."""


def default_timeout() -> float:
    """Return the seconds of the environment variable ``AIOSYNC_TIMEOUT``, else :data:`_DEFAULT_TIMEOUT`."""
    text = os.environ.get("AIOSYNC_TIMEOUT")
    if text is None:
        return _DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    return check_timeout(seconds, f"AIOSYNC_TIMEOUT={text!r}")


def check_timeout(seconds: float, origin: str) -> float:
    """Return ``seconds`` if it is a positive, finite number; else raise InvalidArgumentError naming
    ``origin``."""
    if not isinstance(seconds, int | float) or not (seconds > 0 and math.isfinite(seconds)):
        raise InvalidArgumentError(
            f"{origin}: expected a positive, finite number of seconds (no call may wait for ever)"
        )
    return seconds


def seconds_of(timeout: float | None, default: float | None) -> float:
    """The seconds that a call may take: its own ``timeout``, else the ``default``, else the environment's.

    Raises:
        InvalidArgumentError: a timeout that is negative or not finite.
    """
    if timeout is None:
        return default if default is not None else default_timeout()
    if type(timeout) in (int, float) and 0 < timeout < math.inf:
        return timeout
    # With zero a call returns what is there already, and does not wait.
    return timeout if timeout == 0 else check_timeout(timeout, f"timeout={timeout!r}")


class Deadline(msgspec.Struct, frozen=True):
    """A point in time.

    Attributes:
        at: seconds on the monotonic clock.
        seconds: the time limit that it was made with, for messages.
    """

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Make a deadline ``seconds`` from now. With zero or less it has passed already."""
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    def error(self, phase: Phase, *, version: int | None = None, hint: str = "") -> SyncTimeoutError:
        """Return the error for a deadline that passed in ``phase``."""
        return SyncTimeoutError(phase, seconds=self.seconds, version=version, hint=hint)


class DeadlineTimer:
    """One timer of an event loop for all calls that wait with a deadline.

    One timer per call would take a tenth of a small update's time. Deadlines rarely pass, and most calls have
    the same time limit. So the timer stays set when its call ends. When it fires, it is set again for the
    earliest deadline among the waiting calls.

    The timer belongs to one event loop.
    """

    def __init__(self) -> None:
        # Future of a waiting call -> its deadline on the monotonic clock.
        self._waiters: dict[asyncio.Future[None], float] = {}
        self._handle: asyncio.TimerHandle | None = None
        # When the timer fires.
        self._at = math.inf

    async def wait(self, waiter: asyncio.Future[None], deadline: Deadline) -> None:
        """Wait for ``waiter``. At the deadline the timer resolves it."""
        self._waiters[waiter] = deadline.at
        try:
            if deadline.at < self._at:
                self._set(deadline.at)
            await waiter
        finally:
            del self._waiters[waiter]

    def close(self) -> None:
        """Cancel the timer, and resolve the futures of the waiting calls."""
        self._cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at = None, math.inf

    def _set(self, at: float) -> None:
        # If this method is interrupted, by a signal handler for example, the next call finds no timer and
        # sets one.
        self._cancel()
        seconds = max(0.0, at - time.monotonic())
        self._handle = asyncio.get_running_loop().call_later(seconds, self._fire)
        self._at = at

    def _fire(self) -> None:
        self._handle, self._at = None, math.inf
        now, earliest = time.monotonic(), math.inf
        for waiter, at in self._waiters.items():
            if at > now:
                earliest = min(earliest, at)
            elif not waiter.done():
                waiter.set_result(None)
        if earliest < math.inf:
            self._set(earliest)


class StallTimer:
    """One timer of an event loop that checks the operations of many peers.

    A timer per operation would take a part of a small update's time. The timer stays set when an operation
    ends.
    """

    def __init__(self) -> None:
        self._running: dict[ProgressWatch, None] = {}
        self._handle: asyncio.TimerHandle | None = None

    def add(self, watch: ProgressWatch) -> None:
        """Check ``watch`` until :meth:`remove`."""
        self._running[watch] = None
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(min(_SAMPLE, LATE_AFTER), self._check)

    def remove(self, watch: ProgressWatch) -> None:
        """Do not check ``watch`` any more; does nothing if it is not being checked."""
        self._running.pop(watch, None)

    def _check(self) -> None:
        self._handle = None
        wait = _SAMPLE
        for watch in list(self._running):
            if watch not in self._running:
                continue  # an earlier one's stall has ended it
            left = watch.check()
            if left > 0:
                wait = min(wait, left)
            else:
                self.remove(watch)
        if self._running:
            self._handle = asyncio.get_running_loop().call_later(wait, self._check)

    def close(self) -> None:
        """Cancel the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class ProgressWatch:
    """Watches one operation of a peer after the other, and notices when one makes no progress.

    Args:
        timer: checks the operation that is running.
        progress: returns a value that changes as long as bytes move; None: that cannot be measured.
        on_stall: called when it has not changed for :data:`LATE_AFTER` seconds.
    """

    def __init__(
        self, timer: StallTimer, progress: Callable[[], Hashable] | None, on_stall: Callable[[], None]
    ) -> None:
        self._timer = timer
        self._progress = progress
        self._on_stall = on_stall
        # (progress, when it last changed). Until the first check the progress counts as changing.
        self._moved: tuple[Hashable, float] = (None, 0.0)

    def start(self) -> None:
        """An operation has begun."""
        self._moved = None, time.monotonic()
        self._timer.add(self)

    def stop(self) -> None:
        """The operation has ended."""
        self._timer.remove(self)

    def idle_seconds(self) -> float:
        """Seconds without progress, as far as was checked."""
        moved, now = self._progress() if self._progress else None, time.monotonic()
        if moved != self._moved[0]:
            self._moved = moved, now
        return now - self._moved[1]

    def check(self) -> float:
        """Return how many seconds without progress are left; if none, report the stall."""
        left = LATE_AFTER - self.idle_seconds()
        if left <= 0:
            self._on_stall()
        return left


class FairLock:
    """A first-in, first-out lock.

    :meth:`release` hands the lock to the call that has waited longest. The lock is not free in between, so a
    later call cannot overtake an earlier one.
    """

    def __init__(self) -> None:
        # Whether a call holds the lock.
        self.locked = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def hold(self, deadline: Deadline | None = None) -> AsyncIterator[None]:
        """Hold the lock for the length of the body. Raises as :meth:`acquire`."""
        if not self.acquire_nowait():
            await self.acquire(deadline)
        try:
            yield
        finally:
            self.release()

    def acquire_nowait(self) -> bool:
        """Acquire the lock if it is free. Return whether it was acquired."""
        if self.locked:
            return False
        self.locked = True
        return True

    async def acquire(self, deadline: Deadline | None) -> None:
        """Wait for the lock and acquire it. Call this after :meth:`acquire_nowait` has returned False.

        Args:
            deadline: when to give up; None: wait without a limit, for a holder that is about to end.

        Raises:
            SyncTimeoutError: other calls held the lock until the deadline.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(deadline.remaining() if deadline is not None else None):
                await waiter
        except BaseException as exc:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the lock was handed over in the same turn in which this call was cancelled
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            if deadline is None or not isinstance(exc, TimeoutError):
                raise
            raise deadline.error("stage", hint="an earlier call was still copying") from None

    def release(self) -> None:
        """Hand the lock to the call that has waited longest, or free it if no call waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # a done one was cancelled, and its call has not run since
                waiter.set_result(None)
                return
        self.locked = False


def pauses(deadline: Deadline) -> Iterator[float]:
    """Yield increasing pauses between retries, in seconds, until the deadline."""
    pause = _FIRST_PAUSE
    while deadline.remaining():
        # Randomised, so that workers that lost the same peer at the same time do not all retry at once.
        yield min(pause * random.uniform(0.5, 1.5), deadline.remaining())
        pause = min(2 * pause, _LONGEST_PAUSE)
