"""Lists of workers in messages: a thousand workers fit on a line."""

from __future__ import annotations

from collections.abc import Iterable


def listed(workers: Iterable[object]) -> str:
    """Return ``0-3, 7, 9`` for the ids 0, 1, 2, 3, 7 and 9, which are in order. Ids may be other objects."""
    runs: list[list[object]] = []
    for worker in workers:
        if runs and isinstance(worker, int) and isinstance(last := runs[-1][-1], int) and worker == last + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)
