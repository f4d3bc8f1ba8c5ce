"""``aiosync bench --distributed``: DistributedWeightSyncScheme beside torchrl's and beside bare gloo.

All in one run and in turn. Bare gloo is one send and one receive of one tensor of the model's size, out of a
ready buffer into a warm one, and a byte back. torchrl's scheme is used as its documentation says, in its
synchronous mode; it sends tensor by tensor over the default process group, which nothing else here uses. All
times are until the new weights are in the workers' models.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

import aiosync
from benchmarks.links import save
from benchmarks.meters import Spread, spread, ticking
from benchmarks.models import MODELS, build_model, fill

__all__ = ["run"]

SPAWN = multiprocessing.get_context("spawn")
WARM_UP = 2
STALL_ROUNDS = 5
LIMIT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; times in milliseconds.

    Attributes:
        aiosync, torchrl: a send to all workers.
        gloo: the same bytes to one receiver.
        sender_stall, worker_stall: how late a 1 ms ticker beside aiosync's sends was.
    """

    model: str
    workers: int
    parameters: int
    aiosync: Spread
    torchrl: Spread
    gloo: Spread
    sender_stall: Spread
    worker_stall: Spread


# -- the other processes ---------------------------------------------------------------------------


def aiosync_worker(
    scheme: aiosync.DistributedWeightSyncScheme, index: int, model: str, pipe: Connection[Any, Any]
) -> None:
    """A receiver beside a ticker; sends its stalls when the sender has gone."""
    torch.set_num_threads(1)

    async def main() -> None:
        scheme.init_on_receiver(model_id="policy", model=build_model(MODELS[model]), worker_idx=index)
        async with scheme, scheme.receiving():
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            async with ticking() as late:
                await scheme.wait_closed()
        pipe.send(late)

    asyncio.run(main())


def torchrl_worker(scheme: Any, port: int, rank: int, size: int, model: str, rounds: int) -> None:
    """torchrl's receiver, for so many updates after the first."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    context = SimpleNamespace(policy=build_model(MODELS[model]))
    scheme.init_on_receiver(model_id="policy", context=context, worker_idx=rank)
    scheme.connect(worker_idx=rank)
    for _ in range(rounds):
        scheme.receive()
    dist.barrier()


def gloo_receiver(port: int, nbytes: int, rounds: int) -> None:
    """One tensor, and a byte back, so many times."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group: Any = dist.ProcessGroupGloo(PrefixStore("bare", store), 1, 2, LIMIT)
    buffer, byte = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for _ in range(rounds):
        group.recv([buffer], 0, 1).wait()
        group.send([byte], 0, 2).wait()


# -- here ------------------------------------------------------------------------------------------


def _torchrl_sender(model: nn.Module, workers: int, store: Any) -> Any:
    # It registers its backends on import, and is optional.
    library: Any = importlib.import_module("torchrl.weight_update")
    scheme = library.DistributedWeightSyncScheme(backend="gloo", sync=True)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=workers)
    return scheme


async def measure(name: str, workers: int, rounds: int) -> Figures:
    """All three in turn, again and again; then sends beside tickers."""
    model = build_model(MODELS[name])
    nbytes = sum(p.nbytes for p in model.parameters())
    total = WARM_UP + rounds
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # torchrl's workers, and the default process group that they need
    theirs = _torchrl_sender(model, workers, store)
    others = [
        SPAWN.Process(target=torchrl_worker, args=(theirs, store.port, rank, workers + 1, name, total))
        for rank in range(1, workers + 1)
    ]
    others.append(SPAWN.Process(target=gloo_receiver, args=(store.port, nbytes, total)))
    for process in others:
        process.start()
    dist.init_process_group("gloo", store=store.clone(), rank=0, world_size=workers + 1)
    theirs.connect()
    bare: Any = dist.ProcessGroupGloo(PrefixStore("bare", store.clone()), 0, 2, LIMIT)
    ready, byte = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    ours = aiosync.DistributedWeightSyncScheme(timeout=120)
    ours.init_on_sender(model_id="policy", model=model, num_workers=workers)
    pipes, processes = [], []
    for index in range(workers):
        here, there = SPAWN.Pipe()
        pipes.append(here)
        processes.append(SPAWN.Process(target=aiosync_worker, args=(ours, index, name, there)))
        processes[-1].start()
    await ours.connect()
    times: dict[str, list[float]] = {"aiosync": [], "torchrl": [], "gloo": []}
    for version in range(total):
        fill(model, float(version))
        begun = time.perf_counter()
        await ours.send()
        times["aiosync"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        theirs.send()
        times["torchrl"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        bare.send([ready], 1, 1).wait()
        bare.recv([byte], 1, 2).wait()
        times["gloo"].append(time.perf_counter() - begun)
    dist.barrier()
    for process in others:
        process.join()
    for pipe in pipes:
        pipe.send("now")
    stalls: list[float] = []
    for _ in range(STALL_ROUNDS):
        async with ticking() as late:
            await ours.send()
        stalls += late
    await ours.aclose()
    workers_late = [tick for pipe in pipes for tick in pipe.recv()]
    for process in processes:
        process.join()
    dist.destroy_process_group()
    found = {contender: _of(samples[WARM_UP:]) for contender, samples in times.items()}
    return Figures(
        name, workers, nbytes // 4, **found, sender_stall=_of(stalls), worker_stall=_of(workers_late)
    )


def _of(samples: list[float]) -> Spread:
    found = spread(samples)
    assert found is not None
    return found


def run(models: list[str], workers: list[int], rounds: int, out: Path | None) -> None:
    """Measure, print a table, write JSON.

    Args:
        models: names of :data:`~benchmarks.models.MODELS`.
        workers: how many workers, each.
        rounds: timed sends of each contender; 0: as suits the model.
        out: where the JSON goes.
    """
    table = Table(
        title="DistributedWeightSyncScheme beside torchrl's and one bare gloo send (medians; least and most)"
    )
    for column in (
        "model",
        "workers",
        "aiosync, ms",
        "torchrl, ms",
        "times",
        "gloo, ms",
        "of gloo",
        "stall p99, ms",
    ):
        table.add_column(column, justify="right")
    found = []
    for name in models:
        for count in workers:
            figures = asyncio.run(measure(name, count, rounds or MODELS[name].rounds))
            found.append(asdict(figures))
            ours, theirs, bare = figures.aiosync, figures.torchrl, figures.gloo
            table.add_row(
                f"{name}, {figures.parameters / 1e6:.3g} M",
                str(count),
                *(f"{x.median:.3g} ({x.min:.3g}-{x.max:.3g})" for x in (ours, theirs)),
                f"{theirs.median / ours.median:.1f}",
                f"{bare.median:.3g} ({bare.min:.3g}-{bare.max:.3g})",
                f"{bare.median / ours.median:.2f}",
                f"{figures.sender_stall.p99:.1f} / {figures.worker_stall.p99:.1f}",
            )
    Console().print(table)
    save(out, "distributed", found)
