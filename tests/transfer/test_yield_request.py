"""Workers that compute yield the processor while a send is in progress, a few times for each send."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from aiosync.errors import AiosyncError
from aiosync.protocol.frames import Update
from aiosync.protocol.framing import encode_payload
from aiosync.receiver.commit_gate import CommitGate
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.transfer import yield_request
from aiosync.transfer.base import MemoryAccess
from aiosync.transfer.mapped import MappedInbound, MappedPayload
from aiosync.transfer.yield_request import HeededRequest, YieldRequest, asking_to_yield
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.seams import groups_of

MOST = yield_request._MOST_YIELDS


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each time that the processor is yielded."""
    found: list[int] = []
    monkeypatch.setattr(yield_request, "yield_processor", lambda: found.append(1))
    return found


def attached(request: YieldRequest) -> HeededRequest:
    """The worker's side of the request."""
    return HeededRequest.attach(request.handle_for(os.getpid()))


def test_a_worker_yields_while_any_send_is_in_progress(yields: list[int]) -> None:
    request = YieldRequest()
    heeded = attached(request)
    for in_progress, act in enumerate([lambda: None, request.begin, request.begin, request.end]):
        act()
        heeded.heed()
        assert len(yields) == in_progress
    request.end()
    heeded.heed()
    assert len(yields) == 3
    request.close()


def test_a_worker_yields_a_few_times_for_each_send(yields: list[int]) -> None:
    request = YieldRequest()
    heeded = attached(request)
    for sends in range(1, 300):  # more than a byte counts
        request.begin()
        for _ in range(MOST + 3):
            heeded.heed()
        assert len(yields) == sends * MOST
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
    request, gate, module = YieldRequest(), CommitGate(), torch.nn.Linear(2, 2)
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
    gate.leave_blocking("a")
    assert len(yields) == 2
    request.end()
    module(torch.ones(2))
    gate.enter_blocking("a", "a", PATIENCE)
    gate.leave_blocking("a")
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
        await cluster.scheme.send(wait=False)
        assert not request._byte[0]
        with pytest.raises(AiosyncError):
            await cluster.scheme.send({"no such entry": torch.zeros(1)}, strict=False)
        assert not request._byte[0]


def test_another_connection_brings_another_request() -> None:
    layout = Layout([("a", (4,), torch.float32)])
    inbound = MappedInbound(layout, MemoryAccess.VIEWED)
    nothing = inbound.yield_request
    for _ in range(2):
        request, slot = YieldRequest(), Segment.shared(layout.nbytes)
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
