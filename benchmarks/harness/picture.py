"""The sends as grouped bars on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders import ABOUT, LIMIT
from benchmarks.harness.results import Case, Key, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

COLOURS = {
    "aiosync": "#0072b2",
    "torchrl": "#d55e00",
    "torchrl-alias": "#e6b88a",
    LIMIT: "#7f7f7f",
}
LABELS = {
    "torchrl": "torchrl (trainer's memory copied)",
    "torchrl-alias": "torchrl (trainer's memory aliased, nothing copied)",
    LIMIT: "one warm memcpy (the limit)",
}
PANELS = {
    ("shared", "plain"): "SharedMemWeightSyncScheme",
    ("process", "plain"): "MultiProcessWeightSyncScheme, the same tensors each time",
    ("process", "fresh"): "MultiProcessWeightSyncScheme, fresh tensors each time",
}


def draw(results: Results, path: Path) -> None:
    """Write a picture of every send that was measured.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.figure import Figure

    taken = {(k.scheme, k.mode) for k in results.keys()}
    panels = [panel for panel in PANELS if panel in taken]
    if not panels:
        return
    figure = Figure(figsize=(12, 1.2 + 3.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)
    for (scheme, mode), ax in zip(panels, axes[:, 0], strict=True):
        keys = [k for k in results.keys() if (k.scheme, k.mode) == (scheme, mode)]
        _draw_panel(ax, results, keys)
        ax.set_title(PANELS[scheme, mode], loc="left", fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(_caption(results), fontsize=8, color="#555555")
    figure.savefig(path, dpi=130)


def _draw_panel(ax: Axes, results: Results, keys: list[Key]) -> None:
    contenders = [n for n in (*ABOUT, LIMIT) if any(results.find(k, n) for k in keys)]
    width = 0.8 / len(contenders)
    for place, name in enumerate(contenders):
        cases = [(i, c) for i, k in enumerate(keys) if (c := results.find(k, name)) is not None]
        measured = [(i, c.send) for i, c in cases if c.send is not None]
        offset = (place - (len(contenders) - 1) / 2) * width
        at = [i + offset for i, _ in measured]
        heights = [s.median for _, s in measured]
        below = [s.median - s.min for _, s in measured]
        above = [s.max - s.median for _, s in measured]
        bars = ax.bar(
            at, heights, width * 0.92, yerr=[below, above], capsize=2,
            color=COLOURS[name], label=LABELS.get(name, name), error_kw={"lw": 0.8},
        )  # fmt: skip
        ax.bar_label(bars, [_short(h) for h in heights], fontsize=6.5, padding=2)
        _mark_failures(ax, [(i + offset, c) for i, c in cases if c.send is None])
    ax.set_yscale("log")
    ax.set_ylabel("send to last ack, ms\n(median, min to max)")
    ax.set_xticks(range(len(keys)), [_tick(results, k) for k in keys], fontsize=8)
    ax.grid(axis="y", which="major", alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _mark_failures(ax: Axes, failed: list[tuple[float, Case]]) -> None:
    for x, case in failed:
        ax.annotate(
            case.status, (x, 0.02), xycoords=("data", "axes fraction"), rotation=90,
            ha="center", va="bottom", fontsize=7, color=COLOURS[case.contender],
        )  # fmt: skip


def _tick(results: Results, key: Key) -> str:
    params = results.models[key.model]["params"]
    size = f"{params / 1e6:.0f} M" if params >= 1e6 else f"{params / 1e3:.0f} k"
    return f"{size}\n{key.workers} worker{'s' if key.workers > 1 else ''}"


def _short(ms: float) -> str:
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def _caption(results: Results) -> str:
    m = results.machine
    return (
        f"{m['cores']} cores, torch {m['torch']}, torchrl {m['torchrl']}, "
        f"{'uvloop' if results.settings['uvloop'] else 'asyncio'}; contenders in turn in one run; "
        "less is better"
    )
