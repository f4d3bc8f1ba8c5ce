"""Workers of a relay whose connection broke and that may still act on an older version."""

from __future__ import annotations

import asyncio
import time

from aiosync._deadline import Deadline

__all__ = ["AwayWorkers"]

_MOMENT = 2.0
"""Seconds that a worker whose connection broke has to come back before the trainer learns of its absence."""


class AwayWorkers:
    """Workers that have lost their relay without a goodbye, and may still act on what they have.

    Args:
        patience: seconds after which a worker that has not come back has given its relay up.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # Worker -> when its connection broke, in monotonic seconds.
        self._since: dict[int, float] = {}
        self._returned = asyncio.Event()

    def add(self, worker: int) -> None:
        """The connection of this worker broke."""
        self._since[worker] = time.monotonic()

    def remove(self, worker: int) -> bool:
        """The worker that had this index is connected again. Return whether it was away."""
        self._returned.set()
        return self._since.pop(worker, None) is not None

    def now(self) -> list[int]:
        """The indices of the workers that are away."""
        now = time.monotonic()
        self._since = {w: since for w, since in self._since.items() if since + self._patience > now}
        return sorted(self._since)

    async def one_returns(self, deadline: Deadline) -> bool:
        """Wait for a worker that left a moment ago to come back, as most do. Return whether one has."""
        left = [self._since[worker] + _MOMENT - time.monotonic() for worker in self.now()]
        seconds = min(max(left, default=0.0), deadline.remaining())
        if seconds <= 0:
            return False
        self._returned.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._returned.wait()
        except TimeoutError:
            return False
        return True
