"""Workers' answers that arrive before the event loop would look for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiosync._processors import processors

if TYPE_CHECKING:
    from aiosync.sender.pending_acks import PendingAcks
    from aiosync.sender.registry import WorkerRegistry

_POLLING = 0.0002
"""Most seconds that a call polls for answers, and keeps the event loop to itself."""

_MOST_MISSES = 6
"""After this many polls without the answers, one call in 64 polls."""


@dataclass(eq=False, repr=False)
class EarlyAnswers:
    """Reads the answers for a version that was just published, without the event loop.

    A worker that Linux runs on this processor has answered by the time that its notification is written. To
    wait until the event loop finds the answer takes a tenth of a small update's time. A worker on another
    processor answers some microseconds later, and it takes longer than that to wake a process that sleeps. So
    a call polls for a moment, if each worker can have a processor besides this one. After a poll without the
    answers the next call does not poll; after two in a row the next two calls, and so on.
    """

    _registry: WorkerRegistry
    _processors: int = field(default_factory=processors, init=False)
    # Polls in a row that did not get the answers, and how many calls will not poll.
    _misses: int = field(default=0, init=False)
    _pause: int = field(default=0, init=False)

    def take(self, acks: PendingAcks, *, may_poll: bool) -> None:
        """Settle ``acks`` with the answers that are there; if it ``may_poll``, with those that arrive within
        :data:`_POLLING` too."""
        if not acks.pending:
            return
        polls = may_poll and not self._pause and self._can_poll(acks)
        until = time.perf_counter() + _POLLING if polls else 0.0
        while not self._all_taken(acks):
            if time.perf_counter() >= until:
                self._pause = 2**self._misses if polls else max(0, self._pause - 1)
                self._misses = min(self._misses + polls, _MOST_MISSES)
                return
        self._misses = self._pause = 0

    def _can_poll(self, acks: PendingAcks) -> bool:
        if len(acks.pending) >= self._processors:
            return False
        found = [self._registry.connections.get(worker) for worker in acks.pending]
        return all(connection is not None and connection.transport.takes_arrived for connection in found)

    def _all_taken(self, acks: PendingAcks) -> bool:
        for worker in tuple(acks.pending):
            connection = self._registry.connections.get(worker)
            if connection is None or not connection.transport.take_arrived():
                break  # a worker that was notified later has hardly answered
        return not acks.pending
