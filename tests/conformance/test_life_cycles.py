"""Odd orders of calls: closing while the other side sends, other event loops, forked children."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import sys
import time
from typing import Any

import pytest
from torch import nn

from aiosync import (
    AiosyncError,
    AlreadyConnectedError,
    InvalidArgumentError,
    WorkerLostError,
    WrongEventLoopError,
)
from aiosync.receiver import applier, staging
from tests.kit import scenarios
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import PATIENCE, SCALE, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster, Worker
from tests.kit.seams import lookups_ended

LOCAL = [case for case in SCHEMES if case.name in ("shared", "process", "tcp", "memory")]


@pytest.mark.parametrize("size", [16, 100_000])
async def test_a_worker_closes_while_the_trainer_sends(case: SchemeCase, size: int) -> None:
    for attempt in range(6):
        async with LocalCluster(case, model=lambda: Uniform(size=size)) as cluster:
            leaving, staying = cluster.workers
            fill(cluster.model, 1)
            send = asyncio.create_task(cluster.scheme.send())
            for _ in range(attempt * 3):
                await asyncio.sleep(0)
            await leaving.close()
            try:
                await within(send)
            except WorkerLostError as exc:
                assert exc.workers == (0,)
            fill(cluster.model, 2)
            try:
                await within(cluster.scheme.send())
            except WorkerLostError as exc:
                assert exc.workers == (0,)
            assert staying.scheme.version == 2


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_closing_ends_connect(case: SchemeCase, turns: int) -> None:
    """On both sides, however far it has come."""
    cluster = LocalCluster(case)
    first, second = cluster.workers
    connecting = [asyncio.create_task(cluster.scheme.connect()), asyncio.create_task(first.connect())]
    for _ in range(turns):
        await asyncio.sleep(0)
    await first.close()
    await lookups_ended()
    await within(cluster.scheme.aclose())
    for task in connecting:
        try:
            await within(task, PATIENCE / 3)
        except AiosyncError:
            pass
        else:
            assert task is connecting[1]
    await second.close()
    cluster.recipe.close()


async def test_version_and_reason_stay_after_the_end(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        first, second = cluster.workers
        await cluster.scheme.send()
        await cluster.scheme.send()
        await first.close()
        await second.rest()
        await cluster.scheme.aclose()
        await within(second.scheme.wait_closed())
        reason = second.scheme.ended
        await second.close()
    assert [scheme.version for scheme in (cluster.scheme, first.scheme, second.scheme)] == [2, 2, 2]
    assert reason is not None
    assert second.scheme.ended == reason


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what asyncio says of a loop that ended too early
@pytest.mark.parametrize("here", LOCAL, ids=lambda case: case.name)
def test_another_event_loop(here: SchemeCase) -> None:
    _use_another_event_loop(here)
    gc.collect()


def _use_another_event_loop(here: SchemeCase) -> None:
    scheme = here.build(1, {"timeout": PATIENCE}).scheme
    scheme.init_on_sender(model_id="policy", model=nn.Linear(2, 2), num_workers=1)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=nn.Linear(2, 2), worker_idx=0)

    async def connect() -> None:
        await asyncio.gather(scheme.connect(), worker.connect())

    async def receiving() -> None:
        async with worker.receiving():
            raise AssertionError("the body was entered")

    async def pinned() -> None:
        async with worker.pinned():
            raise AssertionError("the body was entered")

    asyncio.run(connect())
    began = time.monotonic()
    calls = (scheme.send, scheme.wait_ack, worker.receive, receiving, pinned, worker.aclose, scheme.aclose)
    for call in calls:
        with pytest.raises(WrongEventLoopError, match=r"within one asyncio\.run\(\)"):
            asyncio.run(call())
    assert time.monotonic() - began < PATIENCE / 2
    for closed in (scheme, worker):
        asyncio.run(closed.aclose())
        assert closed.version == 0


def _watched_processes() -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("pidfd" in os.readlink(link) for link in links if os.path.islink(link))


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors of processes are Linux's")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what asyncio says of a loop that ended too early
@pytest.mark.parametrize("name", ["shared", "process", "tcp"])
def test_workers_of_a_sender_whose_event_loop_was_closed(name: str) -> None:
    before = _watched_processes()
    (case,) = (case for case in SCHEMES if case.name == name)

    async def leave() -> ProcessCluster:
        cluster = ProcessCluster(case, workers=1)
        await cluster.__aenter__()
        cluster.workers[0].leave_loop()
        return cluster

    async def look(worker: Worker) -> None:
        worker.join_loop()
        await worker.run(scenarios.wait_closed)
        await worker.close()

    cluster = asyncio.run(leave())
    assert _watched_processes() == before + (name != "tcp")
    with pytest.raises(WrongEventLoopError):
        asyncio.run(cluster.scheme.aclose())
    assert _watched_processes() == before
    asyncio.run(look(cluster.workers[0]))
    cluster.recipe.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_worker_whose_event_loop_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model leaves the sender's memory before the sender learns that it has gone."""
    (case,) = (case for case in SCHEMES if case.name == "shared")
    cluster = LocalCluster(case, workers=1, model=lambda: Uniform(size=1 << 20))
    (worker,) = cluster.workers
    reasons: list[str] = []
    cluster.scheme.on_event(lambda event: reasons.append(event.message) if event.kind == "lost" else None)
    connecting = asyncio.create_task(cluster.scheme.connect())
    await asyncio.to_thread(asyncio.run, worker.connect())
    await within(connecting)
    order: list[str] = []
    transport = worker.scheme.receiver_transport
    assert transport is not None
    abandon = transport.abandon_loop

    def leave(*arguments: Any) -> None:
        order.append("copied")
        staging.leave(*arguments)

    def abandon_loop() -> None:
        order.append("closed")
        abandon()

    monkeypatch.setattr(applier, "leave", leave)
    monkeypatch.setattr(transport, "abandon_loop", abandon_loop)
    with pytest.raises(WrongEventLoopError):
        await asyncio.to_thread(asyncio.run, worker.scheme.aclose())
    assert order == ["copied", "closed"]
    await eventually(lambda: bool(reasons), "the sender knows")
    assert reasons == ["the worker has closed"]
    await cluster.scheme.aclose()
    cluster.recipe.close()


