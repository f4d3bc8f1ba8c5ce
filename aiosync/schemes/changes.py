"""Which entries each of the last versions was about."""

from __future__ import annotations

__all__ = ["ChangeLog"]

_KEPT = 64
"""Versions. A worker that is further behind gets all entries."""


class ChangeLog:
    """What changed from version to version, for workers that skip some.

    A worker keeps its own values of what was not sent. So an update for a worker that has skipped partial
    updates is about the entries of all of them, and no others.
    """

    def __init__(self) -> None:
        self._names: dict[int, frozenset[str] | None] = {}
        self._forgotten = -1

    def add(self, version: int, names: tuple[str, ...] | None) -> None:
        """``version`` is about these entries; None: all."""
        # A version that all workers refused is taken back, and its number is used again.
        self._names.pop(version, None)
        self._names[version] = None if names is None else frozenset(names)
        if len(self._names) > _KEPT:
            self._forgotten = next(iter(self._names))
            del self._names[self._forgotten]

    def between(self, have: int, version: int) -> list[str] | None:
        """The entries that differ between two versions; None: all, or it is not known."""
        if self._names.get(version) is None or have <= self._forgotten or have < 0:
            return None
        found: set[str] = set()
        for known, names in self._names.items():
            if have < known <= version:
                if names is None:
                    return None
                found |= names
        return sorted(found) if found else None
