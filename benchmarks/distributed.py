"""``aiosync bench --distributed``: aiosync's schemes over torch.distributed and torch RPC, beside torchrl's.

All in one run and in turn, and bare gloo too: one send and one receive of one tensor of the model's size,
out of a ready buffer into a warm one, and a byte back. torchrl's schemes are used as its collectors use
them; they send tensor by tensor over the default process group, which nothing else here uses. All times
are until the new weights are in the workers' models.

aiosync's workers view the sender's slots, as they do on one machine; with ``--apart`` they are sent
everything through process groups, as between machines. With ``--acting`` workers do what workers do: they
roll a small policy out, as fast as they can, on their event loop or, torchrl's, in their main thread. Whose
turn it is not is stopped meanwhile (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import rpc

import aiosync
from benchmarks.links import save
from benchmarks.meters import Spread, spread, ticking
from benchmarks.models import MODELS, build_model, fill

__all__ = ["KINDS", "run"]

KINDS = ("distributed", "rpc")

SPAWN = multiprocessing.get_context("spawn")
WARM_UP = 2
STALL_SECONDS = 3.0
"""For so long sends follow each other beside tickers: a percentile takes many ticks."""

LIMIT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes of one measurement know.

    Attributes:
        kind: of :data:`KINDS`.
        model: name of one of :data:`~benchmarks.models.MODELS`.
        workers: how many, of aiosync and of torchrl each.
        rounds: timed sends of each contender.
        acting: whether workers roll out meanwhile.
        apart: whether aiosync sends, instead of sharing memory.
        port: of the store that they meet in.
    """

    kind: str
    model: str
    workers: int
    rounds: int
    acting: bool
    apart: bool
    port: int = 0

    @property
    def total(self) -> int:
        """Sends of each contender."""
        return WARM_UP + self.rounds

    def store(self) -> Any:
        """A connection to the store."""
        return TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def join_rpc(self, name: str, rank: int) -> None:
        """Take part in torch RPC, if that is what is measured."""
        if self.kind == "rpc":
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{self.port}")
            size = 1 + 2 * self.workers
            rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)

    def join_default_group(self, rank: int) -> None:
        """Take part in the default process group, which is torchrl's."""
        dist.init_process_group("gloo", store=self.store(), rank=rank, world_size=self.workers + 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; times in milliseconds.

    Attributes:
        aiosync, torchrl: a send to all workers.
        gloo: the same bytes to one receiver.
        sender_stall, worker_stall: how late a 1 ms ticker beside aiosync's sends was.
    """

    kind: str
    model: str
    workers: int
    parameters: int
    aiosync: Spread
    torchrl: Spread
    gloo: Spread
    sender_stall: Spread
    worker_stall: Spread


class Holder:
    """What has the policy, and on the sender the workers, in torchrl's words: a collector."""

    def __init__(self, model: str) -> None:
        self.policy = build_model(MODELS[model])
        self.scheme: Any = None

    def register(self, worker_idx: int) -> None:
        """Be a receiver of torchrl's RPC scheme."""
        self.scheme = importlib.import_module("torchrl.weight_update").RPCWeightSyncScheme()
        self.scheme.init_on_receiver(model_id="policy", context=self, worker_idx=worker_idx)
        self.scheme.connect(worker_idx=worker_idx)

    def _receive_weights_scheme(self) -> None:
        self.scheme.receive()


# -- the other processes ---------------------------------------------------------------------------


def aiosync_worker(job: Job, scheme: Any, index: int, pipe: Connection[Any, Any]) -> None:
    """A receiver beside a ticker; sends its stalls when the sender has gone."""
    torch.set_num_threads(1)
    job.join_rpc(f"ours{index}", 1 + index)
    if scheme is None:
        scheme = aiosync.RPCWeightSyncScheme(timeout=120)

    async def main() -> None:
        scheme.init_on_receiver(model_id="policy", model=build_model(MODELS[job.model]), worker_idx=index)
        async with scheme, scheme.receiving():
            rolling_out = asyncio.create_task(roll_out()) if job.acting else None
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            async with ticking() as late:
                await scheme.wait_closed()
            if rolling_out is not None:
                rolling_out.cancel()
        pipe.send(late)

    asyncio.run(main())
    pipe.recv()
    _leave_rpc()


def steps() -> Iterator[None]:
    """Steps of a small policy."""
    policy, state = torch.ones(64, 64), torch.zeros(1, 64)
    while True:
        state = torch.tanh(state @ policy)
        yield


async def roll_out() -> None:
    """Act on the event loop."""
    for _ in steps():
        await asyncio.sleep(0)


def torchrl_worker(job: Job, scheme: Any, index: int, pipe: Connection[Any, Any]) -> None:
    """torchrl's receiver: a thread of its own applies updates, or the sender's calls do."""
    torch.set_num_threads(1)
    job.join_rpc(f"theirs{index}", 1 + job.workers + index)
    job.join_default_group(1 + index)
    if scheme is not None:
        holder = Holder(job.model)
        scheme.init_on_receiver(model_id="policy", context=holder, worker_idx=1 + index)
        scheme.connect(worker_idx=1 + index)
    if job.acting:
        for _ in steps():
            if pipe.poll():
                break
    pipe.recv()
    _leave_rpc()
    os._exit(0)  # its thread cannot be told to end while it waits in the store


def _leave_rpc() -> None:
    if rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        rpc.shutdown(graceful=False)


def gloo_receiver(job: Job, nbytes: int) -> None:
    """One tensor, and a byte back, so many times."""
    group: Any = dist.ProcessGroupGloo(PrefixStore("bare", job.store()), 1, 2, LIMIT)
    buffer, byte = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for _ in range(job.total):
        group.recv([buffer], 0, 1).wait()
        group.send([byte], 0, 2).wait()


# -- the sender's process --------------------------------------------------------------------------


def conduct(job: Job, result: Connection[Any, Any]) -> None:
    """Measure, in a process of its own: there is one default process group in each, and one world of RPC."""
    result.send(asyncio.run(measure(job)))


async def measure(job: Job) -> Figures:
    """All three in turn, again and again; then sends beside tickers."""
    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    job = replace(job, port=server.port)
    holder = Holder(job.model)
    nbytes = sum(p.nbytes for p in holder.policy.parameters())
    options: Any = {"timeout": 120, "share_memory": not job.apart}
    ours: Any
    if job.kind == "distributed":
        theirs = _torchrl_sender(holder.policy, job)
        ours = aiosync.DistributedWeightSyncScheme(**options)
        ours.init_on_sender(model_id="policy", model=holder.policy, num_workers=job.workers)
    else:
        theirs, ours = None, None  # who takes part in RPC has to be there first
    processes, pipes = [], []
    for target, scheme in ((aiosync_worker, ours), (torchrl_worker, theirs)):
        for index in range(job.workers):
            here, there = SPAWN.Pipe()
            pipes.append(here)
            processes.append(SPAWN.Process(target=target, args=(job, scheme, index, there)))
    processes.append(SPAWN.Process(target=gloo_receiver, args=(job, nbytes)))
    for process in processes:
        process.start()
    job.join_rpc("trainer", 0)
    job.join_default_group(0)
    if job.kind == "rpc":
        theirs = _torchrl_rpc_sender(holder, job)
        ours = aiosync.RPCWeightSyncScheme(**options)
        ours.init_on_sender(model_id="policy", model=holder.policy, num_workers=job.workers)
    theirs.connect()
    await ours.connect()
    turns = processes[: job.workers], processes[job.workers : -1]
    times = await _race(job, holder.policy, ours, theirs, nbytes, turns)
    sender_late, worker_late = await _stalls(ours, pipes[: job.workers])
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    _leave_rpc()
    found = {contender: _of(samples[WARM_UP:]) for contender, samples in times.items()}
    stalls = {"sender_stall": _of(sender_late), "worker_stall": _of(worker_late)}
    return Figures(job.kind, job.model, job.workers, nbytes // 4, **found, **stalls)


@contextlib.contextmanager
def _turn(job: Job, others: Sequence[Any]) -> Iterator[None]:
    """Others do not take processor time."""
    stopped = others if job.acting else ()
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)


async def _race(
    job: Job, model: nn.Module, ours: Any, theirs: Any, nbytes: int, turns: tuple[list[Any], list[Any]]
) -> dict[str, list[float]]:
    bare: Any = dist.ProcessGroupGloo(PrefixStore("bare", job.store()), 0, 2, LIMIT)
    ready, byte = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    times: dict[str, list[float]] = {"aiosync": [], "torchrl": [], "gloo": []}
    our_workers, their_workers = turns
    for version in range(job.total):
        fill(model, float(version))
        with _turn(job, their_workers):
            begun = time.perf_counter()
            await ours.send()
            times["aiosync"].append(time.perf_counter() - begun)
        with _turn(job, our_workers):
            begun = time.perf_counter()
            theirs.send(weights=model)
            times["torchrl"].append(time.perf_counter() - begun)
        with _turn(job, our_workers + their_workers):
            begun = time.perf_counter()
            bare.send([ready], 1, 1).wait()
            bare.recv([byte], 1, 2).wait()
            times["gloo"].append(time.perf_counter() - begun)
    return times


async def _stalls(ours: Any, pipes: list[Connection[Any, Any]]) -> tuple[list[float], list[float]]:
    """How late tickers were on the sender's loop and on the workers'; the scheme is closed."""
    for pipe in pipes:
        pipe.send("now")
    until = time.perf_counter() + STALL_SECONDS
    async with ticking() as stalls:
        while time.perf_counter() < until:
            await ours.send()
    await ours.aclose()
    return stalls, [tick for pipe in pipes for tick in pipe.recv()]


def _torchrl_sender(model: nn.Module, job: Job) -> Any:
    # It registers its backends on import, and is optional.
    library: Any = importlib.import_module("torchrl.weight_update")
    scheme = library.DistributedWeightSyncScheme(backend="gloo", sync=True)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=job.workers)
    return scheme


