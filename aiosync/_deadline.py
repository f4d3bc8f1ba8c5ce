"""One deadline, made once at the public call and handed down through every layer."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator

import msgspec

from aiosync.errors import InvalidArgumentError, Phase, SyncTimeoutError

__all__ = ["DEFAULT_TIMEOUT", "Deadline", "default_timeout", "pauses"]

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


def pauses(deadline: Deadline) -> Iterator[float]:
    """Seconds to wait between attempts at what may fail for a while, growing, until the deadline."""
    pause = _FIRST_PAUSE
    while not deadline.expired:
        # At random, so that those who lost the same peer together do not all come back at once.
        yield min(pause * random.uniform(0.5, 1.5), deadline.remaining())
        pause = min(2 * pause, _LONGEST_PAUSE)
