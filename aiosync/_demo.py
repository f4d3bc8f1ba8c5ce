"""Helpers of the demo: membership in torch RPC or Ray, progress bar, table and picture."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tensordict import TensorDictBase
from torch.distributed import rpc

from aiosync import RayWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme
from aiosync._extras import how_to_install
from aiosync.errors import AiosyncError, NotInitializedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECENT_EPISODES = 20
_RPC_ADDRESS = "AIOSYNC_DEMO_RPC"


# ---- membership in torch RPC and Ray ------------------------------------------------------------


@contextlib.contextmanager
def member_of(scheme: WeightSyncScheme, rank: int) -> Iterator[None]:
    """Join torch RPC or start Ray for the duration of the context, if the scheme needs it.

    Rank 0 starts the cluster. A process of a Ray actor is connected to Ray already.
    """
    if not isinstance(scheme, RPCWeightSyncScheme):
        starts = isinstance(scheme, RayWeightSyncScheme) and rank == 0
        with ray_cluster() if starts else contextlib.nullcontext():
            yield
        return
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ[_RPC_ADDRESS] = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    # With torch's default a thread of each process polls shared memory without a pause.
    options = rpc.TensorPipeRpcBackendOptions(init_method=os.environ[_RPC_ADDRESS], _transports=["uv"])
    rpc.init_rpc(f"worker{rank - 1}" if rank else "trainer", rank=rank, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


@contextlib.contextmanager
def ray_cluster(store: int = 256 << 20) -> Iterator[None]:
    """Start Ray on this machine, with an object store of this size in bytes.

    Its actors can import the modules that this process can import.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise NotInitializedError(f"Ray is not installed: {how_to_install('ray')}") from None
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def joined(make: Callable[[], Any], scheme: WeightSyncScheme, worker: int) -> Any:
    """Call :func:`member_of`, then make a worker's environment. When it closes, the membership ends."""
    membership = contextlib.ExitStack()
    membership.enter_context(member_of(scheme, 1 + worker))
    env = make()
    membership.callback(env.close)
    env.close = membership.close
    return env


# ---- the event loop's stalls ---------------------------------------------------------------------


