"""Which version changed each entry last."""

from __future__ import annotations

__all__ = ["ChangeLog"]


class ChangeLog:
    """What changed from version to version, for workers that skip some.

    A worker keeps its own values of what was not sent. So an update for a worker that has skipped partial
    updates is about the entries of all of them, and no others.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._whole = -1
        # For each version that may still be withdrawn: its number, and what _whole and _last had before.
        self._undo: list[tuple[int, int, dict[str, int]]] = []

    def add(self, version: int, names: tuple[str, ...] | None) -> None:
        """``version`` is about these entries; None: all."""
        self._undo.append((version, self._whole, {name: self._last.get(name, -1) for name in names or ()}))
        if names is None:
            self._whole = version
        else:
            self._last.update(dict.fromkeys(names, version))

    def withdraw(self, version: int) -> None:
        """No worker has this version, the newest, and its number will be another's."""
        while self._undo and self._undo[-1][0] >= version:
            _, self._whole, before = self._undo.pop()
            self._last.update(before)

    def keep(self, version: int) -> None:
        """Neither this version nor one before it will be withdrawn."""
        self._undo = [each for each in self._undo if each[0] > version]

    def since(self, have: int) -> list[str] | None:
        """The entries that have changed since the version ``have``; None: all, or it is not known."""
        if have < 0 or self._whole > have:
            return None
        return sorted(name for name, version in self._last.items() if version > have) or None
