"""A receiver that leaves the sender's memory keeps it from being written until nothing reads it any more."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from torch import Tensor

from aiosync.receiver import applier, staging
from tests.kit.cases import SCHEMES, SchemeCase, over_rpc
from tests.kit.clock import BRIEF, eventually, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.seams import is_connected, lose_connection

SHARED = next(case for case in SCHEMES if case.name == "shared")


def _returning(seconds: float) -> SchemeCase:
    return SchemeCase("rpc", over_rpc(share_memory=True, reconnect_for=seconds), views=True)


class Slow(Uniform):
    """A large model, which workers view in the sender's memory. Its forward pass waits to be let go."""

    def __init__(self) -> None:
        super().__init__(size=1 << 20)
        self.entered, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        held: Tensor = self.values[0].data
        self.entered.set()
        self.go.wait()
        return held


@asynccontextmanager
async def _pinned(worker: LocalWorker) -> AsyncIterator[Tensor]:
    async with worker.scheme.pinned():
        yield worker.model.values[0].data


@asynccontextmanager
async def _forward_pass(worker: LocalWorker) -> AsyncIterator[Tensor]:
    held = worker.model.values[0].data
    one_pass = asyncio.create_task(asyncio.to_thread(worker.model, held))
    await asyncio.to_thread(worker.model.entered.wait)
    try:
        yield held
    finally:
        worker.model.go.set()
        await one_pass


async def _hold(worker: LocalWorker, go: asyncio.Event) -> None:
    async with worker.scheme.pinned():
        await go.wait()


async def _close(worker: LocalWorker) -> None:
    await worker.close()


async def _reconnect(worker: LocalWorker) -> None:
    lose_connection(worker.scheme, "the link broke")
    await eventually(lambda: is_connected(worker.scheme), "the worker is connected again")


@pytest.mark.parametrize(
    ("case", "leave"), [(SHARED, _close), (_returning(30.0), _close), (_returning(30.0), _reconnect)]
)
@pytest.mark.parametrize("read", [_pinned, _forward_pass])
async def test_what_a_reader_reads_is_not_overwritten(
    read: Callable[[LocalWorker], AbstractAsyncContextManager[Tensor]],
    case: SchemeCase,
    leave: Callable[[LocalWorker], Coroutine[Any, Any, None]],
) -> None:
    outside = contextvars.copy_context()  # of the reader's body, which does not wait for itself
    async with LocalCluster(case, workers=2, model=Slow) as cluster:
        leaving, staying = cluster.workers
        leaving.scheme.get_receiver().model_applier.guard_forwards(10.0)
        fill(cluster.model, 1)
        await cluster.scheme.send()
        async with read(leaving) as held:
            ended = asyncio.create_task(leave(leaving), context=outside)
            await eventually(lambda: leaving.model.values[0].data_ptr() != held.data_ptr(), "it has left")
            await asyncio.wait([ended], timeout=0.5)
            for version in range(2, 6):  # more than there are slots
                fill(cluster.model, version)
                await cluster.scheme.send(worker_ids=[staying.index])
            assert held.unique().tolist() == [1]
            assert not ended.done()
        await within(ended)
        assert value_of(leaving.model) in (1, 5)


async def test_a_pass_begins_while_the_receiver_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(SHARED, workers=2, model=Slow) as cluster:
        leaving, staying = cluster.workers
        leaving.scheme.get_receiver().model_applier.guard_forwards(10.0)
        fill(cluster.model, 1)
        await cluster.scheme.send()
        held = leaving.model.values[0].data
        acting = threading.Thread(target=leaving.model, args=[held])

        def leave(*arguments: Any) -> None:
            if acting.ident is None:  # the other worker leaves later
                acting.start()
                leaving.model.entered.wait()
            staging.leave(*arguments)

        monkeypatch.setattr(applier, "leave", leave)
        closing = asyncio.create_task(leaving.close())
        await eventually(lambda: leaving.model.values[0].data_ptr() != held.data_ptr(), "it has left")
        await asyncio.wait([closing], timeout=0.5)
        for version in range(2, 6):
            fill(cluster.model, version)
            await cluster.scheme.send(worker_ids=[staying.index])
        assert held.unique().tolist() == [1]
        leaving.model.go.set()
        await within(closing)
        acting.join()


async def test_a_reader_that_stays_does_not_keep_a_receiver_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(applier, "_LAST_READERS", 0.1)
    async with LocalCluster(SHARED, workers=1, model=Slow) as cluster:
        (worker,) = cluster.workers
        go = asyncio.Event()
        fill(cluster.model, 1)
        await cluster.scheme.send()
        holder = asyncio.create_task(_hold(worker, go))
        await asyncio.sleep(0)
        await worker.close()
        assert "is closed although its model is in use" in caplog.text
        assert value_of(worker.model) == 1
        go.set()
        await holder


async def test_readers_that_begin_later_do_not_hold_up_a_reconnection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalCluster(_returning(30.0), workers=1, model=Slow) as cluster:
        (worker,) = cluster.workers
        gate = worker.scheme.get_receiver().model_applier.gate
        readers, looked = gate.readers, asyncio.Event()

        def look() -> list[object]:
            looked.set()
            return readers()

        monkeypatch.setattr(gate, "readers", look)
        outside = contextvars.copy_context()
        async with worker.scheme.pinned():
            lost = asyncio.create_task(_reconnect(worker), context=outside)
            await within(looked.wait())
            later = asyncio.create_task(_hold(worker, go := asyncio.Event()), context=outside)
            await asyncio.sleep(0)
            assert not lost.done()
        await within(lost)
        assert not later.done()
        go.set()
        await within(later)


async def test_a_worker_whose_model_stays_in_use_gives_the_sender_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LocalCluster(_returning(BRIEF), workers=1, model=Slow) as cluster:
        (worker,) = cluster.workers
        holding = asyncio.create_task(_hold(worker, go := asyncio.Event()))
        await asyncio.sleep(0)
        lose_connection(worker.scheme, "the link broke")
        await within(worker.scheme.wait_closed())
        assert "the model was still in use" in str(worker.scheme.ended)
        assert "gives the sender up" in caplog.text
        go.set()
        await within(holding)


async def test_a_model_that_is_replaced_may_still_be_read() -> None:
    """The version in service is in the worker's memory then, and a reader may be in the sender's."""
    async with LocalCluster(SHARED, workers=2, model=Slow) as cluster:
        leaving, staying = cluster.workers
        fill(cluster.model, 1)
        await cluster.scheme.send()
        outside = contextvars.copy_context()
        async with leaving.scheme.pinned():
            held = leaving.model.values[0].data
            await leaving.scheme.rebind(model=Slow())
            ended = asyncio.create_task(leaving.close(), context=outside)
            await asyncio.wait([ended], timeout=0.5)
            for version in range(2, 6):
                fill(cluster.model, version)
                await cluster.scheme.send(worker_ids=[staying.index])
            assert held.unique().tolist() == [1]
        await within(ended)


async def test_a_body_closes_its_own_receiver(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aiosync")
    async with LocalCluster(SHARED, workers=1, model=Slow) as cluster:
        (worker,) = cluster.workers
        fill(cluster.model, 1)
        await cluster.scheme.send()
        async with worker.scheme.pinned():
            await worker.close()
        assert not caplog.records
        assert value_of(worker.model) == 1