class LoopTicker:
    """Wakes up on the running loop every ``interval`` seconds; ``late`` has each delay in seconds."""

    def __init__(self, interval: float = 0.005) -> None:
        self.interval = interval
        self.late: list[float] = []

    def __enter__(self) -> LoopTicker:
        self._task = asyncio.create_task(self._tick())
        return self

    def __exit__(self, *exc: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.interval
            await asyncio.sleep(self.interval)
            self.late.append(max(0.0, loop.time() - due))


# ---- the report ----------------------------------------------------------------------------------


_Points: TypeAlias = list[tuple[float, float]]
"""One line of a panel: (seconds since the start of the training, value)."""


def _columns(points: _Points) -> Any:
    """Convert points to the arguments of ``plot``: their times, and their values."""
    return np.array(points).reshape(-1, 2).T


class DemoReport:
    """Shows a progress bar during the training, and a table and a picture at its end, also after Ctrl-C.

    At the exit of the context, Ctrl-C (exit status 130) and a lost worker (exit status 1) become one printed
    line each. Other errors propagate.
    """

    def __init__(self, title: str, workers: int, max_updates: int, max_seconds: float, out: Path) -> None:
        self.title = title
        self.out = out
        # Mean return of the newest evaluation.
        self.evaluated = 0.0
        # Imported here and not at the top, because workers import this module and draw nothing. Not at the
        # end, so that a missing matplotlib is reported before the training.
        self._figure: type[Figure] = importlib.import_module("matplotlib.figure").Figure
        self._max_updates = max_updates
        self._max_seconds = max_seconds
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f} updates"),
            TextColumn("return {task.fields[ret]:5.1f}"),
            TextColumn("version {task.fields[version]}"),
            TextColumn("lag {task.fields[lag]:.1f}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("starting workers", total=None, ret=0.0, version=0, lag=0.0)
        self._ticker = LoopTicker()
        self._began: float | None = None
        self._seconds = 0.0
        self._steps = 0
        self._sends: list[float] = []
        self._lags: list[float] = []
        # Trajectory -> its return so far.
        self._scores: dict[int, float] = {}
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._training: _Points = []
        self._evaluations: _Points = []
        self._trainer: _Points = []
        self._version: list[_Points] = [[] for _ in range(workers)]
        self._lag: list[_Points] = [[] for _ in range(workers)]

    def __enter__(self) -> DemoReport:
        self._progress.start()
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        self._progress.stop()
        if self._sends:
            self._console.print(self._table())
            self._picture().savefig(self.out, dpi=130)
            self._console.print(f"The picture is in {self.out}")
        if isinstance(exc, KeyboardInterrupt):
            self._console.print("Stopped by Ctrl-C.")
            raise SystemExit(130) from None
        if isinstance(exc, AiosyncError | ConnectionError | EOFError):
            reason = exc if isinstance(exc, AiosyncError) else "a worker hung up"
            self._console.print(f"Stopped: {reason}", style="red", markup=False)
            raise SystemExit(1) from None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Time the training and watch its event loop. Enter when the workers are connected."""
        self._began = time.monotonic()
        self._console.print(f"{len(self._lag)} workers connected; training.")
        self._progress.update(self._bar, description=self.title, total=self._max_updates)
        with self._ticker:
            try:
                yield
            finally:
                self._seconds = self._now()

    def _now(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def time_left(self) -> bool:
        """Return whether the limits of updates and of seconds are not reached yet."""
        return len(self._sends) < self._max_updates and self._now() < self._max_seconds

    def batch(self, batch: TensorDictBase, version: int) -> None:
        """Record a batch of shape ``(envs, steps)`` that the trainer received while it was at ``version``."""
        now = self._now()
        ids, live = batch["collector", "traj_ids"], batch["collector", "mask"]
        acted = batch["policy_version"]
        lag = float((version - acted).float().mean())
        # Worker i numbers its trajectories i, i + workers, i + 2 * workers, ...
        worker = int(ids[0, 0]) % len(self._lag)
        self._steps += int(live.sum())
        self._lags.append(lag)
        self._lag[worker].append((now, lag))
        self._version[worker].append((now, float(acted.max())))
        rewards, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1) & live
        for number in ids.unique().tolist():
            mine = (ids == number) & live
            self._scores[number] = self._scores.get(number, 0.0) + float(rewards[mine].sum())
            if done[mine].any():
                self._recent.append(self._scores.pop(number))
                self._training.append((now, float(np.mean(self._recent))))

    def update(self, version: int, send_seconds: float) -> None:
        """Record an update that all workers have applied, and the duration of its ``send`` in seconds."""
        self._sends.append(send_seconds)
        self._trainer.append((self._now(), float(version)))
        self._progress.update(
            self._bar,
            completed=len(self._sends),
            ret=self._training[-1][1] if self._training else 0.0,
            version=version,
            lag=float(np.mean(self._lags[-2 * len(self._lag) :])),
        )

    def evaluation(self, mean_return: float) -> None:
        """Record an evaluation."""
        self.evaluated = mean_return
        self._evaluations.append((self._now(), mean_return))

    def _table(self) -> Table:
        send_p50, send_p99 = np.percentile(self._sends, [50, 99]) * 1e3
        late = np.array(self._ticker.late or [0.0]) * 1e3
        table = Table(title=self.title, show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        evaluated = f"{self.evaluated:.1f}" if self._evaluations else "none yet"
        rows = {
            "updates": f"{len(self._sends)}",
            "environment steps": f"{self._steps:,}",
            "training time": f"{self._seconds:.1f} s",
            "mean return, last evaluation": evaluated,
            "send, p50": f"{send_p50:.2f} ms",
            "send, p99": f"{send_p99:.2f} ms",
            "lag, mean": f"{np.mean(self._lags):.2f} versions",
            "event loop stall, p99": f"{np.percentile(late, 99):.2f} ms",
            "event loop stall, longest": f"{late.max():.2f} ms",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def _picture(self) -> Figure:
        figure = self._figure(figsize=(9, 9), layout="constrained")
        learning, versions, lag = figure.subplots(3, 1, sharex=True)
        learning.plot(*_columns(self._training), label=f"training, last {RECENT_EPISODES} episodes")
        learning.plot(*_columns(self._evaluations), "o-", color="C2", label="evaluation")
        learning.axhline(475, color="0.4", ls="--", lw=0.9, label="solved (475)")
        learning.set(title="Learning curve", ylabel="return")
        learning.set_ylim(0, 520)
        for worker, points in enumerate(self._version):
            versions.step(*_columns(points), where="post", label=f"worker {worker}")
        versions.step(*_columns(self._trainer), where="post", color="0.4", ls=":", label="trainer")
        versions.set(title="Version that acts in each worker", ylabel="version")
        for worker, points in enumerate(self._lag):
            lag.plot(*_columns(points), ".-", ms=4, lw=0.7, label=f"worker {worker}")
        lag.set(
            title="Lag: versions between acting and learning (mean over a rollout)",
            xlabel="seconds of training",
            ylabel="versions",
        )
        lag.set_ylim(bottom=0)
        for axes in (learning, versions, lag):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, loc="best")
        figure.suptitle(self.title, fontsize="x-large")
        return figure
