"""torch.distributed: where the two sides meet, and what becomes of process groups."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from aiosync import (
    DistributedWeightSyncScheme,
    InvalidArgumentError,
    NotConnectedError,
    SyncTimeoutError,
)
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.transports.torch_distributed import transport
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember
from aiosync.transports.torch_distributed.store import StoreAddress
from tests.kit.cases import SCHEMES, SchemeCase, distributed
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.ports import free_port
from tests.kit.processes import ProcessCluster
from tests.kit.seams import connections_of, lookups_ended, threads_of_ranks

LARGE = 1 << 20
BROADCAST = next(case for case in SCHEMES if case.name == "distributed-broadcast")


def a_store() -> Any:
    """A store that the job has. (Not a fixture: those outlive the count of descriptors.)"""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@asynccontextmanager
async def pair_over(sender: dict[str, Any], worker: dict[str, Any]) -> AsyncIterator[Any]:
    """A connected sender and worker that know nothing of each other but these arguments."""
    model = Uniform()
    ours = DistributedWeightSyncScheme(timeout=PATIENCE, **sender)
    ours.init_on_sender(model_id="policy", model=model, num_workers=1)
    theirs = LocalWorker(
        DistributedWeightSyncScheme(timeout=PATIENCE, **worker), 0, Uniform(-1.0), {"worker_idx": None}
    )
    theirs.scheme.worker_idx = 0
    try:
        await within(asyncio.gather(ours.connect(), theirs.connect()))
        await theirs.serve()
        yield ours, model, theirs
    finally:
        await theirs.close()
        await within(ours.aclose())


async def _sends(ours: DistributedWeightSyncScheme, model: Uniform, theirs: LocalWorker) -> None:
    for version in (1, 2):
        fill(model, version)
        assert (await ours.send()).ok
        assert value_of(theirs.model) == version


# -- where they meet ---------------------------------------------------------------------------------


async def test_in_a_store_that_the_job_has() -> None:
    store = a_store()
    store.set("the job's", "own")
    ours, theirs = (PrefixStore("part of it", store.clone()) for _ in range(2))
    async with pair_over({"store": ours}, {"store": theirs}) as it:
        await _sends(*it)
    await eventually(lambda: store.list_keys() == ["the job's"], "nothing of ours is left in it")
    assert store.get("the job's") == b"own"


async def test_at_an_address() -> None:
    with_port = a_store()
    address = f"tcp://127.0.0.1:{with_port.port}"
    async with pair_over({"init_method": address}, {"init_method": address}) as it:
        await _sends(*it)
    assert with_port.num_keys() == 0


async def test_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    port = a_store().port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    async with pair_over({}, {}) as it:
        await _sends(*it)


def _listens_at() -> set[tuple[str, int]]:
    """Address and port of each TCP socket of this process that takes connections."""
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("collective", ["p2p", "broadcast"])
async def test_nothing_listens_at_all_addresses(collective: Literal["p2p", "broadcast"]) -> None:
    """torch's own store would: pytorch issue 173909."""
    before = _listens_at()
    async with ProcessCluster(SchemeCase("distributed", distributed(collective))) as cluster:
        fill(cluster.model, 1)
        assert (await cluster.scheme.send()).ok
        new = {ip for ip, _ in _listens_at() - before}
        assert "127.0.0.1" in new  # the store's, at least
        assert not new & {"0.0.0.0", "::", "::ffff:0.0.0.0"}


