"""NCCL between processes that have one GPU, and peers that are killed or suspended.

NCCL refuses two ranks of one host on one GPU. So each process says that it is a host of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from aiosync import DistributedWeightSyncScheme, WorkerLostError
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember
from tests.kit.cases import Recipe, SchemeCase
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.models import fill, occupy
from tests.kit.processes import ProcessCluster
from tests.kit.ranks import before_message, check, close_in_the_middle
from tests.kit.seams import connections_of, threads_of_ranks

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and NCCL"
)

LARGE = 3 << 20
COLLECTIVES = ["p2p", "broadcast"]
DEADLINE = PATIENCE / 2
"""More than the 10 seconds after which a message of NCCL is given up."""


def be_a_host() -> None:
    """Be another host for NCCL than the other processes are."""
    os.environ |= {"NCCL_HOSTID": f"host-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class OverNCCL(DistributedWeightSyncScheme):
    """Each process is a host."""

    def init_on_receiver(self, **arguments: Any) -> None:
        be_a_host()
        super().init_on_receiver(**arguments)

    init_on_worker = init_on_receiver


@asynccontextmanager
async def cluster_of(collective: str, **options: Any) -> AsyncIterator[ProcessCluster]:
    """A sender and three workers, on one GPU."""
    be_a_host()
    more: dict[str, Any] = {"backend": "nccl", "collective": collective, "reconnect_for": 0}
    case = SchemeCase("nccl", lambda workers, options: Recipe(OverNCCL(**{**more, **options})))
    async with ProcessCluster(case, workers=3, size=LARGE, device="cuda:0", **options) as cluster:
        yield cluster


async def send_to(cluster: ProcessCluster, version: int, workers: list[int]) -> None:
    """Send; these workers have the version within the deadline."""
    fill(cluster.model, version)
    started = time.monotonic()
    await cluster.scheme.send(worker_ids=workers, timeout=DEADLINE)
    note(f"version {version} to {workers}: {1e3 * (time.monotonic() - started):.0f} ms")
    await check(cluster, version, workers)


def note(text: str) -> None:
    if "NCCL_NOTES" in os.environ:
        with open(os.environ["NCCL_NOTES"], "a") as file:
            file.write(f"{os.environ['PYTEST_CURRENT_TEST'].split('::')[1]} {text}\n")


@needs_gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_versions_arrive(broadcasts: list[int], collective: str) -> None:
    async with cluster_of(collective) as cluster:
        for version in range(1, 6):
            await send_to(cluster, version, [0, 1, 2])
        assert set(broadcasts) >= ({2, 3, 4, 5} if collective == "broadcast" else set())


@needs_gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_killed_while_idle(collective: str) -> None:
    async with cluster_of(collective) as cluster:
        await send_to(cluster, 1, [0, 1, 2])
        cluster.workers[1].kill()
        await eventually(lambda: 1 not in connections_of(cluster.scheme), "it is gone")
        await asyncio.sleep(1)
        await send_to(cluster, 2, [0, 2])
        cluster.spawn(1)
        assert isinstance(cluster.scheme, DistributedWeightSyncScheme)
        await within(asyncio.gather(cluster.scheme.reconnect(), cluster.connect_worker(1)))
        await send_to(cluster, 3, [0, 1, 2])


@needs_gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_killed_in_the_middle(monkeypatch: pytest.MonkeyPatch, collective: str) -> None:
    async with cluster_of(collective) as cluster:
        await send_to(cluster, 1, [0, 1, 2])
        before_message(monkeypatch, 3, cluster.workers[1].kill)
        fill(cluster.model, 2)
        started = time.monotonic()
        with pytest.raises(WorkerLostError, match="worker 1 lost"):
            await cluster.scheme.send(timeout=DEADLINE)
        note(f"lost after {1e3 * (time.monotonic() - started):.0f} ms")
        assert time.monotonic() - started < 10  # NCCL's call is ended
        await check(cluster, 2, [0, 2])
        await send_to(cluster, 3, [0, 2])
        await eventually(lambda: threads_of_ranks() <= 3, "the broken group is dropped")


@needs_gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_suspended(monkeypatch: pytest.MonkeyPatch, collective: str) -> None:
    """The scheme's timeout is longer than that of a process group of NCCL."""
    async with cluster_of(collective, timeout=2 * PATIENCE) as cluster:
        await send_to(cluster, 1, [0, 1, 2])
        before_message(monkeypatch, 3, cluster.workers[1].stop)
        fill(cluster.model, 2)
        suspended = time.monotonic()
        await cluster.scheme.send(wait=False)
        sessions = [connections_of(cluster.scheme)[worker].session for worker in (0, 2)]
        await eventually(lambda: all(one.acked_version == 2 for one in sessions), "the others have it")
        note(f"the others have it after {1e3 * (time.monotonic() - suspended):.0f} ms")
        await check(cluster, 2, [0, 2])
        started = time.monotonic()
        torch.cuda.default_stream().synchronize()
        note(f"default stream after {1e3 * (time.monotonic() - started):.0f} ms")
        assert time.monotonic() - started < 5  # the trainer's own work does not wait for the worker
        await send_to(cluster, 3, [0, 2])
        await asyncio.sleep(suspended + PATIENCE + 5 - time.monotonic())
        await send_to(cluster, 4, [0, 2])  # no thread of torch's has ended this process


