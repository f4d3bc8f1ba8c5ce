"""A log that strangers can write to, limited to a few lines a second."""

from __future__ import annotations

import logging
import time

__all__ = ["LogLimit"]

_LINES = 5
_PERIOD = 10.0
"""Lines that are written in so many seconds."""


class LogLimit:
    """Writes warnings that peers cause, until there are too many; then it counts them.

    Args:
        logger: where to.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._since = -_PERIOD
        self._written = 0
        self._dropped = 0

    def warning(self, message: str, *args: object) -> None:
        """Write a line, or count it. The first line after a period says how many were left out."""
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
        """Write how many lines have been left out."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._logger.warning("%d more warnings of this kind were left out of the log", dropped)
