"""Checked values of schemes: a secret and a worker's index."""

from __future__ import annotations

from aiosync.errors import InvalidArgumentError

__all__ = ["Secret", "checked_index"]


class Secret(bytes):
    """Bytes with a repr that does not show them."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


def checked_index(worker_idx: int) -> int:
    """Return ``worker_idx`` if it is a valid index.

    Raises:
        InvalidArgumentError: it is not an integer >= 0.
    """
    if isinstance(worker_idx, bool) or not isinstance(worker_idx, int) or worker_idx < 0:
        raise InvalidArgumentError(f"worker_idx: expected an integer >= 0, got {worker_idx!r}")
    return worker_idx
