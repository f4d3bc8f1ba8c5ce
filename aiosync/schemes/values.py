"""Checked values of schemes: a secret and a worker's index."""

from __future__ import annotations

from aiosync.errors import InvalidArgumentError

__all__ = ["Secret", "checked_index"]


class Secret(bytes):
    """Bytes that do not show themselves."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


def checked_index(worker_idx: int) -> int:
    """A worker's index as it was given.

    Raises:
        InvalidArgumentError: it is none.
    """
    if isinstance(worker_idx, bool) or not isinstance(worker_idx, int) or worker_idx < 0:
        raise InvalidArgumentError(f"worker_idx: expected an integer >= 0, got {worker_idx!r}")
    return worker_idx
