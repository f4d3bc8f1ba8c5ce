"""aiosync's collectors beside torchrl's: frames per second, updates, the time to the first batch, memory.

A turn is a process of its own, with processes of workers; turns of the two follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.collecting_turns import ENVS, Turn
from benchmarks.links import save
from benchmarks.meters import Spread, spread
from benchmarks.turns import in_a_process

__all__ = ["ENVS", "MODES", "run"]

MODES = ("sync", "async")
LIBRARIES = ("aiosync", "torchrl")


@dataclass(frozen=True)
class _Measure:
    """One column.

    Attributes:
        name: with its unit.
        of: what a turn says.
        scale: from that to the unit.
        target: what the ratio has to be at least.
        less: less is better.
    """

    name: str
    of: Callable[[Turn], float]
    scale: float
    target: float
    less: bool

    def ratio(self, ours: Spread, theirs: Spread) -> float:
        """How much better ours is."""
        return theirs.median / ours.median if self.less else ours.median / theirs.median


_MEASURES = (
    _Measure("frames/s", lambda turn: turn.frames, 1, 1.5, less=False),
    _Measure("update, ms", lambda turn: turn.update, 1e3, 3.0, less=True),
    _Measure("first batch, s", lambda turn: turn.first, 1, 1 / 0.7, less=True),
    _Measure("memory, MiB", lambda turn: turn.memory, 1 / (1 << 20), 1.0, less=True),
)


def run(
    envs: Sequence[str], modes: Sequence[str], turns: int, frames: int, per_batch: int, out: Path | None
) -> int:
    """Measure, print a table, write JSON; returns how many targets were missed.

    Args:
        envs: of :data:`ENVS`.
        modes: of :data:`MODES`.
        turns: of each of the two, in turn.
        frames: in each turn, after a warm-up.
        per_batch: frames.
        out: where the JSON goes.
    """
    table = Table(title="aiosync's collectors and torchrl's (medians; least and most), 2 workers")
    for column in ("environment", "mode", "", "aiosync", "torchrl", "times better", "wanted"):
        table.add_column(column, justify="right")
    found, missed = [], 0
    try:
        for env, mode in track([(e, m) for e in envs for m in modes], description="collecting"):
            taken: dict[str, list[Turn]] = {library: [] for library in LIBRARIES}
            for _ in range(turns):
                for library in LIBRARIES:
                    arguments = library, mode, env, per_batch, frames
                    taken[library].append(Turn(**in_a_process("collecting_turns", *arguments)))
            for measure in _MEASURES:
                row, ok = _row(measure, taken)
                table.add_row(env, mode, *row)
                missed += not ok
            wrong = {library: _wrong(each) for library, each in taken.items()}
            table.add_row(
                env, mode, "wrong frames", wrong["aiosync"], wrong["torchrl"], "", "0", end_section=True
            )
            missed += any(turn.wrong for turn in taken["aiosync"])
            found.append({"env": env, "mode": mode, **{k: [asdict(t) for t in v] for k, v in taken.items()}})
    finally:
        Console().print(table)
        save(out, "collecting", found)
    return missed


def _row(measure: _Measure, taken: dict[str, list[Turn]]) -> tuple[list[str], bool]:
    spreads = {}
    for library, turns in taken.items():
        found = spread([measure.of(turn) for turn in turns], scale=measure.scale)
        assert found is not None
        spreads[library] = found
    ratio = measure.ratio(spreads["aiosync"], spreads["torchrl"])
    ok = ratio >= measure.target
    shown = f"{ratio:.2f}" if ok else f"[red]{ratio:.2f}[/red]"
    texts = [f"{s.median:.4g} ({s.min:.4g}-{s.max:.4g})" for s in spreads.values()]
    return [measure.name, *texts, shown, f"{measure.target:.2f}"], ok


def _wrong(turns: Sequence[Turn]) -> str:
    return f"{sum(turn.wrong for turn in turns)} of {sum(turn.total for turn in turns)}"
