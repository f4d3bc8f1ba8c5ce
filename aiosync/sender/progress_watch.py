"""Find out that a worker hangs while a version is on its way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from aiosync.transfer.base import OutboundTransfer

__all__ = ["LATE_AFTER", "ProgressWatch"]

LATE_AFTER = 2.0
"""Seconds without an answer and without a byte moved, after which a worker counts as unresponsive: the slots
that it holds then do not count towards ``max_slots``."""

SAMPLE = 0.5
"""Seconds between two checks of whether bytes move."""


class ProgressWatch:
    """Watches the transfer of one version after the other to a worker.

    Args:
        outbound: the transfer.
        on_stall: called when no byte has moved for a while and the worker has not answered.
    """

    def __init__(self, outbound: OutboundTransfer, on_stall: Callable[[], None]) -> None:
        self._outbound = outbound
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._running = False
        # (progress of the transfer, when it last changed)
        self._moved: tuple[Hashable, float] = (None, 0.0)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """A version was sent to the worker."""
        self._running = True
        self._moved = self._outbound.moved if self._outbound.carries else None, self._loop.time()
        if self._timer is None:
            # One timer serves many updates: making one costs as much as a tenth of a small send.
            self._timer = self._loop.call_later(min(SAMPLE, LATE_AFTER), self._check)

    def stop(self) -> None:
        """The worker has answered."""
        self._running = False

    def idle_seconds(self) -> float:
        """Seconds for which no byte has moved, as far as was checked."""
        moved, now = self._outbound.moved, self._loop.time()
        if moved != self._moved[0]:
            self._moved = moved, now
        return now - self._moved[1]

    def _check(self) -> None:
        self._timer = None
        if not self._running:
            return
        left = LATE_AFTER - self.idle_seconds()
        if left > 0:
            self._timer = self._loop.call_later(min(SAMPLE, left), self._check)
        else:
            self._on_stall()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
