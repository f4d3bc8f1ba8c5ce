"""What the demo needs and its reader does not: worker processes, progress bar, table, picture."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed import rpc

from aiosync import RayWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme
from aiosync.errors import AiosyncError, NotInitializedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DemoReport", "LoopTicker", "member_of", "ray_cluster", "worker_processes"]

JOIN_SECONDS = 10.0
RECENT_EPISODES = 20
_RPC_ADDRESS = "AIOSYNC_DEMO_RPC"


# ---- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def ignoring_ctrl_c() -> Iterator[None]:
    """Ignore SIGINT inside; a process started inside ignores it from its first instruction on.

    A terminal sends Ctrl-C to the trainer and to its children. Only the trainer should act on it,
    and a child that is still importing could not even catch it.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def member_of(scheme: WeightSyncScheme, rank: int) -> Iterator[None]:
    """Take part in torch RPC or Ray inside, if that is what the scheme needs; rank 0 begins it. (Who is in
    one of Ray's actors takes part in that already.)"""
    if isinstance(scheme, RayWeightSyncScheme) and rank == 0:
        with ray_cluster():
            yield
        return
    if not isinstance(scheme, RPCWeightSyncScheme):
        yield
        return
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ[_RPC_ADDRESS] = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=os.environ[_RPC_ADDRESS])
    rpc.init_rpc(f"worker{rank - 1}" if rank else "trainer", rank=rank, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


@contextlib.contextmanager
def ray_cluster(store: int = 256 << 20) -> Iterator[None]:
    """Ray on this machine, whose actors find what this process has imported.

    Args:
        store: bytes of its object store.

    Raises:
        NotInitializedError: Ray is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise NotInitializedError("Ray is not installed: pip install 'aiosync[ray]'") from None
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


class _Host:
    """A Ray actor in the place of a process."""

    def run(self, target: Callable[..., None], args: tuple[object, ...], address: str, key: bytes) -> None:
        """``target(*args, pipe)``."""
        with Client(address, "AF_UNIX", key) as pipe:
            target(*args, pipe)


class _ActorProcess:
    """What :func:`worker_processes` knows of a process, said of an actor."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...]) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._handle = self._ray.remote(num_cpus=0)(_Host).remote()
        address, key = f"\0aiosync-demo-{secrets.token_hex(8)}", secrets.token_bytes(32)
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            coming = Thread(target=self._accept, args=(listener,), daemon=True)
            coming.start()
            self._running = self._handle.run.remote(target, args, address, key)
            while coming.is_alive() and self.is_alive():
                coming.join(0.1)
        if not self.is_alive():
            self._ray.get(self._running)  # raises what kept it from beginning

    def _accept(self, listener: Listener) -> None:
        with contextlib.suppress(OSError):
            self.pipe = listener.accept()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has run to its end."""
        self._ray.wait([self._running], timeout=timeout)

    def is_alive(self) -> bool:
        """Whether it has not."""
        return not self._ray.wait([self._running], timeout=0)[0]

    def kill(self) -> None:
        """Have Ray end it."""
        self._ray.kill(self._handle)

    close = kill


@contextlib.asynccontextmanager
async def worker_processes(
    ctx: multiprocessing.context.SpawnContext,
    target: Callable[..., None],
    count: int,
    scheme: WeightSyncScheme,
    *args: object,
) -> AsyncIterator[list[Connection]]:
    """Run ``target(scheme, *args, worker, pipe)`` in ``count`` processes (Ray's actors, if the scheme is for
    those); yields our ends of the pipes.

    Each pipe starts with one message in it, the leave to play one rollout ahead. At the end the
    pipes are closed, which tells the workers to end, and the processes are waited for.
    """
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for worker in range(count):
            if isinstance(scheme, RayWeightSyncScheme):
                started = partial(_ActorProcess, target, (scheme, *args, worker))
                actor = await anyio.to_thread.run_sync(started)
                processes.append(actor)
                pipes.append(actor.pipe)
                continue
            ours, theirs = ctx.Pipe()
            pipes.append(ours)
            process = ctx.Process(target=target, args=(scheme, *args, worker, theirs), daemon=True)
            with ignoring_ctrl_c():
                process.start()
            processes.append(process)
            theirs.close()
        for pipe in pipes:
            pipe.send("play one ahead")
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        # Shielded, or a second Ctrl-C would leave the processes behind; bounded by JOIN_SECONDS.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_end, processes)


def _end(processes: list[Any]) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


# ---- the event loop's stalls ---------------------------------------------------------------------


class LoopTicker:
    """Asks the running loop for a call every ``interval`` seconds; records how late each comes."""

    def __init__(self, interval: float = 0.005) -> None:
        self.interval = interval
        self.late: list[float] = []
        """Seconds that each tick came after its time."""
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopTicker:
        self._arm()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self.interval
        self._handle = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.late.append(max(0.0, asyncio.get_running_loop().time() - self._due))
        self._arm()


# ---- the report ----------------------------------------------------------------------------------


@dataclass
class _Series:
    """One line of a panel: times in seconds since the training began, and values."""

    at: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.value.append(value)


class DemoReport:
    """A progress bar while it runs; a table and a picture at the end, also after Ctrl-C.

    Leaving the context turns Ctrl-C (exit status 130) and a lost worker (exit status 1) into one
    line each; every other error passes.
    """

    def __init__(self, title: str, workers: int, max_updates: int, max_seconds: float, out: Path) -> None:
        self.title = title
        self.out = out
        self.evaluated = 0.0
        """The mean return of the newest evaluation."""
        # Not at the top: workers import this module too and draw nothing. Not at the end: a missing
        # matplotlib is better known before the training than after it.
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
        self._bar: TaskID | None = None
        self._ticker = LoopTicker()
        self._began: float | None = None
        self._seconds = 0.0
        self._steps = 0
        self._sends: list[float] = []
        self._lags: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._training, self._evaluations, self._trainer = _Series(), _Series(), _Series()
        self._version = [_Series() for _ in range(workers)]
        self._lag = [_Series() for _ in range(workers)]

    def __enter__(self) -> DemoReport:
        self._progress.start()
        self._bar = self._progress.add_task("starting workers", total=None, ret=0.0, version=0, lag=0.0)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        """The training proper: its clock, and the watch over its event loop."""
        self._began = time.monotonic()
        self._console.print(f"{len(self._lag)} workers connected; training.")
        if self._bar is not None:
            self._progress.update(self._bar, description=self.title, total=self._max_updates)
        with self._ticker:
            try:
                yield
            finally:
                self._seconds = self._now()

    def _now(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def time_left(self) -> bool:
        """Whether neither the updates nor the minutes are used up."""
        return len(self._sends) < self._max_updates and self._now() < self._max_seconds

    def rollout(self, worker: int, rollout: Mapping[str, NDArray[Any]], version: int) -> None:
        """Note a rollout of ``worker`` that the trainer, at ``version``, has just taken."""
        now = self._now()
        lag = version - rollout["version"]
        self._steps += int(rollout["live"].sum())
        self._lags.append(float(lag.mean()))
        self._lag[worker].add(now, float(lag.mean()))
        self._version[worker].add(now, float(rollout["version"].max()))
        for episode in rollout["score"][rollout["done"]]:
            self._recent.append(float(episode))
            self._training.add(now, float(np.mean(self._recent)))

    def update(self, version: int, send_seconds: float) -> None:
        """Note an update that all workers now have, and what its ``send`` took."""
        self._sends.append(send_seconds)
        self._trainer.add(self._now(), float(version))
        if self._bar is not None:
            self._progress.update(
                self._bar,
                completed=len(self._sends),
                ret=self._training.value[-1] if self._training.value else 0.0,
                version=version,
                lag=float(np.mean(self._lags[-2 * len(self._lag) :])),
            )

    def evaluation(self, mean_return: float) -> None:
        """Note an evaluation."""
        self.evaluated = mean_return
        self._evaluations.add(self._now(), mean_return)

    def _table(self) -> Table:
        send_p50, send_p99 = np.percentile(self._sends, [50, 99]) * 1e3
        late = np.array(self._ticker.late or [0.0]) * 1e3
        table = Table(title=self.title, show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_row("updates", f"{len(self._sends)}")
        table.add_row("environment steps", f"{self._steps:,}")
        table.add_row("training time", f"{self._seconds:.1f} s")
        evaluated = f"{self.evaluated:.1f}" if self._evaluations.value else "none yet"
        table.add_row("mean return, last evaluation", evaluated)
        table.add_row("send, p50", f"{send_p50:.2f} ms")
        table.add_row("send, p99", f"{send_p99:.2f} ms")
        table.add_row("lag, mean", f"{np.mean(self._lags):.2f} versions")
        table.add_row("event loop stall, p99", f"{np.percentile(late, 99):.2f} ms")
        table.add_row("event loop stall, longest", f"{late.max():.2f} ms")
        return table

    def _picture(self) -> Figure:
        figure = self._figure(figsize=(9, 9), layout="constrained")
        learning, versions, lag = figure.subplots(3, 1, sharex=True)
        self._draw_learning(learning)
        for worker, series in enumerate(self._version):
            versions.step(series.at, series.value, where="post", label=f"worker {worker}")
        trainer = self._trainer
        versions.step(trainer.at, trainer.value, where="post", color="0.4", ls=":", label="trainer")
        versions.set(title="Version that acts in each worker", ylabel="version")
        for worker, series in enumerate(self._lag):
            lag.plot(series.at, series.value, ".-", ms=4, lw=0.7, label=f"worker {worker}")
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

    def _draw_learning(self, axes: Axes) -> None:
        training, tests = self._training, self._evaluations
        axes.plot(training.at, training.value, label=f"training, last {RECENT_EPISODES} episodes")
        axes.plot(tests.at, tests.value, "o-", color="C2", label="evaluation")
        axes.axhline(475, color="0.4", ls="--", lw=0.9, label="solved (475)")
        axes.set(title="Learning curve", ylabel="return")
        axes.set_ylim(0, 520)