def _torchrl_rpc_sender(holder: Any, job: Job) -> Any:
    library: Any = importlib.import_module("torchrl.weight_update")
    holder.collector_class = Holder
    holder.collector_infos = [rpc.get_worker_info(f"theirs{w}") for w in range(job.workers)]
    holder.collector_rrefs = [rpc.remote(info, Holder, args=(job.model,)) for info in holder.collector_infos]
    for index, rref in enumerate(holder.collector_rrefs):
        rref.rpc_sync().register(1 + index)
    scheme = library.RPCWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", context=holder, num_workers=job.workers)
    return scheme


def _of(samples: list[float]) -> Spread:
    found = spread(samples)
    assert found is not None
    return found


def run(
    kinds: Sequence[str],
    models: Sequence[str],
    workers: list[int],
    rounds: int,
    out: Path | None,
    *,
    acting: bool,
    apart: bool,
) -> None:
    """Measure, print a table, write JSON.

    Args:
        kinds: of :data:`KINDS`.
        models: names of :data:`~benchmarks.models.MODELS`.
        workers: how many workers, each.
        rounds: timed sends of each contender; 0: as suits the model.
        out: where the JSON goes.
        acting: whether workers roll out meanwhile.
        apart: whether aiosync sends, instead of sharing memory.
    """
    how = (", workers act" if acting else ", workers are idle") + (", as if apart" if apart else "")
    table = Table(title="aiosync beside torchrl and one bare gloo send (medians; least and most)" + how)
    columns = "scheme", "model", "workers", "aiosync, ms", "torchrl, ms", "times", "gloo, ms", "of gloo"
    for column in (*columns, "stall p99, ms"):
        table.add_column(column, justify="right")
    found = []
    for kind, name, count in itertools.product(kinds, models, workers):
        job = Job(kind, name, count, rounds or MODELS[name].rounds, acting, apart)
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=conduct, args=(job, there))
        process.start()
        there.close()
        figures: Figures = here.recv()
        process.join()
        found.append(asdict(figures))
        ours, theirs, bare = figures.aiosync, figures.torchrl, figures.gloo
        table.add_row(
            job.kind,
            f"{job.model}, {figures.parameters / 1e6:.3g} M",
            str(job.workers),
            *(f"{x.median:.3g} ({x.min:.3g}-{x.max:.3g})" for x in (ours, theirs)),
            f"{theirs.median / ours.median:.1f}",
            f"{bare.median:.3g} ({bare.min:.3g}-{bare.max:.3g})",
            f"{bare.median / ours.median:.2f}",
            f"{figures.sender_stall.p99:.1f} / {figures.worker_stall.p99:.1f}",
        )
    Console().print(table)
    save(out, "distributed", found)
