"""The sends as grouped bars on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.contenders import ABOUT, LIMIT
from benchmarks.harness.results import Key, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"aiosync": "#0072b2", "torchrl": "#d55e00", "torchrl-alias": "#e6b88a", LIMIT: "#7f7f7f"}
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
    """Write a picture of every send that was measured."""
    keys = {panel: [k for k in results.keys() if (k.scheme, k.mode) == panel] for panel in PANELS}
    panels = [panel for panel in PANELS if keys[panel]]
    if not panels:
        return
    figure = Figure(figsize=(12, 1.2 + 3.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)
    for panel, ax in zip(panels, axes[:, 0], strict=True):
        _draw_panel(ax, results, keys[panel])
        ax.set_title(PANELS[panel], loc="left", fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    machine, loop = results.machine, "uvloop" if results.settings["uvloop"] else "asyncio"
    caption = (
        f"{machine['cores']} cores, torch {machine['torch']}, torchrl {machine['torchrl']}, {loop}; "
        "contenders in turn in one run; less is better"
    )
    figure.supxlabel(caption, fontsize=8, color="#555555")
    figure.savefig(path, dpi=130)


def _draw_panel(ax: Axes, results: Results, keys: list[Key]) -> None:
    contenders = [n for n in (*ABOUT, LIMIT) if any(results.find(k, n) for k in keys)]
    width = 0.8 / len(contenders)
    for place, name in enumerate(contenders):
        offset = (place - (len(contenders) - 1) / 2) * width
        cases = [(at + offset, case) for at, key in enumerate(keys) if (case := results.find(key, name))]
        sends = [(at, case.send) for at, case in cases if case.send]
        heights = [send.median for _, send in sends]
        errors = [[s.median - s.min for _, s in sends], [s.max - s.median for _, s in sends]]
        bars = ax.bar(
            [at for at, _ in sends], heights, width * 0.92, yerr=errors, capsize=2,
            color=COLOURS[name], label=LABELS.get(name, name), error_kw={"lw": 0.8},
        )  # fmt: skip
        ax.bar_label(bars, [f"{h:.3g}" if h < 1000 else f"{h:.0f}" for h in heights], fontsize=6.5, padding=2)
        for at, case in cases:
            if case.send is None:
                ax.annotate(
                    case.status, (at, 0.02), xycoords=("data", "axes fraction"), rotation=90,
                    ha="center", va="bottom", fontsize=7, color=COLOURS[name],
                )  # fmt: skip
    ax.set_yscale("log")
    ax.set_ylabel("send to last ack, ms\n(median, min to max)")
    ax.set_xticks(range(len(keys)), [_tick(results, k) for k in keys], fontsize=8)
    ax.grid(axis="y", which="major", alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _tick(results: Results, key: Key) -> str:
    params = results.models[key.model]["params"]
    size = f"{params / 1e6:.0f} M" if params >= 1e6 else f"{params / 1e3:.0f} k"
    return f"{size}\n{key.workers} worker{'s' if key.workers > 1 else ''}"
