"""Which version changed each entry last."""

from __future__ import annotations

__all__ = ["ChangeLog"]


class ChangeLog:
    """Records the changed entries of each version, for workers that skip versions.

    A worker keeps its values of entries that are not sent. So an update for a worker that has skipped partial
    updates has the entries of all of them, and no others.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._whole = -1
        # For each version that may still be withdrawn: its number, and what _whole and _last had before.
        self._undo: list[tuple[int, int, dict[str, int]]] = []

    def add(self, version: int, names: tuple[str, ...] | None) -> None:
        """Record that ``version`` changes these entries; None: all."""
        self._undo.append((version, self._whole, {name: self._last.get(name, -1) for name in names or ()}))
        if names is None:
            self._whole = version
        else:
            self._last.update(dict.fromkeys(names, version))

    def withdraw(self, version: int) -> None:
        """Remove the newest version, which no worker has. Its number will be used again."""
        while self._undo and self._undo[-1][0] >= version:
            _, self._whole, before = self._undo.pop()
            self._last.update(before)

    def keep(self, version: int) -> None:
        """Forget how to withdraw this version and the ones before it."""
        self._undo = [each for each in self._undo if each[0] > version]

    def since(self, have: int) -> list[str] | None:
        """Return the entries that have changed since the version ``have``; None: all, or unknown."""
        if have < 0 or self._whole > have:
            return None
        return sorted(name for name, version in self._last.items() if version > have) or None
