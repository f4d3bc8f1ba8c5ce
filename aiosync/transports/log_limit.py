"""A limit on warnings that unauthenticated peers can cause."""

from __future__ import annotations

import logging
import time

_LINES = 5  # most lines that are written per period
_PERIOD = 10.0  # length of the period in seconds


class LogLimit:
    """Logs warnings, at most :data:`_LINES` per :data:`_PERIOD` seconds, and counts the others."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since = -_PERIOD
        self._written = 0
        self._dropped = 0

    def warning(self, message: str, *args: object) -> None:
        """Log a warning, or count it. A new period begins with the number of omitted lines."""
        now = time.monotonic()
        if now - self._since >= _PERIOD:
            self.flush()
            self._since, self._written = now, 0
        if self._written < _LINES:
            self._written += 1
            self._logger.warning(message, *args)
        else:
            self._dropped += 1

    def flush(self) -> None:
        """Log how many lines were omitted."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._logger.warning("%d more warnings of this kind were left out of the log", dropped)
