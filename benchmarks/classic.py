"""What acts inside torchrl with our schemes in the place of its own, and with its own.

A turn is a process of its own, since torch.distributed and torch RPC can be left only at the end of one.
Turns of the two follow each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.classic_turns import CASES, Turn
from benchmarks.links import save
from benchmarks.meters import Spread, spread
from benchmarks.turns import in_a_process

__all__ = ["CASES", "run"]

_QUICK = "timeout:1 attempts:1"
"""Where nobody answers for names, torch.distributed is not to wait for that."""


@dataclass(frozen=True)
class Contender:
    """What the turns of one have found; frames per second, milliseconds of an update."""

    frames: Spread
    update: Spread
    wrong: int
    total: int


@dataclass(frozen=True)
class Figures:
    """One collector with one scheme."""

    collector: str
    scheme: str
    parameters: int
    aiosync: Contender
    torchrl: Contender


def run(
    kinds: Sequence[str], parameters: Sequence[int], turns: int, updates: int, frames: int, out: Path | None
) -> None:
    """Measure, print a table, write JSON.

    Args:
        kinds: of :data:`CASES`.
        parameters: sizes of the policy.
        turns: of each of the two, in turn.
        updates: in each turn.
        frames: per batch.
        out: where the JSON goes.
    """
    table = Table(
        title="torchrl's collectors with aiosync's schemes and with its own (medians; least and most)"
    )
    columns = "collector", "scheme", "parameters", "frames/s", "torchrl's", "ratio", "update, ms", "torchrl's"
    for column in (*columns, "times", "wrong", "torchrl's"):
        table.add_column(column, justify="right")
    found = []
    cases = [(kind, scheme, size) for kind in kinds for scheme in CASES[kind] for size in parameters]
    try:
        for kind, scheme, size in track(cases, description="collectors"):
            both: dict[str, list[Turn]] = {"aiosync": [], "torchrl": []}
            for _ in range(turns):
                for library, taken in both.items():
                    arguments = kind, scheme, library, size, updates, frames
                    turn = in_a_process("classic_turns", *arguments, RES_OPTIONS=_QUICK)
                    taken.append(Turn(**turn))
            figures = _figures(kind, scheme, size, both)
            found.append(asdict(figures))
            table.add_row(*_row(figures))
    finally:
        Console().print(table)
        save(out, "collectors", found)


def _figures(kind: str, scheme: str, size: int, both: dict[str, list[Turn]]) -> Figures:
    return Figures(kind, scheme, size, _sum_up(both["aiosync"]), _sum_up(both["torchrl"]))


def _sum_up(turns: Sequence[Turn]) -> Contender:
    frames = spread([turn.frames for turn in turns], scale=1)
    # One figure per turn: a slow turn is one of few, and not fifty slow updates.
    update = spread([statistics.median(turn.update) for turn in turns])
    assert frames is not None and update is not None
    return Contender(frames, update, sum(turn.wrong for turn in turns), sum(turn.total for turn in turns))


def _row(figures: Figures) -> list[str]:
    def shown(found: Spread) -> str:
        return f"{found.median:.3g} ({found.min:.3g}-{found.max:.3g})"

    ours, theirs = figures.aiosync, figures.torchrl
    return [
        figures.collector,
        figures.scheme,
        f"{figures.parameters / 1e6:.3g} M",
        shown(ours.frames),
        shown(theirs.frames),
        f"{ours.frames.median / theirs.frames.median:.2f}",
        shown(ours.update),
        shown(theirs.update),
        f"{theirs.update.median / ours.update.median:.1f}",
        f"{ours.wrong} of {ours.total}",
        f"{theirs.wrong} of {theirs.total}",
    ]
