"""torchrl's own collectors with our schemes in the place of its own, and with its own.

A turn is a process of its own, since torch.distributed and torch RPC can be left only at the end of one: it
makes a collector, warms it up, collects and updates, and checks that each frame was acted by the version that
it claims. Turns of the two follow each other.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from aiosync._demo import ray_cluster
from benchmarks.links import save
from benchmarks.meters import Spread, spread

__all__ = ["CASES", "run"]

CASES = {
    "sync": ("shared", "process", "tcp"),
    "async": ("shared", "process", "tcp"),
    "distributed": ("distributed",),
    "rpc": ("rpc",),
    "ray": ("ray",),
}
"""Collector -> schemes. What torchrl has no scheme for is measured beside its queues."""

_CLASSES = {
    "shared": "SharedMem",
    "process": "MultiProcess",
    "tcp": "TCP",
    "distributed": "Distributed",
    "rpc": "RPC",
    "ray": "Ray",
}
_WARM_UP = 5


class _Policy(nn.Module):
    """A small policy that says which version acts, and carries as many parameters as asked for."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        share = max(1, parameters // 50)
        self.ballast = nn.ParameterList(torch.zeros(share) for _ in range(50 if parameters else 0))
        self.last = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """The action; and the first and the last parameter, before and after."""
        first = self.first.detach().clone()
        action = self.net(observation).argmax(-1)
        marks = torch.stack([first, self.last.detach().clone()])
        return action, marks.expand(*observation.shape[:-1], 2).clone()


def _make_env() -> Any:
    envs: Any = importlib.import_module("torchrl.envs")
    return envs.GymEnv("CartPole-v1", categorical_action_encoding=True)


def _make_policy(parameters: int) -> Any:
    modules: Any = importlib.import_module("tensordict.nn")
    return modules.TensorDictModule(
        _Policy(parameters), in_keys=["observation"], out_keys=["action", "marks"]
    )


@dataclass(frozen=True)
class Turn:
    """What one process found.

    Attributes:
        frames: per second, updates included.
        update: seconds of each update.
        wrong: frames whose weights were not those of the version that they claim, of ``total``.
        total: frames.
    """

    frames: float
    update: list[float]
    wrong: int
    total: int


def _take_turn(kind: str, scheme: str, library: str, parameters: int, updates: int, frames: int) -> Turn:
    warnings.simplefilter("ignore")
    peers: Any = importlib.import_module("torchrl.weight_update")
    ours: Any = importlib.import_module("aiosync.sync")
    name = f"{_CLASSES[scheme]}WeightSyncScheme"
    made = getattr(ours if library == "aiosync" else peers, name, peers.MultiProcessWeightSyncScheme)()
    policy = _make_policy(parameters)
    with ray_cluster(store=2 << 30) if kind == "ray" else nullcontext():
        collector = _collector(kind, policy, made, updates, frames)
        wrong = total = 0
        seconds: list[float] = []
        started = 0.0
        for number, batch in enumerate(collector, start=1):
            marks, claimed = batch["marks"], batch["next", "policy_version"]
            wrong += int((marks != claimed[..., None]).any(-1).sum())
            total += claimed.numel()
            with torch.no_grad():
                policy.module.first.fill_(number)
                policy.module.last.fill_(number)
            before = time.perf_counter()
            collector.update_policy_weights_()
            seconds.append(time.perf_counter() - before)
            if number == _WARM_UP:
                started, total, wrong = time.perf_counter(), 0, 0
            if number == _WARM_UP + updates:
                break
        taken = time.perf_counter() - started
        collector.shutdown()
    return Turn(total / taken, seconds[_WARM_UP:], wrong, total)


def _collector(kind: str, policy: Any, scheme: Any, updates: int, frames: int) -> Any:
    collectors: Any = importlib.import_module("torchrl.collectors")
    common = {
        "frames_per_batch": frames,
        "total_frames": frames * (updates + _WARM_UP + 1),
        "weight_sync_schemes": {"policy": scheme},
    }
    if kind in ("sync", "async"):
        make = collectors.MultiSyncCollector if kind == "sync" else collectors.MultiAsyncCollector
        return make([_make_env] * 2, policy, track_policy_version=True, **common)
    far: Any = importlib.import_module("torchrl.collectors.distributed")
    common |= {
        "collector_class": collectors.Collector,
        "sync": False,
        "collector_kwargs": {"track_policy_version": True},
    }
    if kind == "ray":
        remote = {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}
        return far.RayCollector([_make_env] * 2, policy, remote_configs=remote, **common)
    if kind == "rpc":
        return far.RPCCollector([_make_env] * 2, policy, launcher="mp", **common)
    return far.DistributedCollector([_make_env] * 2, policy, launcher="mp", backend="gloo", **common)


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
                    taken.append(_in_a_process(kind, scheme, library, size, updates, frames))
            figures = _figures(kind, scheme, size, both)
            found.append(asdict(figures))
            table.add_row(*_row(figures))
    finally:
        Console().print(table)
        save(out, "collectors", found)


def _in_a_process(*arguments: object) -> Turn:
    command = [sys.executable, "-m", "benchmarks.classic", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return Turn(**json.loads(lines[-1]))


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


if __name__ == "__main__":
    _kind, _scheme, _library, *_numbers = sys.argv[1:]
    _turn = partial(_take_turn, _kind, _scheme, _library)
    sys.stdout.write(f"\n{json.dumps(asdict(_turn(*map(int, _numbers))))}\n")
    sys.stdout.flush()
    os._exit(0)  # torchrl's threads and processes of torch.distributed would hold it up