@needs_gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_the_last_version_of_a_sender_that_closes(
    monkeypatch: pytest.MonkeyPatch, collective: str
) -> None:
    async with cluster_of(collective) as cluster:
        await send_to(cluster, 1, [0, 1, 2])
        await close_in_the_middle(monkeypatch, cluster, 2, 3)


@needs_gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
async def test_the_trainer_is_busy_meanwhile(collective: str) -> None:
    """Its work and NCCL's do not wait for each other."""
    async with cluster_of(collective) as cluster:
        await send_to(cluster, 1, [0, 1, 2])
        fill(cluster.model, 2)
        await cluster.scheme.send(wait=False)
        occupy("cuda:0", 5.0)
        started = time.monotonic()
        await eventually(
            lambda: all(one.session.acked_version == 2 for one in connections_of(cluster.scheme).values()),
            "they have it",
        )
        note(f"beside other work after {1e3 * (time.monotonic() - started):.0f} ms")
        assert not torch.cuda.default_stream().query(), "they had to wait for the trainer's work"
        torch.cuda.default_stream().synchronize()


class Group:
    """A worker's group of NCCL. To receive lasts until the group is aborted, and then raises nothing."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.waiting = threading.Event()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Mock:
        return Mock()  # the token of a worker that has joined

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Group:
        return self

    def wait(self, limit: timedelta) -> None:
        self.waiting.set()
        assert self.aborted.wait(PATIENCE)

    def abort(self) -> None:
        self.aborted.set()


def test_an_interrupted_message_has_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    group, store = Group(), HashStore()
    monkeypatch.setattr(ProcessGroupMember, "_make", lambda self, store: group)
    member = ProcessGroupMember("nccl", lambda: store, "key", rank=1, timeout=PATIENCE)
    first, second = (member.receive(torch.empty(8, dtype=torch.uint8), 0) for _ in range(2))
    assert group.waiting.wait(PATIENCE)
    member.interrupt()
    for future in (first, second):
        with pytest.raises(WorkerLostError, match="it was interrupted"):
            future.result(PATIENCE)
    member.close()


@pytest.mark.parametrize("before", [None, "0"])
def test_groups_have_no_watchdog(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name, found, group = "TORCH_NCCL_BLOCKING_WAIT", [], Group()

    class Options:
        _timeout = None

    def make(*args: Any) -> Group:
        found.append(os.environ[name])
        return group

    make.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    store = HashStore()
    member = ProcessGroupMember("nccl", lambda: store, "key", rank=1, timeout=PATIENCE)
    future = member.receive(torch.empty(8, dtype=torch.uint8), 0)
    assert group.waiting.wait(PATIENCE)
    member.interrupt()
    with pytest.raises(WorkerLostError):
        future.result(PATIENCE)
    member.close()
    assert found == ["1"]
    assert os.environ.get(name) == before
