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
        # The version that was added last, and what it replaced.
        self._newest = -1
        self._before: dict[str, int] = {}
        self._whole_before = -1

    def add(self, version: int, names: tuple[str, ...] | None) -> None:
        """``version`` is about these entries; None: all."""
        self._newest, self._whole_before = version, self._whole
        self._before = {name: self._last.get(name, -1) for name in names or ()}
        if names is None:
            self._whole = version
        else:
            self._last.update(dict.fromkeys(names, version))

    def withdraw(self, version: int) -> None:
        """No worker has this version, and its number will be another's. Only the newest can be withdrawn."""
        if version == self._newest:
            self._whole = self._whole_before
            self._last.update(self._before)
            self._newest = -1

    def since(self, have: int) -> list[str] | None:
        """The entries that have changed since the version ``have``; None: all, or it is not known."""
        if have < 0 or self._whole > have:
            return None
        return sorted(name for name, version in self._last.items() if version > have) or None
