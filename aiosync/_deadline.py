"""One deadline, made once at the public call and handed down through every layer."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Iterator

import msgspec

from aiosync.errors import InvalidArgumentError, Phase, SyncTimeoutError

__all__ = ["DEFAULT_TIMEOUT", "Deadline", "DeadlineTimer", "default_timeout", "pauses"]

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0

DEFAULT_TIMEOUT = 120.0
"""Seconds that a call may take where neither the call, the scheme nor the environment says."""


def default_timeout() -> float:
    """Seconds from the environment's ``AIOSYNC_TIMEOUT``, else :data:`DEFAULT_TIMEOUT`.

    Raises:
        InvalidArgumentError: if ``AIOSYNC_TIMEOUT`` is not a positive number.
    """
    text = os.environ.get("AIOSYNC_TIMEOUT")
    if text is None:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    return check_timeout(seconds, f"AIOSYNC_TIMEOUT={text!r}")


def check_timeout(seconds: float, origin: str) -> float:
    """Return ``seconds`` if it is a positive, finite number, else raise InvalidArgumentError."""
    if not isinstance(seconds, int | float) or not (seconds > 0 and math.isfinite(seconds)):
        raise InvalidArgumentError(
            f"{origin}: expected a positive, finite number of seconds (no call may wait for ever)"
        )
    return seconds


class Deadline(msgspec.Struct, frozen=True):
    """A point in monotonic time, and how long it was away when it was set (both in seconds)."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline ``seconds`` from now; zero or less has already passed."""
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.at

    def error(self, phase: Phase, *, version: int | None = None, hint: str = "") -> SyncTimeoutError:
        """The error to raise when it has passed in ``phase``."""
        return SyncTimeoutError(phase, seconds=self.seconds, version=version, hint=hint)


class DeadlineTimer:
    """One timer of the event loop for all calls that wait with a deadline.

    A small update takes so little time that a timer of its own would be a tenth of it. Deadlines are seldom
    reached, and most calls have the same number of seconds: so the timer that was set for one call is left
    set when that call ends. When it fires it is set again for the earliest deadline that is waited for.

    It belongs to one event loop.
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], float] = {}
        self._handle: asyncio.TimerHandle | None = None
        self._at = math.inf

    async def wait(self, waiter: asyncio.Future[None], deadline: Deadline) -> None:
        """Wait until ``waiter`` is done, which it is made at the deadline."""
        self._waiters[waiter] = deadline.at
        try:
            if deadline.at < self._at:
                self._set(deadline.at)
            await waiter
        finally:
            del self._waiters[waiter]

    def close(self) -> None:
        """Cancel the timer, and end the calls that still wait."""
        self._cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at = None, math.inf

    def _set(self, at: float) -> None:
        # If anything raises here, a signal's handler say, the next call finds no timer and sets one.
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


def pauses(deadline: Deadline) -> Iterator[float]:
    """Seconds to wait between attempts at what may fail for a while, growing, until the deadline."""
    pause = _FIRST_PAUSE
    while not deadline.expired:
        # At random, so that those who lost the same peer together do not all come back at once.
        yield min(pause * random.uniform(0.5, 1.5), deadline.remaining())
        pause = min(2 * pause, _LONGEST_PAUSE)
