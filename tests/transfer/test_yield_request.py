"""Workers that compute yield the processor while a send is in progress, so often a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiosync.errors import AiosyncError, ArenaAllocationError, ProtocolError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.framing import encode_payload
from aiosync.receiver import commit_gate
from aiosync.receiver.commit_gate import CommitGate
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.receiver.give_way import give_way
from aiosync.sender.worker_group import WorkerGroup
from aiosync.transfer import yield_request
from aiosync.transfer.base import MemoryAccess
from aiosync.transfer.mapped import MappedInbound, MappedOutbound, MappedPayload
from aiosync.transfer.slots import SlotPool, SlotVersion
from aiosync.transfer.yield_request import NO_REQUEST, HeededRequest, YieldRequest, asking_to_yield
from aiosync.transports._offload import Offloader
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.seams import groups_of

MOST = yield_request._MOST_YIELDS
PER_SECOND = yield_request._YIELDS_PER_SECOND
LAYOUT = Layout([("a", (4,), torch.float32)])
MODULE = partial(torch.nn.Linear, 2, 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, and how long each yield takes."""
    found = [100.0, 0.0]
    monkeypatch.setattr(HeededRequest, "_not_before", 0.0)
    monkeypatch.setattr(HeededRequest, "_whole_at", 0.0)
    monkeypatch.setattr(yield_request, "time", SimpleNamespace(perf_counter=lambda: found[0]))
    return found


@pytest.fixture
def yields(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each time that the processor is yielded."""
    found: list[int] = []

    def yield_processor() -> None:
        found.append(1)
        clock[0] += clock[1]

    monkeypatch.setattr(yield_request, "yield_processor", yield_processor)
    return found


def attached(request: YieldRequest) -> HeededRequest:
    """The worker's side of the request."""
    return HeededRequest.attach(request.handle_for(os.getpid()))


def test_a_worker_yields_while_any_send_is_in_progress(yields: list[int]) -> None:
    request = YieldRequest()
    heeded = attached(request)
    for in_progress, act in enumerate([lambda: None, request.begin, request.begin, request.end]):
        act()
        give_way(heeded, committed=False)
        assert len(yields) == in_progress
    request.end()
    give_way(heeded, committed=False)
    assert len(yields) == 3
    request.close()


def test_a_worker_computes_for_as_long_as_it_has_let_others(yields: list[int], clock: list[float]) -> None:
    request = YieldRequest()
    heeded = attached(request)
    clock[1] = 0.25
    for sends in range(1, 4):  # at once after each other
        request.begin()
        give_way(heeded, committed=False)
        assert len(yields) == sends
        clock[0] += 0.125
        give_way(heeded, committed=False)
        assert len(yields) == sends
        clock[0] += 0.125
        request.end()
    request.close()


def test_after_a_yield_a_worker_computes_whoever_asks(yields: list[int], clock: list[float]) -> None:
    requests = [YieldRequest() for _ in range(2)]
    heeded = [attached(request) for request in requests]
    clock[1] = 0.25
    for request in requests:
        request.begin()
    for half in range(MOST):
        for each in heeded:
            give_way(each, committed=False)
        assert len(yields) == 1 + half // 2
        clock[0] += 0.125
    for request in requests:
        request.end()
        request.close()


@pytest.fixture
def memory() -> Iterator[dict[str, Any]]:
    """The handle of a file of 4 KiB, as another process would share it."""
    fd = os.memfd_create("test")
    os.truncate(fd, 4096)
    yield {"kind": "memfd", "pid": os.getpid(), "fd": fd, "inode": os.fstat(fd).st_ino, "nbytes": 1}
    os.close(fd)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "local", "key": "x"},
        {"kind": "cuda", "ipc": []},
        {"fd": 10**6},
        {"inode": 1},
        {"nbytes": 0, "size": 0},
        {"nbytes": -1},
        {"nbytes": 2**70},
        {"nbytes": "1"},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_mapped_is_ignored(wrong: dict[str, Any], memory: dict[str, Any]) -> None:
    HeededRequest.attach(memory)
    if "size" in wrong:
        os.truncate(memory["fd"], wrong["size"])
    handle = {**memory, **wrong}
    with pytest.raises(ProtocolError):
        HeededRequest.attach(handle)
    inbound, slot = MappedInbound(LAYOUT, MemoryAccess.VIEWED), Segment.shared(LAYOUT.nbytes)
    payload = MappedPayload(0, [(0, slot.handle_for(os.getpid()))], yields=handle)
    update = Update(round=0, version=0, payload=encode_payload(payload))
    inbound.expect(update)
    inbound.find(update)
    assert inbound.yield_request is NO_REQUEST
    slot.close()


def test_an_update_arrives_also_if_there_is_no_memory_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nbytes: int) -> Segment:
        raise ArenaAllocationError(nbytes, "too many open files")

    monkeypatch.setattr(Segment, "shared", fail)
    pool = SlotPool(LAYOUT, Segment.local, 1)
    group = WorkerGroup(set(), torch.device("cpu"), pool, Offloader("test"), "")
    outbound = MappedOutbound(group, MemoryAccess.READ_ONCE)
    payload = outbound.payload(SlotVersion(pool.grow(), 0, 0), Fetch())
    assert "yields" not in payload
    assert payload["new"]