@pytest.mark.parametrize("here", LOCAL, ids=lambda case: case.name)
async def test_an_event_loop_in_another_thread(here: SchemeCase) -> None:
    async with LocalCluster(here, workers=1) as cluster:
        for call in (cluster.scheme.send, cluster.scheme.aclose, cluster.workers[0].scheme.aclose):
            with pytest.raises(WrongEventLoopError, match="not the one that runs here"):
                await asyncio.to_thread(asyncio.run, call())
        assert (await cluster.scheme.send()).ok  # nothing of it was closed


async def test_a_killed_worker_whose_child_lives_on(process_case: SchemeCase) -> None:
    async with ProcessCluster(process_case) as cluster:
        victim = cluster.workers[0]
        await victim.run(scenarios.fork_a_sleeper)
        gone = asyncio.Event()
        cluster.scheme.on_event(lambda event: gone.set() if event.kind == "lost" else None)
        victim.kill()
        killed = time.monotonic()
        await within(gone.wait())
        assert time.monotonic() - killed < 1.0 * max(1.0, SCALE)
        with pytest.raises(AiosyncError):
            await cluster.scheme.send()


async def test_entering_a_connected_scheme_leaves_it_connected(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        for scheme in (cluster.scheme, cluster.workers[0].scheme):
            with pytest.raises(AlreadyConnectedError):
                async with scheme:
                    raise AssertionError("it was entered")
        fill(cluster.model, 1)
        await within(cluster.scheme.send())
        assert cluster.workers[0].scheme.version == 1


async def test_a_wrong_number_of_workers_leaves_the_scheme_as_it_was(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    try:
        with pytest.raises(InvalidArgumentError, match="min_workers: expected an integer >= 0, got 'x'"):
            await cluster.scheme.connect(min_workers="x")  # type: ignore[arg-type]
        await within(cluster.connect())
        assert (await within(cluster.scheme.send())).ok
    finally:
        await cluster.close()


async def test_a_sender_may_be_initialised_twice(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    try:
        cluster.workers.clear()
        with pytest.raises(InvalidArgumentError):  # which changes nothing
            cluster.scheme.init_on_sender(model_id="policy")
        assert cluster.scheme.initialized_on_sender
        cluster.scheme.init_on_sender(model_id="policy", model=cluster.model, num_workers=2)
        for index in range(2):
            cluster.add(index)
        await within(cluster.connect())
        assert (await within(cluster.scheme.send())).ok
    finally:
        await cluster.close()


async def test_two_connects_at_once(case: SchemeCase) -> None:
    cluster = LocalCluster(case, workers=1)
    (worker,) = cluster.workers
    try:
        connects = [asyncio.create_task(cluster.scheme.connect()) for _ in range(3)]
        await asyncio.sleep(0)
        await within(worker.connect())
        await within(asyncio.gather(*connects))
        await worker.serve()
        fill(cluster.model, 1)
        assert (await within(cluster.scheme.send())).version == 1
        assert value_of(worker.model) == 1
    finally:
        await cluster.close()
