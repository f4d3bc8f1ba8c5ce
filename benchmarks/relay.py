"""``aiosync bench --relay``: a trainer, two relays, eight workers; beside eight workers of the trainer's own.

Every link is held to the same rate, a network's: what is compared is then the way that the bytes take, and
not the cores of the one machine that all of them run on.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import aiosync
from benchmarks.links import hold_to, save
from benchmarks.meters import Spread, spread
from benchmarks.network import MIB, make_model

__all__ = ["run"]

SPAWN = multiprocessing.get_context("spawn")
TIMEOUT = 120.0
WORKERS, RELAYS, WARM_UP = 8, 2, 2


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured.

    Attributes:
        relays: between the trainer and the workers.
        send: from ``send`` to the new weights in service in all workers, in milliseconds.
        copies: bytes that the trainer sent, in model sizes.
    """

    relays: int
    mib: int
    mbit: float
    send: Spread
    copies: float


def serve_worker(address: str, mib: int, pipe: Connection[Any, Any]) -> None:
    """A worker, until its sender has gone."""
    torch.set_num_threads(1)

    async def main() -> None:
        scheme = aiosync.TCPWeightSyncScheme(address, timeout=TIMEOUT)
        scheme.init_on_receiver(model_id="policy", model=make_model(mib))
        async with scheme, scheme.receiving():
            pipe.send("here")
            await scheme.wait_closed()

    asyncio.run(main())


def serve_relay(upstream: str, mbit: float, pipe: Connection[Any, Any]) -> None:
    """A relay, until the trainer has gone."""
    torch.set_num_threads(1)

    async def main() -> None:
        above = aiosync.TCPWeightSyncScheme(upstream, timeout=TIMEOUT)
        below = aiosync.TCPWeightSyncScheme(timeout=TIMEOUT)
        node = aiosync.WeightRelay(above, below, model_id="policy")
        hold_to(mbit, below)
        pipe.send(node.address)
        async with node:
            await node.wait_closed()

    asyncio.run(main())


def _start(target: Any, *args: Any) -> tuple[Any, Connection[Any, Any]]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, there))
    process.start()
    there.close()
    return process, here


async def measure(relays: int, mib: int, mbit: float, rounds: int) -> Figures:
    """``rounds`` sends to eight workers, through relays or not."""
    scheme = aiosync.TCPWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(model_id="policy", model=make_model(mib))
    hold_to(mbit, scheme)
    nodes = [_start(serve_relay, scheme.address, mbit) for _ in range(relays)]
    addresses = [pipe.recv() for _, pipe in nodes] or [scheme.address]
    workers = [_start(serve_worker, addresses[n % len(addresses)], mib) for n in range(WORKERS)]
    await scheme.connect(min_workers=relays or WORKERS)
    for _, pipe in workers:
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    seconds: list[float] = []
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            seconds, before = [], scheme.stats.wire_nbytes
        begun = time.perf_counter()
        await scheme.send()
        seconds.append(time.perf_counter() - begun)
    copies = (scheme.stats.wire_nbytes - before) / rounds / (mib * MIB)
    await scheme.aclose()
    for process, _ in nodes + workers:
        process.join()
    taken = spread(seconds)
    assert taken is not None
    return Figures(relays, mib, mbit, taken, copies)


def run(mib: int, mbit: float, rounds: int, out: Path | None) -> None:
    """Measure, print a table, write JSON.

    Args:
        mib: size of the model in MiB.
        mbit: megabits per second of each link.
        rounds: timed sends of each.
        out: where the JSON goes.
    """
    rate = f"{mbit:g} Mbit/s" if mbit else "as fast as they go"
    table = Table(title=f"{mib} MiB to {WORKERS} workers, links {rate} (medians; least and most)")
    for column in ("way", "copies sent by the trainer", "send, ms", "added by the level"):
        table.add_column(column, justify="right")
    flat, tree = (asyncio.run(measure(relays, mib, mbit, rounds)) for relays in (0, RELAYS))
    added = tree.send.median / flat.send.median - 1
    for name, figures, more in ((f"1 - {WORKERS}", flat, ""), (f"1 - {RELAYS} - {WORKERS}", tree, added)):
        send = figures.send
        table.add_row(
            name,
            f"{figures.copies:.3f}",
            f"{send.median:.0f} ({send.min:.0f}-{send.max:.0f})",
            f"{more:.1%}" if more != "" else "",
        )
    Console().print(table)
    save(out, "relay", [asdict(flat), asdict(tree) | {"added": added}])
