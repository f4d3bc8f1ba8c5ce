"""The ranks of a sharded trainer, each a process."""

from __future__ import annotations

import asyncio
import ctypes
import time
import traceback
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from aiosync import (
    DistributedWeightSyncScheme,
    InvalidArgumentError,
    NotConnectedError,
    SyncTimeoutError,
    atomic,
)
from aiosync.sender import endpoint
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.extraction import WeightSource
from aiosync.sender.publish_together import publish_together
from tests.kit.clock import BRIEF, PATIENCE

__all__ = [
    "LAYER",
    "LAYERS",
    "Net",
    "abandoned",
    "answered_late",
    "closed",
    "closed_contributor",
    "connected_in_part",
    "ended_before_its_turn",
    "evaluated",
    "failing",
    "main",
    "memory",
    "not_told",
    "out_of_step",
    "overlapping",
    "refused",
    "reordered",
    "retried",
    "slow_sources",
    "spread",
    "together",
    "train",
    "unanswered",
]

MIB = 1 << 20
_MMAP_THRESHOLD = -3

LAYERS = 24
LAYER = 1 << 20
"""Parameters of one layer."""


class Net(nn.Module):
    """Layers whose sizes no number of ranks divides, tied weights, a buffer; and large ones if wanted."""

    def __init__(self, *, large: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.last.weight
        self.single = nn.Parameter(torch.ones(1))
        width = LAYER if large else 1
        self.large = nn.ParameterList(torch.full((width,), float(i)) for i in range(LAYERS if large else 0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        out: Tensor = (self.last(hidden) + self.tied(hidden)) * self.single
        return out


Scenario = Callable[[DistributedWeightSyncScheme, Any, int], Awaitable[Any]]


def main(name: str, rank: int, ranks: int, port: int, large: bool, result: Connection[Any, Any]) -> None:
    """Run a scenario of this module on one rank of a trainer; its result or traceback goes back."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("trainer", store), rank=rank, world_size=ranks)
    try:
        result.send((None, asyncio.run(_run(globals()[name], rank, ranks, port, large))))
    except BaseException:  # noqa: BLE001 - the test fails by it
        result.send((traceback.format_exc(), None))
    finally:
        dist.destroy_process_group()


async def _run(scenario: Scenario, rank: int, ranks: int, port: int, large: bool) -> Any:
    torch.manual_seed(0)
    model = Net(large=large)
    if scenario is spread:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model, mesh=mesh)
    scheme = DistributedWeightSyncScheme(init_method=f"tcp://127.0.0.1:{port}", timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    try:
        return await scenario(scheme, model, rank)
    finally:
        await scheme.aclose()


def _whole(model: Any) -> dict[str, Any]:
    """The full state dict, as lists."""
    state = model.state_dict().items()
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state}
    return {key: value.tolist() for key, value in whole.items()}


async def train(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Steps of training with a send after each; then the full state dict."""
    await scheme.connect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for version in range(1, 4):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        report = await scheme.send()
        assert report.version == scheme.version == version
        assert sorted(report.workers) == ([0, 1] if rank == 0 else [])
        assert (await scheme.wait_ack()).ok
    return _whole(model)


async def spread(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """The same where each shard is on several ranks."""
    return await train(scheme, model, rank)


async def memory(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """How many bytes connecting and sending takes at most, besides this rank's shards."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MIB)  # what is let go is to be given back, and not kept
    before = _forget_peak()
    await scheme.connect()
    await scheme.send()
    await scheme.send()
    return _status("VmHWM") - before


def _forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


async def _error_of(call: Any) -> tuple[str, str]:
    """The error that a call ends with, in good time."""
    begun = time.monotonic()
    try:
        await call
    except Exception as exc:  # noqa: BLE001 - looked at by the test
        assert time.monotonic() - begun < PATIENCE / 2
        return type(exc).__name__, str(exc)
    return "", ""


async def refused(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """What one rank cannot send the others do not wait for, and the next call is well."""
    await scheme.connect()
    whole = torch.full((1,), 5.0)
    errors = [
        await _error_of(scheme.send(worker_ids=7)),
        await _error_of(scheme.send({"single": model.single})),
        await _error_of(scheme.send("no.such.path")),
        await _error_of(scheme.send([1] if rank == 1 else None)),
    ]
    assert (await scheme.send({"single": model.single}, strict=False)).ok
    errors.append(await _error_of(scheme.send({"single": whole}, worker_ids=7)))
    sharded = distribute_tensor(whole, model.single.device_mesh, [Shard(0)])
    assert (await scheme.send({"single": sharded}, strict=False)).ok
    return errors


async def reordered(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Ranks may have their weights in another order; names tell."""
    await scheme.connect()
    state = dict(model.state_dict())
    if rank == 1:
        state = dict(reversed(state.items()))
    assert (await scheme.send(state)).ok
    return _whole(model)


async def out_of_step(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """One rank gives up before the other comes: that one is told, and the next calls meet."""
    await scheme.connect()
    errors = []
    for ahead in (1, 0):
        if rank == ahead:
            errors.append(await _error_of(scheme.send(timeout=BRIEF)))
        else:
            await asyncio.sleep(3 * BRIEF)
            errors.append(await _error_of(scheme.send()))
        await scheme.send()
    task = asyncio.create_task(scheme.send())
    await asyncio.sleep(0)
    if rank == 0:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scheme.send()
    return errors, scheme.version


async def together(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Two sends of one scheme at once."""
    await scheme.connect()
    singles = [
        distribute_tensor(torch.full((1,), value), model.single.device_mesh, [Shard(0)])
        for value in (2.0, 3.0)
    ]
    await asyncio.gather(*(scheme.send({"single": single}, strict=False) for single in singles))
    return scheme.version


async def resumed(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """From a checkpoint; and two calls of connect() at once."""
    scheme.load_state_dict({"version": 3, "epoch": 0})
    await asyncio.gather(scheme.connect(), scheme.connect())
    first = scheme.version
    return first, (await scheme.send()).version, scheme.version


def _say(word: str) -> None:
    """Let other ranks continue that wait for this word."""
    dist.distributed_c10d._get_default_store().set(word, "")


async def _heard(word: str) -> None:
    # A store of its own: while one waits, all other calls of the same one wait too.
    store: Any = dist.distributed_c10d._get_default_store()
    await asyncio.to_thread(store.clone().get, word)


async def _send_counted(scheme: DistributedWeightSyncScheme, model: Any) -> int:
    """Fill the weights of each send with its own number; return the last."""
    for number in range(1, 4):
        with torch.no_grad():
            for weights in model.parameters():
                weights.fill_(number)
        await scheme.send()
    return number


async def retried(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """A rank's connect() is cancelled while rank 0 publishes, and the rank calls it again."""
    if rank == 0:

        async def late(*args: Any, **options: Any) -> None:
            _say("gathered")
            await _heard("called again")
            await publish_together(*args, **options)

        with mock.patch.object(endpoint, "publish_together", late):
            await scheme.connect()
    else:
        first = asyncio.create_task(scheme.connect())
        await _heard("gathered")
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(scheme.connect())
        await asyncio.sleep(BRIEF)
        _say("called again")
        await second
    return await _send_counted(scheme, model)


async def connected_in_part(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Rank 0 publishes version 0, and then its connect() fails. The program sends all the same."""
    wait_for_start = WeightSender._wait_for_start

    async def late(self: WeightSender, *args: Any) -> None:
        await wait_for_start(self, *args)
        raise SyncTimeoutError("connect", seconds=1.0)

    with mock.patch.object(WeightSender, "_wait_for_start", late):
        error = await _error_of(scheme.connect())
    return error[0], await _send_counted(scheme, model)


async def slow_sources(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """On rank 1 a call is cancelled before it has its weights, and another has them after the next one."""
    await scheme.connect()
    extract = WeightSource.extract
    come = asyncio.Event()

    async def slow(self: WeightSource, weights: Any, *args: Any) -> Any:
        if rank == 1 and weights is not None:
            await come.wait()
        return await extract(self, weights, *args)

    with mock.patch.object(WeightSource, "extract", slow):
        cancelled = asyncio.create_task(_error_of(scheme.send(_filled(model, 7.0))))
        await asyncio.sleep(0)
        if rank == 1:
            cancelled.cancel()
        first = asyncio.create_task(scheme.send(_filled(model, 2.0)))
        await asyncio.sleep(0)
        with torch.no_grad():
            for weights in model.parameters():
                weights.fill_(3.0)
        second = asyncio.create_task(scheme.send())
        await asyncio.sleep(BRIEF)
        come.set()
        await asyncio.gather(first, second)
        await asyncio.wait([cancelled])
    return scheme.version


def _filled(model: Any, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor.detach(), value) for name, tensor in model.state_dict().items()}


async def ended_before_its_turn(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """On rank 0 the second of two sends ends while the first one waits for the workers."""
    await scheme.connect()
    finish = WeightSender.finish

    async def slow(self: WeightSender, *args: Any, **options: Any) -> Any:
        await _heard("ended")
        return await finish(self, *args, **options)

    with mock.patch.object(WeightSender, "finish", slow):
        first = asyncio.create_task(scheme.send())
        second = asyncio.create_task(_error_of(scheme.send(timeout=BRIEF if rank == 0 else None)))
        if rank == 0:
            await second
            _say("ended")
        assert (await first).version == 1
    kind, _ = await second
    return kind, scheme.version, (await scheme.send()).version


async def answered_late(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Rank 0's send ends, well, after the deadline of the other rank."""
    await scheme.connect()
    if rank == 1:
        return await _error_of(scheme.send(timeout=3 * BRIEF))
    finish = WeightSender.finish

    async def slow(self: WeightSender, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(4 * BRIEF)
        return await finish(self, *args, **options)

    with mock.patch.object(WeightSender, "finish", slow):
        return await _error_of(scheme.send())


async def unanswered(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """A version is published, and a worker does not apply it in time."""
    await scheme.connect()
    late = SyncTimeoutError("ack", seconds=1.0, workers=[0])
    with mock.patch.object(WeightSender, "finish", side_effect=late):
        errors = await _error_of(scheme.send())
    version = scheme.version
    assert (await scheme.send()).ok
    return errors, version, scheme.version


async def overlapping(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Two connect() at once. On rank 0 the second ends before the first, on rank 1 the first fails."""
    if rank == 0:
        first = asyncio.create_task(_error_of(scheme.connect()))
        second = asyncio.create_task(_error_of(scheme.connect(timeout=BRIEF)))
        await second
        _say("gave up")
    else:
        await _heard("gave up")
        first = asyncio.create_task(_error_of(scheme.connect(weights="no.such.path")))
        second = asyncio.create_task(_error_of(scheme.connect()))
    kinds = [(await first)[0], (await second)[0]]
    await scheme.connect()
    return kinds, await _send_counted(scheme, model)


async def abandoned(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """A rank ends; the other hears of it."""
    await scheme.connect()
    if rank == 1:
        await scheme.aclose()
        return ("", "")
    return await _error_of(scheme.send())


async def not_told(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """The model was whole when the scheme was initialised."""
    await scheme.connect()
    other = DistributedWeightSyncScheme(timeout=PATIENCE)
    other.init_on_sender(model_id="other", model=Net(), num_workers=1)
    errors = await _error_of(other.connect(weights=model, timeout=BRIEF))
    await other.aclose()
    return errors


async def evaluated(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """A forward pass without a backward one leaves whole parameters behind, as they were then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    await scheme.connect()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        with torch.no_grad():
            model(torch.randn(8, 5))
        assert not hasattr(model.single, "full_tensor")
        optimizer.step()
        assert (await scheme.send()).ok
    return _whole(model)


async def closed(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Rank 0 closes while it waits for the other."""
    await scheme.connect()
    if rank == 1:
        await asyncio.sleep(3 * BRIEF)
        return await _error_of(scheme.send())
    sending = [asyncio.create_task(_error_of(scheme.send())) for _ in range(2)]
    await asyncio.sleep(BRIEF)
    begun = time.monotonic()
    await scheme.aclose()
    assert time.monotonic() - begun < PATIENCE / 2
    return await asyncio.gather(*sending)


async def closed_contributor(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """Rank 1 closes a scheme while its connect() waits for rank 0."""
    await scheme.connect()
    other = DistributedWeightSyncScheme(timeout=PATIENCE)
    other.init_on_sender(model_id="other", model=model, num_workers=1)
    if rank == 0:
        await _heard("closed")
    connecting = asyncio.create_task(_error_of(other.connect()))
    if rank == 1:
        await asyncio.sleep(BRIEF)
        await other.aclose()
        _say("closed")
    errors = await connecting
    if rank == 0:
        _say("answered")
    await _heard("answered")  # this rank's thread would end with its process
    await other.aclose()
    return errors


async def failing(scheme: DistributedWeightSyncScheme, model: Any, rank: int) -> Any:
    """A call that fails by what a rank's own code raises is a call too."""
    await scheme.connect()
    extract = scheme.strategy

    class Failing(type(extract)):  # type: ignore[misc]
        def extract_weights(self, source: Any) -> Any:
            raise ZeroDivisionError("of its own")

    if rank == 1:
        scheme.strategy = Failing()
    errors = await _error_of(scheme.send())
    scheme.strategy = extract
    assert (await scheme.send()).ok
    expected = InvalidArgumentError if rank == 0 else NotConnectedError
    with pytest.raises(expected):
        async with atomic(scheme):
            raise AssertionError("not reached")
    return errors
