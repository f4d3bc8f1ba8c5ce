"""The sends as grouped bars on a logarithmic scale."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from benchmarks.contenders import ABOUT, LIMIT
from benchmarks.harness.results import Key, Results, shown

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
    figure = Figure(figsize=(12, 1.2 + 3.6 * len(panels)), layout="constrained")
    legend: dict[str, Any] = {}
    for panel, ax in zip(panels, figure.subplots(len(panels), 1, squeeze=False)[:, 0], strict=True):
        _draw_panel(ax, results, keys[panel])
        ax.set_title(PANELS[panel], loc="left", fontsize=11)
        handles, labels = ax.get_legend_handles_labels()
        legend.update(zip(labels, handles, strict=True))
    figure.legend([*legend.values()], [*legend], loc="outside upper center", ncols=4, frameon=False)
    machine, loop = results.machine, "uvloop" if results.settings["uvloop"] else "asyncio"
    caption = f"{machine['cores']} cores, torch {machine['torch']}, torchrl {machine['torchrl']}, {loop}"
    caption += "; contenders in turn in one run; less is better"
    figure.supxlabel(caption, fontsize=8, color="#555555")
    figure.savefig(path, dpi=130)


def _draw_panel(ax: Axes, results: Results, keys: list[Key]) -> None:
    contenders = [n for n in (*ABOUT, LIMIT) if any(results.find(k, n) for k in keys)]
    width = 0.8 / len(contenders)
    for (group, key), (place, name) in product(enumerate(keys), enumerate(contenders)):
        at = group + (place - (len(contenders) - 1) / 2) * width
        case = results.find(key, name)
        if case and (send := case.send):
            error = [[send.median - send.min], [send.max - send.median]]
            bar = ax.bar(
                at, send.median, width * 0.92, yerr=error, capsize=2, color=COLOURS[name],
                label=LABELS.get(name, name), error_kw={"lw": 0.8},
            )  # fmt: skip
            ax.bar_label(bar, [shown(send.median)], fontsize=6.5, padding=2)
        elif case:
            ax.annotate(
                case.status, (at, 0.02), xycoords=("data", "axes fraction"), rotation=90,
                ha="center", va="bottom", fontsize=7, color=COLOURS[name],
            )  # fmt: skip
    params = [results.models[key.model]["params"] for key in keys]
    sizes = [f"{n / 1e6:.0f} M" if n >= 1e6 else f"{n / 1e3:.0f} k" for n in params]
    ticks = [f"{size}\n{key.count}" for size, key in zip(sizes, keys, strict=True)]
    ax.set(yscale="log", ylabel="send to last ack, ms\n(median, min to max)", axisbelow=True)
    ax.set_xticks(range(len(keys)), ticks, fontsize=8)
    ax.grid(axis="y", which="major", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
