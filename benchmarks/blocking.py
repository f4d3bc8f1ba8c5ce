"""What a blocking call costs beside the coroutine that it runs: both in one process and in turn."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console
from rich.table import Table

import aiosync
from aiosync import sync
from aiosync.sync._portal import portal
from benchmarks.links import save
from benchmarks.meters import Spread, spread

__all__ = ["run"]

_BLOCK = 50


async def _nothing() -> None:
    return


async def _await_nothing(count: int) -> list[float]:
    found = []
    for _ in range(count):
        started = time.perf_counter()
        await asyncio.create_task(_nothing())
        found.append(time.perf_counter() - started)
    return found


def _call_nothing(count: int) -> list[float]:
    found, calls = [], portal()
    for _ in range(count):
        started = time.perf_counter()
        calls.call(_nothing)
        found.append(time.perf_counter() - started)
    return found


class _Sends:
    """Sends of a tiny model to one worker on the same loop: of the coroutine, and of its twin."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(16, 16)
        self.twin = sync.MemoryWeightSyncScheme()
        self._receiver = self._receiver_of(self.twin)
        connecting = threading.Thread(target=self._receiver.connect)
        connecting.start()
        self.twin.connect()
        connecting.join()

    def _receiver_of(self, scheme: Any) -> Any:
        scheme.init_on_sender(model_id="policy", model=self.model, num_workers=1)
        receiver = copy.copy(scheme)
        receiver.init_on_receiver(model_id="policy", model=torch.nn.Linear(16, 16), worker_idx=0)
        return receiver

    def blocking(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            started = time.perf_counter()
            self.twin.send()
            found.append(time.perf_counter() - started)
        return found

    async def awaited(self, count: int) -> list[float]:
        scheme = aiosync.MemoryWeightSyncScheme()
        receiver = self._receiver_of(scheme)
        found = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receiver.connect())
            tasks.create_task(scheme.connect())
        async with receiver.receiving():
            for _ in range(count):
                started = time.perf_counter()
                await scheme.send()
                found.append(time.perf_counter() - started)
        await receiver.aclose()
        await scheme.aclose()
        return found

    def close(self) -> None:
        self._receiver.close()
        self.twin.close()


def run(rounds: int, out: Path | None) -> None:
    """Measure, print a table, write JSON.

    Args:
        rounds: blocks of 50 calls of each.
        out: where the JSON goes.
    """
    sends = _Sends()
    samples: dict[str, tuple[list[float], list[float]]] = {
        "nothing": ([], []),
        "a send of 272 weights": ([], []),
    }
    for _ in range(rounds):
        for name, blocking, awaited in (
            ("nothing", _call_nothing, _await_nothing),
            ("a send of 272 weights", sends.blocking, sends.awaited),
        ):
            samples[name][0].extend(blocking(_BLOCK))
            samples[name][1].extend(uvloop.run(awaited(_BLOCK)))
    sends.close()
    table = Table(title="Blocking calls beside coroutines, microseconds (p50; p99)")
    for column in ("of", "blocking", "awaited", "more, p50"):
        table.add_column(column, justify="right")
    found: list[dict[str, Any]] = []
    for name, (blocking_times, awaited_times) in samples.items():
        both = [spread(times, scale=1e6) for times in (blocking_times, awaited_times)]
        ours, limit = both
        assert ours is not None and limit is not None
        found.append({"of": name, "blocking": ours.median, "awaited": limit.median})
        table.add_row(name, _shown(ours), _shown(limit), f"{ours.median - limit.median:.0f}")
    Console().print(table)
    save(out, "blocking", found)


def _shown(found: Spread) -> str:
    return f"{found.median:.0f} ({found.p99:.0f})"
