"""``aiosync bench blocking``: a blocking call beside its coroutine, in one process and in turn."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable
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

__all__ = ["run"]

_BLOCK = 50


async def _nothing() -> None:
    return


async def _await_nothing() -> None:
    await asyncio.create_task(_nothing())


def _time_calls(call: Callable[[], Any]) -> list[float]:
    found = []
    for _ in range(_BLOCK):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


async def _time_awaits(call: Callable[[], Any]) -> list[float]:
    found = []
    for _ in range(_BLOCK):
        started = time.perf_counter()
        await call()
        found.append(time.perf_counter() - started)
    return found


class _Sends:
    """Sends of a tiny model to one worker on the same loop: of the coroutine, and of its blocking twin."""

    def __init__(self) -> None:
        self._model = torch.nn.Linear(16, 16)
        self.twin = sync.MemoryWeightSyncScheme()
        self._receiver = self._receiver_of(self.twin)
        connecting = threading.Thread(target=self._receiver.connect)
        connecting.start()
        self.twin.connect()
        connecting.join()

    def _receiver_of(self, scheme: Any) -> Any:
        scheme.init_on_sender(model_id="policy", model=self._model, num_workers=1)
        receiver = copy.copy(scheme)
        receiver.init_on_receiver(model_id="policy", model=torch.nn.Linear(16, 16), worker_idx=0)
        return receiver

    async def awaited(self) -> list[float]:
        scheme = aiosync.MemoryWeightSyncScheme()
        receiver = self._receiver_of(scheme)
        await asyncio.gather(receiver.connect(), scheme.connect())
        async with receiver.receiving():
            found = await _time_awaits(scheme.send)
        await receiver.aclose()
        await scheme.aclose()
        return found

    def close(self) -> None:
        self._receiver.close()
        self.twin.close()


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of 50 calls of each.")] = 20,
    json: options.Json = None,
) -> None:
    """What a blocking call costs beside the coroutine that it runs."""
    sends, calls = _Sends(), portal()
    samples: dict[str, tuple[list[float], list[float]]] = {
        "nothing": ([], []),
        "a send of 272 weights": ([], []),
    }
    for _ in range(rounds):
        blocking, awaited = samples["nothing"]
        blocking.extend(_time_calls(lambda: calls.call(_nothing)))
        awaited.extend(uvloop.run(_time_awaits(_await_nothing)))
        blocking, awaited = samples["a send of 272 weights"]
        blocking.extend(_time_calls(sends.twin.send))
        awaited.extend(uvloop.run(sends.awaited()))
    sends.close()
    with report("Blocking calls beside coroutines, microseconds", "blocking", json) as rows:
        for name, (blocking, awaited) in samples.items():
            ours, limit = summary(blocking, 1e6), summary(awaited, 1e6)
            rows.append(
                {
                    "of": name,
                    "blocking, p50": ours.median,
                    "blocking, p99": ours.p99,
                    "awaited, p50": limit.median,
                    "awaited, p99": limit.p99,
                    "more, p50": ours.median - limit.median,
                }
            )