@pytest.mark.parametrize(
    ("host", "resolved", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("localhost", "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("localhost.localdomain", "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("node0", "127.0.1.1", ("0.0.0.0", "node0")),  # as Debian has it in /etc/hosts
        ("::1", "::1", ("::1", "::1")),
    ],
)
def test_where_a_sender_listens(
    host: str, resolved: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args, **kw: resolve(resolved, *args, **kw))
    assert StoreAddress(host=host, port=29500).hosts() == expected


def test_a_store_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(InvalidArgumentError, match="'nowhere' has no address"):
        StoreAddress(host="nowhere", port=29500).hosts()


async def test_a_name_that_is_none_is_not_the_end_of_the_lookup() -> None:
    store = a_store()
    async with pair_over({"store": store.clone()}, {"store": store.clone()}) as it:
        await _sends(*it)
        PrefixStore("aiosync/policy", store).queue_push("arrivals", b"\xff")
        theirs: LocalWorker = it[2]
        await theirs.close()
        again = copy.copy(theirs.scheme)
        again.init_on_receiver(model_id="policy", model=Uniform(), worker_idx=0)
        await within(again.connect())
        await within(again.aclose())


async def test_connect_again_after_the_store_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = DistributedWeightSyncScheme(store=a_store(), timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)

    def fail(*arguments: object) -> None:
        raise RuntimeError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(transport, "StoreResponder", fail)
        with pytest.raises(RuntimeError, match="the store is away"):
            await within(scheme.connect(min_workers=0))
    await within(scheme.connect(min_workers=0))
    await within(scheme.aclose())


async def test_two_senders_of_one_model() -> None:
    store = a_store()
    schemes = [DistributedWeightSyncScheme(store=store.clone(), timeout=PATIENCE) for _ in range(2)]
    for scheme in schemes:
        scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    await within(schemes[0].connect(min_workers=0))
    with pytest.raises(InvalidArgumentError, match="give each a model_id="):
        await within(schemes[1].connect(min_workers=0))
    for scheme in schemes:
        await within(scheme.aclose())
    schemes[1].init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    await within(schemes[1].connect(min_workers=0))
    await within(schemes[1].aclose())


async def test_a_store_at_an_address_listens_there_alone() -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    async with pair_over({"init_method": address}, {"init_method": address}) as it:
        await _sends(*it)
        assert [ip for ip, its_port in _listens_at() if its_port == port] == ["127.0.0.1"]


def test_the_rank_is_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_receiver(model_id="policy", model=Uniform())
    assert scheme.worker_idx == 2
    assert scheme.create_transport(worker_idx=2).rank == 3


async def test_a_worker_may_come_first() -> None:
    store = a_store()
    early = DistributedWeightSyncScheme(store=store.clone(), timeout=PATIENCE)
    early.init_on_receiver(model_id="policy", model=Uniform(), worker_idx=0)
    with pytest.raises(SyncTimeoutError, match="no sender of this model came to the store"):
        await early.connect(timeout=BRIEF)
    coming = asyncio.create_task(early.connect())
    await asyncio.sleep(BRIEF)
    scheme = DistributedWeightSyncScheme(store=store, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(4.0), num_workers=1)
    await within(asyncio.gather(scheme.connect(), coming))
    assert value_of(early.model) == 4
    await early.aclose()
    await within(scheme.aclose())
    await lookups_ended()
    await eventually(lambda: store.num_keys() == 0, "nothing is left of the lookup that was given up")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mpi"}, "expected 'gloo' or 'nccl'"),
        ({"collective": "tree"}, "expected 'p2p' or 'broadcast'"),
        ({"store": "tcp://here"}, "expected a torch.distributed Store"),
        ({"init_method": "udp://here"}, "expected 'env://' or 'tcp://host:port'"),
        ({"init_method": "tcp://here:99999"}, "expected 'env://' or 'tcp://host:port'.*0-65535"),
        ({"init_method": "tcp://here:port"}, "expected 'env://' or 'tcp://host:port'.*'port'"),
        ({"init_method": "tcp://[::1"}, "expected 'env://' or 'tcp://host:port'.*IPv6"),
        ({"store": HashStore(), "init_method": "env://"}, "not both"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DistributedWeightSyncScheme(**arguments)


async def test_a_worker_that_knows_no_store() -> None:
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_receiver(model_id="policy", model=Uniform(), worker_idx=0)
    with pytest.raises(InvalidArgumentError, match="does not know where its store is"):
        await scheme.connect(timeout=BRIEF)


# -- beside the job's own groups ---------------------------------------------------------------------


async def test_the_default_group_is_left_alone() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        async with LocalCluster(SchemeCase("distributed", distributed("p2p")), workers=2) as cluster:
            fill(cluster.model, 1)
            assert (await cluster.scheme.send()).ok
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.tolist() == [1, 1, 1]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


# -- broadcasts --------------------------------------------------------------------------------------


async def test_all_get_it_at_once(broadcasts: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async with LocalCluster(BROADCAST, workers=3, model=lambda: Uniform(size=LARGE)) as cluster:
        scheme = cluster.scheme
        for version in range(1, 6):
            fill(cluster.model, version)
            assert (await scheme.send()).ok
            assert [value_of(worker.model) for worker in cluster.workers] == [version] * 3
        assert broadcasts[-5:] == [1, 2, 3, 4, 5]
        await within(scheme.aclose())
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [warning for warning in warnings if "version 5 stays in service" not in warning] == []


async def test_a_worker_that_is_dropped_is_not_waited_for(broadcasts: list[int]) -> None:
    async with LocalCluster(BROADCAST, workers=3, on_failure="drop") as cluster:
        scheme = cluster.scheme
        assert isinstance(scheme, DistributedWeightSyncScheme)
        await cluster.workers[1].close()
        await eventually(lambda: 1 not in scheme.sender_transports, "it is gone")
        fill(cluster.model, 1)
        await scheme.send()
        await scheme.reconnect()
        broadcasts.clear()
        fill(cluster.model, 2)
        assert (await scheme.send()).ok
        assert broadcasts == [2]
        assert [value_of(cluster.workers[worker].model) for worker in (0, 2)] == [2, 2]


async def test_two_sends_in_a_row_and_nobody_waits() -> None:
    async with LocalCluster(BROADCAST, workers=2) as cluster:
        scheme = cluster.scheme
        for version in range(1, 40, 2):
            for value in (version, version + 1):  # no turn of the loop between the two
                fill(cluster.model, value)
                await scheme.send(wait=False)
            assert (await scheme.wait_ack()).ok
            assert [value_of(worker.model) for worker in cluster.workers] == [version + 1] * 2


async def test_who_comes_late_gets_what_was_broadcast(broadcasts: list[int]) -> None:
    async with LocalCluster(BROADCAST, workers=3) as cluster:
        scheme, late = cluster.scheme, cluster.workers[2]
        assert isinstance(scheme, DistributedWeightSyncScheme)
        fill(cluster.model, 1)
        assert (await scheme.send()).ok
        await late.close()
        await eventually(lambda: 2 not in scheme.sender_transports, "it is gone")
        late.init()
        await within(late.connect())
        await late.serve()
        assert value_of(late.model) == 1
        await scheme.reconnect()
        broadcasts.clear()
        fill(cluster.model, 2)
        assert (await scheme.send()).ok
        assert broadcasts == [2]
        assert [value_of(worker.model) for worker in cluster.workers] == [2] * 3


async def test_some_get_it_by_themselves(broadcasts: list[int]) -> None:
    async with LocalCluster(BROADCAST, workers=3) as cluster:
        scheme = cluster.scheme
        broadcasts.clear()
        fill(cluster.model, 1)
        assert (await scheme.send(worker_ids=[0, 2])).ok
        assert [value_of(worker.model) for worker in cluster.workers] == [1, 0, 1]
        assert broadcasts == []
        fill(cluster.model, 2)
        assert (await scheme.send()).ok
        assert [value_of(worker.model) for worker in cluster.workers] == [2, 2, 2]
        assert broadcasts == [2]


async def test_who_waits_for_one_that_dies_is_not_forgotten() -> None:
    """One has come for a version, the other has not yet, and goes."""
    async with LocalCluster(BROADCAST, workers=2, serve=False, on_failure="drop") as cluster:
        scheme, (ready, busy) = cluster.scheme, cluster.workers
        await ready.serve()
        fill(cluster.model, 1)
        sending = asyncio.create_task(scheme.send())
        link = connections_of(scheme)[0]
        await eventually(lambda: link.ready, "one has come for it")
        transport = busy.scheme.receiver_transport
        assert transport is not None
        await transport.aclose()
        report = await within(sending)
        assert {worker: one.status for worker, one in report.workers.items()} == {0: "applied", 1: "lost"}
        assert value_of(ready.model) == 1


async def test_a_thread_that_gloo_keeps_writes_into_no_later_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was lost while the bytes arrived; the next ones come into other memory."""
    held, release = threading.Event(), threading.Event()
    move = ProcessGroupMember._move_all

    def hold(self: ProcessGroupMember, buffer: torch.Tensor, *args: Any) -> None:
        if self.rank == 0 or held.is_set():
            return move(self, buffer, *args)
        held.set()
        assert release.wait(PATIENCE)
        buffer.view(torch.float32).fill_(99)
        raise RuntimeError("timed out")

    case = SchemeCase("distributed", distributed("p2p"))
    async with LocalCluster(
        case, workers=1, model=lambda: Uniform(size=LARGE), reconnect_for=PATIENCE
    ) as cluster:
        scheme, worker = cluster.scheme, cluster.workers[0]
        monkeypatch.setattr(ProcessGroupMember, "_move_all", hold)
        fill(cluster.model, 1)
        await scheme.send(wait=False)
        await eventually(held.is_set, "its bytes arrive")
        transport = connections_of(scheme)[0].transport
        assert isinstance(transport, TCPConnection)
        transport.give_up("cut")
        await eventually(lambda: value_of(worker.model) == 1, "it has them over the next connection")
        for version in (2, 3):
            fill(cluster.model, version)
            assert (await scheme.send()).ok
        release.set()
        await eventually(lambda: threads_of_ranks() == 2, "the thread has ended")
        assert value_of(worker.model) == 3
        fill(cluster.model, 4)
        assert (await scheme.send()).ok
        assert value_of(worker.model) == 4


async def test_reconnect_is_for_a_connected_sender() -> None:
    with pytest.raises(NotConnectedError):
        await DistributedWeightSyncScheme().reconnect()


# -- the end -----------------------------------------------------------------------------------------

_LEFT_OPEN = """
import asyncio, copy, torch, aiosync

async def main():
    scheme = aiosync.DistributedWeightSyncScheme(timeout=30)
    scheme.init_on_sender(model_id="policy", model=torch.nn.Linear(3, 3), num_workers=1)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=torch.nn.Linear(3, 3), worker_idx=0)
    await asyncio.gather(scheme.connect(), worker.connect())
    kept.extend((scheme, worker))

kept = []
asyncio.run(main())
print("done")
"""


def test_a_process_that_closes_nothing_can_end() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, timeout=PATIENCE * 4, check=False
    )
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    assert "terminate" not in found.stderr
