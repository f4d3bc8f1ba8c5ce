"""Versions that a send has overwritten and then failed, and workers that join or leave meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiosync import AiosyncError, RemoteApplyError
from aiosync._deadline import Deadline
from aiosync.protocol.frames import Bye
from aiosync.sender.lost_workers import DroppedConnection
from aiosync.transfer.slots import LeaseKind
from tests.kit.cases import SCHEMES
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.seams import (
    binding_of,
    connections_of,
    groups_of,
    lose_connection,
    stop_reading,
    waits_for_readers,
    wake_reading,
)

SHARED = next(case for case in SCHEMES if case.name == "shared")
OVERWRITTEN = "overwritten before it had it"


@asynccontextmanager
async def _one_of_two(max_slots: int = 2) -> AsyncIterator[LocalCluster]:
    """Worker 0 is connected, and does not serve. Worker 1 may connect."""
    cluster = LocalCluster(SHARED, workers=2, serve=False, max_slots=max_slots)
    try:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(cluster.scheme.connect(min_workers=1), cluster.workers[0].connect())
        yield cluster
    finally:
        await cluster.close()


@asynccontextmanager
async def _failing(
    cluster: LocalCluster, workers: set[int], *, overflow: bool = False
) -> AsyncIterator[None]:
    """The body runs while a send writes its slot. After it that send fails."""
    sender, deadline = cluster.scheme.get_sender(), Deadline.after(PATIENCE)
    sources = await sender.source.extract(None, workers, deadline)
    async with sender.publisher.lock.hold():
        publication = await sender.publisher.prepare(
            sources, workers, strict=True, joint=None, deadline=deadline, may_overflow=overflow
        )
        (write,) = publication.writes
        assert write.reclaimed and write.overflow == overflow
        yield
        write.begun = True
        publication.publisher.discard(publication)


@asynccontextmanager
async def _without_a_free_slot(cluster: LocalCluster) -> AsyncIterator[None]:
    (group,) = groups_of(cluster.scheme)
    kept = [group.pool.lease(slot, LeaseKind.WRITING) for slot in group.pool.slots]
    try:
        yield
    finally:
        for lease in kept:
            lease.release()


async def test_a_call_that_waits_for_an_older_version_goes_on() -> None:
    async with LocalCluster(SHARED, workers=1, max_slots=3) as cluster:
        scheme, (worker,) = cluster.scheme, cluster.workers
        async with worker.scheme.pinned():
            fill(cluster.model, 1)
            first = asyncio.create_task(scheme.send())
            await eventually(lambda: waits_for_readers(worker.scheme), "version 1 is about to be committed")
            waiting = asyncio.create_task(scheme.wait_ack())
            await asyncio.sleep(0)
            fill(cluster.model, 2)
            await scheme.send(wait=False)
            async with _failing(cluster, {0}):
                second = asyncio.create_task(scheme.wait_ack())
                await asyncio.sleep(0)
            with pytest.raises(AiosyncError, match=OVERWRITTEN):
                await within(second)
            assert not first.done() and not waiting.done()
        assert (await within(first)).version == 1
        assert (await within(waiting)).workers[0].version == 1
        with pytest.raises(AiosyncError, match=OVERWRITTEN):
            await within(scheme.wait_ack())
        assert (await within(scheme.send())).ok
        assert (await within(scheme.wait_ack())).ok


async def test_a_worker_that_was_to_be_welcomed_with_it() -> None:
    async with _one_of_two() as cluster:
        await cluster.scheme.send(worker_ids=0, wait=False)
        (group,), (_, late) = groups_of(cluster.scheme), cluster.workers
        kept = [group.pool.lease(slot, LeaseKind.WRITING) for slot in group.pool.slots if not slot.leases]
        async with _failing(cluster, {0, 1}):
            joining = asyncio.create_task(late.connect())
            await eventually(lambda: 1 in connections_of(cluster.scheme), "it waits for a version")
            waiting = asyncio.create_task(cluster.scheme.wait_ack(1))
            await asyncio.sleep(0)
            assert not waiting.done()
        with pytest.raises(AiosyncError, match=OVERWRITTEN):
            await within(waiting)
        for lease in kept:
            lease.release()
        fill(cluster.model, 2)
        await cluster.scheme.send(wait=False)
        await within(joining)
        assert (await within(cluster.scheme.wait_ack(1))).ok
        assert value_of(late.model) == 2


async def test_a_worker_that_joins_gets_the_version_that_waits_for_a_slot() -> None:
    async with _one_of_two() as cluster:
        _, late = cluster.workers
        async with _without_a_free_slot(cluster):
            fill(cluster.model, 1)
            await cluster.scheme.send(worker_ids=0, wait=False)
            assert groups_of(cluster.scheme)[0].overflow is not None
            await within(late.connect())
            assert late.scheme.version == 0
        await late.serve()
        assert (await within(cluster.scheme.wait_ack(1))).workers[1].version == 1
        assert value_of(late.model) == 1


async def test_a_worker_that_connects_again_has_not_got_what_was_lost() -> None:
    async with _one_of_two() as cluster:
        async with _without_a_free_slot(cluster):
            await cluster.scheme.send(worker_ids=0, wait=False)
            async with _failing(cluster, {0}, overflow=True):
                pass
        await cluster.workers[0].close()
        again = cluster.add(0)
        await within(again.connect())
        with pytest.raises(AiosyncError, match=OVERWRITTEN):
            await within(cluster.scheme.wait_ack(0))
        await again.serve()
        assert (await within(cluster.scheme.send(worker_ids=0))).ok
        assert (await within(cluster.scheme.wait_ack(0))).ok


async def test_the_version_before_is_the_newest_if_the_lost_one_is_withdrawn() -> None:
    async with _one_of_two() as cluster:
        _, late = cluster.workers
        fill(cluster.model, 1)
        sending = asyncio.create_task(cluster.scheme.send(worker_ids=0))
        await eventually(lambda: cluster.scheme.version == 1, "version 1 is published")
        async with _failing(cluster, {0}):
            pass
        with pytest.raises(AiosyncError, match=OVERWRITTEN):
            await within(sending)
        assert cluster.scheme.version == 0
        assert (await within(cluster.scheme.wait_ack(0))).workers[0].version == 0
        await within(late.connect())  # with the version before, which is whole
        assert value_of(late.model) == 0
        assert (await within(cluster.scheme.wait_ack(1))).ok


async def test_a_number_that_a_worker_has_taken_along_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _one_of_two(max_slots=3) as cluster:
        first, late = cluster.workers
        await first.serve()
        with monkeypatch.context() as patch:

            def check(views: object) -> None:
                raise ValueError("not this one")

            patch.setattr(binding_of(first.scheme), "check", check)
            stop_reading(first.scheme.receiver_transport)
            fill(cluster.model, 1)
            sending = asyncio.create_task(cluster.scheme.send(worker_ids=0))
            await eventually(lambda: cluster.scheme.version == 1, "version 1 is published")
            await within(late.connect())
            assert late.scheme.version == 1
            lose_connection(late.scheme, "the link broke")
            await late.close()
            await eventually(lambda: 1 not in connections_of(cluster.scheme), "the sender knows")
            wake_reading(first.scheme.receiver_transport)
            with pytest.raises(RemoteApplyError):
                await within(sending)
        fill(cluster.model, 2)
        assert (await within(cluster.scheme.send(worker_ids=0))).version == 2


async def test_a_version_is_given_back_after_its_slot_was_used_again() -> None:
    case = next(case for case in SCHEMES if case.name == "process")
    async with LocalCluster(case, workers=2) as cluster:
        first, _ = cluster.workers
        fill(cluster.model, 1)
        outside = contextvars.copy_context()
        async with first.scheme.pinned():
            sending = asyncio.create_task(cluster.scheme.send(worker_ids=0))
            connection = connections_of(cluster.scheme)[0]
            await eventually(lambda: connection.staged, "the worker has copied version 1")
            for _ in range(4):  # more than there are slots
                await cluster.scheme.send(worker_ids=1)
            another = asyncio.create_task(first.scheme.rebind(model=Uniform()), context=outside)
            with pytest.raises(AiosyncError, match=OVERWRITTEN):
                await within(sending)
            with pytest.raises(AiosyncError, match=OVERWRITTEN):
                await within(cluster.scheme.wait_ack(0))
        await within(another)
        assert (await within(cluster.scheme.send())).ok
        assert (await within(cluster.scheme.wait_ack())).ok


def test_a_dropped_worker_releases_with_its_last_goodbye() -> None:
    released: list[bool] = []
    connection = DroppedConnection(released.append)
    connection.frame_received(Bye(reason="its loop has failed", dropped=True))
    assert not released
    connection.frame_received(Bye())
    assert released == [True]