def test_a_module_heeds_the_sender_of_a_gate_that_watches(yields: list[int]) -> None:
    requests, gates, module = [YieldRequest() for _ in range(2)], [CommitGate() for _ in range(2)], MODULE()
    guards = [ForwardGuard(gate, module, PATIENCE, lambda: None) for gate in gates]
    for request, gate in zip(requests, gates, strict=True):
        gate.heed(attached(request))
    requests[1].begin()
    guards[0].remove()
    module(torch.ones(2))
    assert len(yields) == 1
    guards[0] = ForwardGuard(gates[0], module, PATIENCE, lambda: None)
    guards[1].remove()
    requests[0].begin()
    requests[1].end()
    module(torch.ones(2))
    assert len(yields) == 2
    guards[0].remove()
    requests[0].end()
    for request in requests:
        request.close()


def test_without_the_interpreters_lock_passes_heed_the_request_too(
    yields: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_gate, "_ORDERED", False)
    request, gate, module = YieldRequest(), CommitGate(), MODULE()
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    gate.heed(attached(request))
    request.begin()
    module(torch.ones(2))
    assert len(yields) == 1
    request.end()
    guard.remove()
    request.close()


def test_a_process_yields_a_few_times_in_a_row_and_so_often_a_second(
    yields: list[int], clock: list[float]
) -> None:
    """Also for a send that never ends, perhaps because its worker hangs; and for several senders together."""
    requests = [YieldRequest() for _ in range(2)]
    heeded = [attached(request) for request in requests]
    for request in requests:
        request.begin()
    for seconds, more in [(0.0, MOST), (0.5 / PER_SECOND, 0), (1.0 / PER_SECOND, 1), (1000.0, MOST)]:
        clock[0] += seconds
        before = len(yields)
        for _ in range(2 * MOST):
            for each in heeded:
                give_way(each, committed=False)
        assert len(yields) - before == more
    for request in requests:
        request.end()
        request.close()


def test_a_thread_that_waits_for_a_send_asks_for_all_senders_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [YieldRequest() for _ in range(3)]
    heeded = [attached(request) for request in requests]
    monkeypatch.setattr(requests[0], "_owner", -1)  # the process that this one was forked from
    requests[1].close()
    with pytest.raises(ZeroDivisionError), asking_to_yield():
        assert [bool(each.byte[0]) for each in heeded] == [False, False, True]
        raise ZeroDivisionError
    assert not any(each.byte[0] for each in heeded)
    requests[0].close()
    requests[2].close()


@pytest.mark.parametrize("late", [True, False])
def test_the_passes_of_a_guarded_module_heed_the_request(late: bool, yields: list[int]) -> None:
    request, gate, module = YieldRequest(), CommitGate(), MODULE()
    if not late:
        gate.heed(attached(request))
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    if late:
        gate.heed(attached(request))
    module(torch.ones(2))
    assert not yields
    request.begin()
    module(torch.ones(2))
    assert len(yields) == 1
    gate.enter_blocking("a", "a", PATIENCE)
    give_way(gate.yield_request, committed=gate.leave("a"))
    assert len(yields) == 2
    request.end()
    module(torch.ones(2))
    gate.enter_blocking("a", "a", PATIENCE)
    give_way(gate.yield_request, committed=gate.leave("a"))
    assert len(yields) == 2
    guard.remove()
    request.close()


@pytest.mark.parametrize("case", [case for case in SCHEMES if case.name in ("shared", "process", "memory")])
async def test_workers_are_asked_to_yield_while_an_awaited_send_is_in_progress(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        (group,) = groups_of(cluster.scheme)
        request = group.yield_request
        assert request is not None
        async with cluster.workers[0].scheme.pinned():
            sending = asyncio.create_task(cluster.scheme.send())
            await eventually(lambda: bool(request._byte[0]), "the workers are asked")
            assert not sending.done()
        await within(sending)
        assert not request._byte[0]
        async with cluster.workers[0].scheme.pinned():
            await cluster.scheme.send(wait=False)
            assert not request._byte[0]
            waiting = asyncio.create_task(cluster.scheme.wait_ack())
            await eventually(lambda: bool(request._byte[0]), "the workers are asked")
        await within(waiting)
        assert not request._byte[0]
        with pytest.raises(AiosyncError):
            await cluster.scheme.send({"no such entry": torch.zeros(1)}, strict=False)
        assert not request._byte[0]


@pytest.mark.parametrize("seconds", [0.0, PATIENCE], ids=["ends", "reconnects"])
async def test_a_worker_that_has_lost_its_sender_heeds_it_no_longer(seconds: float) -> None:
    (case,) = [case for case in SCHEMES if case.name == "tcp"]
    async with LocalCluster(case, 1, serve=False) as cluster:
        receiver = cluster.workers[0].scheme.get_receiver()
        receiver._connector.seconds = seconds
        gate = receiver.model_applier.gate
        gate.heed(HeededRequest(b"\1"))
        receiver.connection_lost("the sender was killed")
        assert gate.yield_request is NO_REQUEST


def test_another_connection_brings_another_request() -> None:
    inbound = MappedInbound(LAYOUT, MemoryAccess.VIEWED)
    nothing = inbound.yield_request
    for _ in range(2):
        request, slot = YieldRequest(), Segment.shared(LAYOUT.nbytes)
        transport: Any = None
        inbound.attach(transport)
        assert inbound.yield_request is nothing
        new = [(0, slot.handle_for(os.getpid()))]
        update = Update(
            round=0,
            version=0,
            payload=encode_payload(MappedPayload(0, new, yields=request.handle_for(os.getpid()))),
        )
        inbound.expect(update)
        inbound.find(update)
        request.begin()
        assert inbound.yield_request.byte[0]
        request.close()
        slot.close()
    inbound.close()
