"""A receiver loop that fails does not leave a receiver that is connected and applies nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from aiosync import RemoteApplyError, WorkerLostError
from aiosync.receiver import applier
from aiosync.transfer.slots import LeaseKind
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import BRIEF, eventually, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.seams import connections_of, leases_of, lose_connection, waits_for_readers

CASES = {case.name: case for case in SCHEMES}


FAILURE = RuntimeError("the device has failed")


def _have_it_fail(worker: LocalWorker, patch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise FAILURE

    applier = worker.scheme.get_receiver().applier
    patch.setattr(applier, "take_at_once", lambda pending: False)
    patch.setattr(applier, "settle", fail)


def _large() -> Uniform:
    return Uniform(size=1 << 20)  # the worker's model views the sender's memory


@pytest.mark.parametrize(
    "case", [CASES[name] for name in ("shared", "memory", "process", "tcp")], ids=lambda c: c.name
)
async def test_the_sender_loses_a_worker_whose_loop_fails(
    case: SchemeCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with LocalCluster(case, workers=2) as cluster:
        bad, good = cluster.workers
        _have_it_fail(bad, monkeypatch)
        fill(cluster.model, 1)
        with pytest.raises(WorkerLostError, match="the device has failed") as caught:
            await cluster.scheme.send()
        assert caught.value.workers == (0,)
        assert value_of(good.model) == 1
        await within(bad.scheme.wait_closed())
        assert "the device has failed" in str(bad.scheme.ended)
        await bad.rest()
        assert bad.lost is not None and bad.lost.__cause__ is FAILURE
        assert any(record.exc_info and record.exc_info[1] is FAILURE for record in caplog.records)


async def test_the_model_keeps_its_version_when_the_loop_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(CASES["shared"], workers=1, model=_large) as cluster:
        (bad,) = cluster.workers
        _have_it_fail(bad, monkeypatch)
        for version in range(1, 5):
            fill(cluster.model, version)
            with suppress(WorkerLostError):
                await cluster.scheme.send()
            await within(bad.scheme.wait_closed())
            assert value_of(bad.model) == 1
        kept = [lease for lease in leases_of(cluster.scheme) if lease.kind is LeaseKind.DETACHED]
        assert kept
        await bad.close()  # which says that the slot is not read any more
        await eventually(lambda: not set(kept) & set(leases_of(cluster.scheme)), "the slots are released")
        assert value_of(bad.model) == 1


async def test_a_worker_whose_loop_fails_is_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a listener that can do that, such as Ray's."""
    async with LocalCluster(CASES["shared"], workers=1) as cluster:
        lost: list[int] = []

        async def bring_back(worker: int) -> None:
            lost.append(worker)

        monkeypatch.setattr(cluster.scheme.get_sender()._listener, "lost", bring_back)
        _have_it_fail(cluster.workers[0], monkeypatch)
        with pytest.raises(WorkerLostError):
            await cluster.scheme.send()
        await eventually(lambda: lost == [0], "the listener gets the lost worker")


async def test_a_loop_that_fails_after_the_sender_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(CASES["shared"], workers=1, model=_large) as cluster:
        (bad,) = cluster.workers
        _have_it_fail(bad, monkeypatch)
        fill(cluster.model, 1)
        async with bad.scheme.pinned():
            await cluster.scheme.send(wait=False)
            await eventually(lambda: waits_for_readers(bad.scheme), "the commit waits for the reader")
            await cluster.scheme.aclose()
            await eventually(lambda: bad.scheme.ended is not None, "the sender has closed")
        await eventually(lambda: bad.lost is not None, "the body was cancelled")
        assert "the device has failed" in str(bad.lost)


class _Waits:
    """A context whose second update awaits a task that was cancelled."""

    def __init__(self) -> None:
        self.first = True

    async def update_policy_weights_(self, **weights: Any) -> None:
        if self.first:
            self.first = False
            return
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task


class _Raises:
    """A context that is called in this event loop, and raises what a task that it asks was ended with."""

    def __init__(self) -> None:
        self.first = True

    def update_policy_weights_(self, **weights: Any) -> None:
        if self.first:
            self.first = False
            return
        raise asyncio.CancelledError


@pytest.mark.parametrize("kind", [_Waits, _Raises])
async def test_what_a_context_asks_may_be_cancelled(kind: type[_Waits | _Raises]) -> None:
    context = kind()
    cluster = LocalCluster(CASES["shared"], workers=1)
    (worker,) = cluster.workers
    worker.init(context=context)
    async with cluster:
        fill(cluster.model, 1)
        with pytest.raises(RemoteApplyError, match="was cancelled"):
            await within(cluster.scheme.send())
        assert worker.scheme.ended is None


class _Loses:
    """A context that loses the cancellation of its second update, as a task group in it may."""

    def __init__(self) -> None:
        self.updates = 0

    async def update_policy_weights_(self, **weights: Any) -> None:
        self.updates += 1
        if self.updates > 1:
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("the clean-up has failed")


@pytest.mark.parametrize("call", ["receiving", "receive"])
async def test_a_context_that_loses_a_cancellation(call: str) -> None:
    context = _Loses()
    cluster = LocalCluster(CASES["shared"], workers=1, serve=call == "receiving")
    (worker,) = cluster.workers
    worker.init(context=context)
    async with cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        if call == "receiving":
            await eventually(lambda: context.updates == 2, "the context is called")
            await worker.rest()
        else:
            assert await within(worker.scheme.receive(timeout=BRIEF)) is None
        assert worker.scheme.ended is None
        assert value_of(worker.model) == 0


async def test_a_loop_that_fails_after_the_sender_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(CASES["shared"], workers=1, serve=False, model=_large) as cluster:
        (bad,) = cluster.workers
        _have_it_fail(bad, monkeypatch)
        with pytest.raises(WorkerLostError, match="has failed"):
            async with bad.scheme.receiving():
                async with bad.scheme.pinned():
                    await cluster.scheme.send(wait=False)
                    await eventually(lambda: waits_for_readers(bad.scheme), "the commit waits for the reader")
                    lose_connection(bad.scheme, "the link broke")
                    with suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
                for _ in range(10):  # the body ends later than the loop
                    await asyncio.sleep(0)


async def test_receive_beside_a_loop_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(CASES["shared"], workers=1, serve=False, model=_large) as cluster:
        (bad,) = cluster.workers
        _have_it_fail(bad, monkeypatch)
        with pytest.raises(WorkerLostError):
            async with bad.scheme.receiving():
                receiving = asyncio.create_task(bad.scheme.receive())
                await asyncio.sleep(0)
                await cluster.scheme.send(wait=False)
                await asyncio.Event().wait()
        with pytest.raises(WorkerLostError):
            await within(receiving)


async def test_the_applier_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for the copy: the worker leaves all the same."""
    async with LocalCluster(CASES["shared"], workers=2, model=_large) as cluster:
        bad, good = cluster.workers
        fill(cluster.model, 1)
        await cluster.scheme.send()

        def leave(*arguments: object) -> None:
            raise RuntimeError("there is no memory")

        with monkeypatch.context() as patch:
            patch.setattr(applier, "leave", leave)
            waiting = asyncio.create_task(bad.scheme.wait_closed())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="there is no memory"):
                await bad.close()
        await within(waiting)
        await eventually(lambda: 0 not in connections_of(cluster.scheme), "the sender knows")
        for version in range(2, 6):
            fill(cluster.model, version)
            await cluster.scheme.send(worker_ids=[good.index])
