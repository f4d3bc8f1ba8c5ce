"""How fast a worker reads."""

from __future__ import annotations

import time

_TURN = 0.01  # seconds that the bytes of one read may take at the limit
_LEAST, _MOST = 1 << 14, 1 << 20  # bytes of one read


class Pace:
    """Keeps a thread from reading more than ``rate`` bytes per second: it says when to rest, and how long.

    Attributes:
        most: the bytes that one read may take.
    """

    def __init__(self, rate: float) -> None:
        self.most = int(min(max(rate * _TURN, _LEAST), _MOST))
        self._rate = rate
        self._free_at = 0.0  # when the bytes so far may have taken their time, on the monotonic clock

    def rest_after(self, count: int) -> float:
        """Return how many seconds to rest after a read of ``count`` bytes; 0: read on."""
        now, seconds = time.monotonic(), count / self._rate
        self._free_at = max(self._free_at, now - seconds) + seconds
        rest = self._free_at - now
        return rest if rest >= _TURN / 2 else 0.0  # a loop's timers are no finer than a millisecond
