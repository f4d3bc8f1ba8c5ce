"""What a worker process can be told to do. See :mod:`tests.kit.child`."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from typing import Any

import torch
from torch import nn

from aiosync import WorkerLostError
from aiosync.transports.unix_socket import UnixConnection
from tests.kit.child import Child
from tests.kit.models import Norm, Other, Uniform, fill, occupy, value_of

__all__ = [
    "aclose", "block", "connect", "count_resources", "cut", "dirty_exit", "fork_a_sleeper", "pin",
    "queue_read", "queued_read", "read", "read_pinned", "report", "serve", "stats", "train", "unserve",
    "wait_closed",
]  # fmt: skip


class _Raising:
    """A context that refuses what it is told of, while it is told to."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.worker_idx = child.index

    def update_policy_weights_(self, policy_or_weights: Any = None, model_id: str = "") -> None:
        if self._child.notes.get("raise"):
            raise OSError("the disk of the worker is full")


def _model(kind: str, shape: dict[str, int]) -> nn.Module:
    return {"uniform": lambda: Uniform(-1.0, **shape), "other": Other, "norm": Norm}[kind]()


async def connect(
    child: Child, kind: str = "uniform", model_id: str = "policy", device: str = "cpu", **shape: int
) -> int:
    """Make a model, init and connect; returns the version."""
    child.model = _model(kind, shape).to(device)
    context = child.notes["context"] = _Raising(child)
    child.scheme.init_on_receiver(
        model_id=model_id,
        model=child.model,
        context=context,
        worker_idx=child.index,
        **child.arguments,
    )
    await child.scheme.connect()
    return child.scheme.version


async def train(child: Child, values: list[float]) -> int:
    """Be the trainer: publish a version with each of these values; returns the last version."""
    model = child.model = Uniform(values[0])
    child.scheme.init_on_sender(model_id="policy", model=model)
    await child.scheme.connect()
    for value in values[1:]:
        fill(model, value)
        await child.scheme.send()
    return child.scheme.version


async def serve(child: Child) -> None:
    """Run the receiver task beside whatever comes next."""
    ready = asyncio.Event()
    stop = child.notes["stop"] = asyncio.Event()

    async def body() -> str:
        try:
            async with child.scheme.receiving():
                ready.set()
                await stop.wait()
        except WorkerLostError as exc:
            return str(exc)
        return ""

    child.notes["serving"] = asyncio.create_task(body())
    await ready.wait()


async def unserve(child: Child) -> str:
    """End the receiver task; returns what it raised as text, or nothing."""
    child.notes["stop"].set()
    text: str = await child.notes["serving"]
    return text


async def report(child: Child) -> dict[str, Any]:
    """Version and the value that every element has."""
    assert child.model is not None
    return {"version": child.scheme.version, "value": value_of(child.model)}


async def refuse(child: Child, on: bool) -> None:
    """Have the context raise on each update, or no more."""
    child.notes["raise"] = on


async def block(child: Child) -> None:
    """Hold the event loop until told ``go``."""
    child.block()


async def pin(child: Child) -> list[dict[str, Any]]:
    """Pin, say ``pinned``, hold until told ``unpin``; returns what was read before and after."""
    seen = []
    async with child.scheme.pinned() as version:
        seen.append({**(await report(child)), "version": version})
        child.say("pinned", version)
        await child.until_told("unpin")
        seen.append(await report(child))
    return seen


async def read(child: Child, count: int, offset: float = 0.0) -> dict[str, int]:
    """Read all parameters in the loop ``count`` times and until told ``enough``.

    Each read must be of one version, the one that the scheme names, and never an older one.
    """
    assert child.model is not None
    last, distinct, reads = -1, 0, 0
    while reads < count or not child.was_told("enough"):
        value = value_of(child.model)
        version = child.scheme.version
        assert value == version + offset, f"read {value} while version {version} is in service"
        assert version >= last, f"version {version} after {last}"
        distinct += version > last
        last = version
        reads += 1
        if reads == count:
            child.say("done")
        await asyncio.sleep(0)
    return {"reads": reads, "distinct": distinct, "last": last}


async def read_pinned(child: Child, count: int) -> dict[str, int]:
    """Read parameter by parameter with awaits in between, pinned."""
    assert child.model is not None
    distinct: set[int] = set()
    reads = 0
    while reads < count or not child.was_told("enough"):
        async with child.scheme.pinned() as version:
            for parameter in child.model.parameters():
                assert value_of([parameter]) == version
                await asyncio.sleep(0)
        distinct.add(version)
        reads += 1
        if reads == count:
            child.say("done")
    return {"reads": reads, "distinct": len(distinct)}


async def queue_read(child: Child, seconds: float, side: bool) -> int:
    """Queue a read of the parameters on the device behind ``seconds`` of other work; returns the version.

    ``side``: in a stream of its own. :func:`queued_read` returns what was read.
    """
    assert child.model is not None
    device = next(child.model.parameters()).device
    stream = torch.cuda.Stream(device) if side else torch.cuda.current_stream(device)
    with torch.no_grad(), torch.cuda.stream(stream):
        occupy(device, seconds)
        child.notes["read"] = [torch.stack(torch.aminmax(p.detach())) for p in child.model.parameters()]
    return child.scheme.version


async def queued_read(child: Child) -> list[float]:
    """All different values that the queued read has seen."""
    found = child.notes.pop("read")
    torch.cuda.synchronize()
    return sorted({value for extremes in found for value in extremes.tolist()})


async def cut(child: Child) -> None:
    """Break the connection to the sender, which is to be one over a Unix socket."""
    transport = child.scheme.receiver_transport
    assert isinstance(transport, UnixConnection)
    assert transport._sock is not None
    transport._sock.shutdown(socket.SHUT_RDWR)


async def wait_closed(child: Child) -> None:
    """Wait until the sender has gone."""
    await child.scheme.wait_closed()


async def aclose(child: Child) -> None:
    """Close the endpoint."""
    await child.scheme.aclose()


async def stats(child: Child) -> dict[str, int]:
    """Counts from the endpoint's statistics."""
    found = child.scheme.stats
    return {"updates": found.updates, "skipped": found.skipped, "failures": found.failures}


async def stall(child: Child, seconds: float) -> float:
    """Tick until told ``enough``; returns the longest time in seconds that the loop was held up."""
    worst, last = 0.0, time.perf_counter()
    child.say("ticking")
    while not child.was_told("enough"):
        await asyncio.sleep(seconds)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    return worst


async def count_resources(child: Child) -> dict[str, int]:
    """Threads, descriptors and tasks of this process."""
    gc.collect()
    return {
        "threads": len(threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
    }


async def fork_a_sleeper(child: Child) -> None:
    """Fork a child that has this process's descriptors and lives on for some seconds."""
    if os.fork() == 0:
        child.outlive()


async def dirty_exit(child: Child) -> None:
    """End the process without a word to anybody."""
    os._exit(7)
