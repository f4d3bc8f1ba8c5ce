"""``aiosync bench blocking``: a blocking call beside its coroutine, in one process and in turn."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
import uvloop

import aiosync
from aiosync import sync
from aiosync.sync._portal import portal
from benchmarks.harness import options
from benchmarks.harness.meters import summary
from benchmarks.harness.results import report

_BLOCK = 50


async def _nothing() -> None:
    return


async def _time_awaits(call: Callable[[], Any]) -> list[float]:
    found = []
    for _ in range(_BLOCK):
        started = time.perf_counter()
        await call()
        found.append(time.perf_counter() - started)
    return found


def _pair(scheme: Any) -> tuple[Any, Any]:
    """A scheme with a tiny model, and its one worker's."""
    scheme.init_on_sender(model_id="policy", model=torch.nn.Linear(16, 16), num_workers=1)
    receiver = copy.copy(scheme)
    receiver.init_on_receiver(model_id="policy", model=torch.nn.Linear(16, 16), worker_idx=0)
    return scheme, receiver


async def _time_awaited_sends() -> list[float]:
    scheme, receiver = _pair(aiosync.MemoryWeightSyncScheme())
    await asyncio.gather(receiver.connect(), scheme.connect())
    async with receiver.receiving():
        found = await _time_awaits(scheme.send)
    await receiver.aclose()
    await scheme.aclose()
    return found


def blocking(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of 50 calls of each.")] = 20,
    json: options.Json = None,
) -> None:
    """What a blocking call costs beside the coroutine that it runs."""
    twin, receiver = _pair(sync.MemoryWeightSyncScheme())
    connecting = threading.Thread(target=receiver.connect)
    connecting.start()
    twin.connect()
    connecting.join()
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "nothing": (
            partial(portal().call, _nothing),
            partial(_time_awaits, lambda: asyncio.create_task(_nothing())),
        ),
        "a send of 272 weights": (twin.send, _time_awaited_sends),
    }
    with report("Blocking calls beside coroutines, microseconds", "blocking", json) as rows:
        for name, (call, time_awaits) in calls.items():
            samples: tuple[list[float], list[float]] = [], []
            for _ in range(rounds):
                samples[0].extend(timeit.repeat(call, gc.enable, number=1, repeat=_BLOCK))
                samples[1].extend(uvloop.run(time_awaits()))
            ours, limit = (summary(each, 1e6) for each in samples)
            row = {"of": name, "blocking, p50": ours.median, "blocking, p99": ours.p99}
            row |= {"awaited, p50": limit.median, "awaited, p99": limit.p99}
            rows.append(row | {"more, p50": ours.median - limit.median})
    receiver.close()
    twin.close()
