"""Which worker an index belongs to: each has a secret ticket from its welcome."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Tickets"]

_SIZE = 16

_RESERVED = 2.0
"""Seconds for which an index is kept for a worker whose connection broke."""


class Tickets:
    """The tickets of the workers that are connected, or whose connection broke a moment ago.

    A peer that knows the scheme's token but not the ticket cannot take such an index.
    """

    def __init__(self) -> None:
        # Of each index the tickets that its worker may have: the one that it showed last, and the one
        # that was issued since. The connection may break before the worker has read its welcome.
        self._tickets: dict[int, list[bytes]] = {}
        # Those whose connection broke -> until when their index is reserved, in monotonic seconds.
        self._until: dict[int, float] = {}

    def issue(self, worker: int) -> bytes:
        """A new ticket for the worker that has this index from now on."""
        self._until.pop(worker, None)
        ticket = os.urandom(_SIZE)
        self._tickets[worker] = [*self._tickets.get(worker, []), ticket]
        return ticket

    def leave(self, worker: int, *, reserve: bool) -> None:
        """The worker's connection has ended; ``reserve``: it may come back."""
        if reserve:
            self._until[worker] = time.monotonic() + _RESERVED
        else:
            self._tickets.pop(worker, None)

    def may_take(self, worker: int, claims: Callable[[bytes], bool]) -> bool:
        """Whether a peer may take this index: it is free, or ``claims()`` is true for one of its tickets."""
        self._expire()
        pending = self._tickets.get(worker)
        if pending is None:
            return True
        shown = [ticket for ticket in pending if claims(ticket)]
        if shown:
            self._tickets[worker] = shown
        return bool(shown)

    def taken(self) -> set[int]:
        """The indices that need a ticket."""
        self._expire()
        return set(self._tickets)

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker, until in self._until.items() if until <= now]:
            del self._until[worker]
            self._tickets.pop(worker, None)
