"""``aiosync bench cuda``: sends of models on a GPU, beside the device's own copies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import aiosync
from benchmarks.harness import options
from benchmarks.harness.meters import spread, summary, ticking
from benchmarks.harness.model_specs import MODELS, ModelSpec
from benchmarks.harness.models import build_model, fill, sizes
from benchmarks.harness.results import Row, report, say
from benchmarks.harness.trainer import SPAWN, Remote

MODEL_ID = "policy"
TIMEOUT = 60.0  # seconds that any one call may take
WARM_UP = 3  # sends before anything is counted
QUEUED = 16  # reads of the model that a worker queues before it waits for one
ONE_AND_FOUR = options.Numbers((1, 4))
Device = Annotated[str, typer.Option(help="The GPU. With cpu the case only tests itself.")]


def cuda(
    models: options.Models = options.ALL_MODELS,
    workers: options.Workers = ONE_AND_FOUR,
    rounds: options.Rounds = 10,
    device: Device = "cuda",
    json: options.Json = None,
) -> None:
    """Sends of models on a GPU, beside the device's own copies."""
    if device != "cpu" and device.partition(":")[0] != "cuda":
        raise typer.BadParameter(f"expected cuda, cuda:N or cpu, got {device!r}", param_hint="--device")
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device", param_hint="--device")
    title = "Sends from and to a GPU, in milliseconds: median (least - most)"
    with report(title, "cuda", json) as rows:
        # From the trainer's device to the workers'.
        for name, (source, target), count in product(
            models, ((device, device), (device, "cpu"), ("cpu", device)), workers
        ):
            say(f"--- {name}, {source} to {target}, workers: {count}")
            turn = asyncio.run(_measure(MODELS[name], source, target, count, rounds or 10))
            rows.append({"model": name, "trainer": source, "workers on": target, "workers": count, **turn})


@dataclass
class Copies:
    """Copies within this process. The limit is one copy of all bytes, from or to pinned memory; the usual way
    is a state dict, tensor by tensor."""

    spec: ModelSpec
    source: str
    target: str

    def __post_init__(self) -> None:
        self.model = build_model(self.spec).to(self.source)
        numel = sizes(self.spec)["nbytes"] // 4
        pinned = "cuda" in self.source + self.target
        self._from, self._to = (
            torch.ones(numel, pin_memory=pinned) if at == "cpu" else torch.ones(numel, device=at)
            for at in (self.source, self.target)
        )

    def limit(self) -> None:
        """One copy."""
        self._to.copy_(self._from, non_blocking=True)

    def usual(self) -> None:
        """A state dict on the workers' device."""
        {name: tensor.to(self.target, copy=True) for name, tensor in self.model.state_dict().items()}


def _timed(work: Callable[[], object], device: str) -> float:
    _settle(device)
    begun = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - begun


def _settle(device: str) -> None:
    if "cuda" in device:
        torch.cuda.synchronize()


async def _measure(spec: ModelSpec, source: str, target: str, count: int, rounds: int) -> Row:
    copies = Copies(spec, source, target)
    both, model, late = source + target, copies.model, list[float]()
    limits: list[float] = []
    usual: list[float] = []
    sends: list[float] = []
    scheme = aiosync.SharedMemWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(model_id=MODEL_ID, model=model, devices=[target] * count, ctx=SPAWN)
    remotes = [Remote(Worker, scheme, index, spec, target, forked=True) for index in range(count)]
    async with AsyncExitStack() as stack:
        for remote in remotes:
            stack.callback(remote.kill)
        await asyncio.gather(
            scheme.connect(), *(remote.call("connect", timeout=TIMEOUT) for remote in remotes)
        )
        stack.push_async_callback(scheme.aclose)
        for number in range(WARM_UP + rounds):
            limits.append(_timed(copies.limit, both))
            usual.append(_timed(copies.usual, both))
            fill(model, number)
            _settle(both)
            async with ticking() as ticks:
                begun = time.perf_counter()
                await scheme.send()
                sends.append(time.perf_counter() - begun)
            late += ticks if number >= WARM_UP else []
        torn = await _count_torn(scheme, model, remotes, source, rounds)
        for remote in remotes:
            await remote.close(TIMEOUT)
    limit, took = summary(limits[WARM_UP:]), summary(sends[WARM_UP:])
    stalls = spread(late)
    return {
        "send": took,
        "limit": limit,
        "limit / send": limit.median / took.median,
        "state dict": summary(usual[WARM_UP:]),
        "trainer's loop late\np50 / p99 / max": stalls
        and f"{stalls.median:.2g} / {stalls.p99:.2g} / {stalls.max:.2g}",
        "torn reads": torn,
    }


async def _count_torn(scheme: Any, model: nn.Module, remotes: list[Remote], source: str, sends: int) -> str:
    """Send what is queued in a stream of its own, while workers queue reads in streams of theirs."""
    await asyncio.gather(*(remote.call("begin_reading", timeout=TIMEOUT) for remote in remotes))
    stream = torch.cuda.Stream(source) if "cuda" in source else None
    for number in range(5 * sends):
        with torch.cuda.stream(stream) if stream else nullcontext():
            fill(model, number)
        await scheme.send()
    counts = await asyncio.gather(*(remote.call("end_reading", timeout=TIMEOUT) for remote in remotes))
    torn, reads = (sum(each) for each in zip(*counts, strict=True))
    return f"{torn} of {reads}"


class Worker:
    """A worker in its own process."""

    def __init__(self, scheme: Any, index: int, spec: ModelSpec, device: str) -> None:
        self._scheme = scheme
        self._index = index
        torch.set_num_threads(1)
        self._model = build_model(spec).to(device)
        self._stream = torch.cuda.Stream(device) if "cuda" in device else None
        self._receiving = AsyncExitStack()
        self._enough = False
        self._reading: asyncio.Task[tuple[int, int]]

    async def connect(self) -> None:
        """Connect, and receive from now on."""
        fill(self._model, 0)
        self._scheme.init_on_receiver(model_id=MODEL_ID, model=self._model, worker_idx=self._index)
        await self._scheme.connect()
        await self._receiving.enter_async_context(self._scheme.receiving())

    async def begin_reading(self) -> None:
        """Read the model until :meth:`end_reading`."""
        self._reading = asyncio.create_task(self._read())

    async def end_reading(self) -> tuple[int, int]:
        """Return how many reads saw two values, and how many there were."""
        self._enough = True
        return await self._reading

    async def _read(self) -> tuple[int, int]:
        torn, reads, queued = 0, 0, list[Tensor]()
        while not self._enough:
            queued.append(self._queue_a_read())
            await asyncio.sleep(0)
            if len(queued) == QUEUED:
                if self._stream is not None:
                    await asyncio.to_thread(self._stream.synchronize)
                torn += sum(_are_torn(queued))
                reads += len(queued)
                queued.clear()
        return torn, reads

    def _queue_a_read(self) -> Tensor:
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return torch.stack([torch.stack(torch.aminmax(p)) for p in self._model.parameters()])

    async def close(self) -> None:
        """Close the endpoint."""
        await self._receiving.aclose()
        await self._scheme.aclose()


def _are_torn(reads: list[Tensor]) -> Iterator[bool]:
    for read in reads:
        yield bool(read.min() != read.max())
