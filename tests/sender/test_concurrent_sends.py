"""Versions that are refused, overwritten or given up while another call prepares the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from aiosync import (
    AiosyncError,
    ArenaAllocationError,
    InvalidArgumentError,
    RemoteApplyError,
    SharedMemWeightSyncScheme,
    SyncTimeoutError,
    WorkerLostError,
    atomic,
)
from aiosync._deadline import Deadline
from aiosync.sender.publisher import Publication
from aiosync.transfer.slots import LeaseKind, SlotVersion
from aiosync.transports._offload import Offloader
from aiosync.weights.segment import Segment
from tests.kit.cases import SCHEMES
from tests.kit.clock import BRIEF, PATIENCE, eventually, steps, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.seams import binding_of, connections_of, groups_of, stop_reading, wake_reading
from tests.kit.tcp import join, make_worker, sender_of
from tests.weights.models import Adapter

CASES = {case.name: case for case in SCHEMES}
SHARED = CASES["shared"]


async def test_parts_of_a_joint_update_are_withdrawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has to stay, say for a worker that has joined: then the other one stays too."""
    async with LocalCluster(SHARED, 1) as policy, LocalCluster(SHARED, 1) as value:
        _refuse(policy.workers[0], monkeypatch)
        publisher = policy.scheme.get_sender().publisher
        monkeypatch.setattr(publisher, "may_withdraw", lambda _: False)
        for version in (1, 2):
            with pytest.raises(AiosyncError):
                async with atomic(policy.scheme, value.scheme):
                    pass
            assert policy.scheme.version == version
            assert value.scheme.version == version
        monkeypatch.undo()


async def test_the_weights_of_a_send_whose_workers_have_all_gone() -> None:
    """They are what a worker gets that comes next, with the version's number."""
    model = Uniform(0.0)
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        async with scheme.get_sender().publisher.lock.hold():
            fill(model, 1)
            sending = asyncio.create_task(scheme.send())
            await steps(3)
            await worker.close()
            await eventually(lambda: not connections_of(scheme), "the worker has gone")
        with pytest.raises(WorkerLostError):
            await within(sending)
        assert scheme.version == 1
        late = make_worker(scheme.address)
        await within(late.connect())
        assert late.scheme.version == 1
        assert value_of(late.model) == 1
        await late.close()


@pytest.mark.parametrize("strict", [True, False])
async def test_a_worker_that_joins_while_a_send_is_prepared(strict: bool) -> None:
    """It gets that version too, and the next part."""
    model = Uniform(0.0)
    async with sender_of(model) as scheme:
        first, late = make_worker(scheme.address), make_worker(scheme.address)
        await join(scheme, first)
        async with scheme.get_sender().publisher.lock.hold():
            fill(model, 1)
            weights = model if strict else {"values.0": model.state_dict()["values.0"]}
            sending = asyncio.create_task(scheme.send(weights, strict=strict))
            await steps(3)
            await within(late.connect())
            await late.serve()
        report = await within(sending)
        assert sorted(report.workers) == [0]
        await within(scheme.wait_ack())
        assert late.scheme.version == 1
        assert _values(late) == _values(first)
        assert (await within(scheme.send({"values.1": torch.full((16,), 5.0)}, strict=False))).ok
        assert late.scheme.version == 2
        assert _values(late) == _values(first)
        for worker in (first, late):
            await worker.close()


def _refuse(worker: LocalWorker, patch: pytest.MonkeyPatch) -> None:
    def check(views: object) -> None:
        raise ValueError("not this one")

    patch.setattr(binding_of(worker.scheme), "check", check)


def _values(worker: LocalWorker) -> list[float]:
    return [float(parameter.detach()[0]) for parameter in worker.model.parameters()]


def _part(size: int) -> dict[str, Tensor]:
    return {"values.0": torch.full((size,), 2.0)}


async def test_a_part_does_not_build_on_what_all_workers_have_refused_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 1 << 20  # too large to be copied without a thread
    async with LocalCluster(SHARED, workers=1, model=lambda: Uniform(size=size)) as cluster:
        (worker,), scheme = cluster.workers, cluster.scheme
        offloader = groups_of(scheme)[0].offloader
        with monkeypatch.context() as patch:
            _refuse(worker, patch)
            stop_reading(worker.scheme.receiver_transport)
            fill(cluster.model, 1)
            refused = asyncio.create_task(scheme.send())
            await eventually(lambda: scheme.version == 1, "version 1 is published")
            copied, go_on, copy = asyncio.Event(), asyncio.Event(), offloader.copy

            async def copy_and_wait(*args: Any) -> bool:
                whole = await copy(*args)
                copied.set()
                await go_on.wait()
                return whole

            patch.setattr(offloader, "copy", copy_and_wait)
            sending = asyncio.create_task(scheme.send(_part(size), strict=False))
            await within(copied.wait())
            wake_reading(worker.scheme.receiver_transport)
            with pytest.raises(RemoteApplyError):
                await within(refused)
        go_on.set()
        assert (await within(sending)).version == 1  # the number of the version that all have refused
        assert _values(worker) == [2, 0, 0, 0]
        assert [float(tensor[0]) for tensor in scheme.weights.values(True, True)] == [2, 0, 0, 0]


async def test_a_part_does_not_build_on_what_was_for_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(SHARED, workers=2) as cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send(worker_ids=0)
        with monkeypatch.context() as patch:
            _refuse(cluster.workers[1], patch)
            fill(cluster.model, 2)
            with pytest.raises(RemoteApplyError):
                await cluster.scheme.send(worker_ids=1)
        with pytest.raises(InvalidArgumentError, match=r"not for workers \[1\]"):
            await cluster.scheme.send(_part(16), worker_ids=1, strict=False)
        assert (await cluster.scheme.send(_part(16), worker_ids=0, strict=False)).ok
        assert _values(cluster.workers[0]) == [2, 1, 1, 1]
        assert value_of(cluster.workers[1].model) == 0


@asynccontextmanager
async def _overwriting(cluster: LocalCluster) -> AsyncIterator[Publication]:
    """Version 1 was sent to worker 0, which has not fetched it. Yield the next one, which gets its slot."""
    scheme, (group,) = cluster.scheme, groups_of(cluster.scheme)
    sender, workers = scheme.get_sender(), {0, 1}
    fill(cluster.model, 1)
    await scheme.send(worker_ids=0, wait=False)
    kept = [group.pool.lease(slot, LeaseKind.WRITING) for slot in group.pool.slots if not slot.leases]
    deadline = Deadline.after(PATIENCE)
    fill(cluster.model, 2)
    sources = await sender.source.extract(None, workers, deadline)
    async with sender.publisher.lock.hold():
        publication = await sender.publisher.prepare(
            sources, workers, strict=True, joint=None, deadline=deadline
        )
        assert publication.writes[0].reclaimed
        yield publication
    for lease in kept:
        lease.release()


def _cluster() -> LocalCluster:
    return LocalCluster(SHARED, workers=2, serve=False, max_slots=2)


async def test_a_version_is_offered_again_to_those_alone_that_were_notified_of_it() -> None:
    async with _cluster() as cluster:
        connections = connections_of(cluster.scheme)
        async with _overwriting(cluster) as publication:
            publication.publisher.discard(publication)
        assert connections[0].notified is groups_of(cluster.scheme)[0].newest
        assert connections[1].notified is None
        for worker in cluster.workers:
            await worker.serve()
        assert (await within(cluster.scheme.wait_ack())).ok
        assert [value_of(worker.model) for worker in cluster.workers] == [1, 0]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_version_that_is_being_overwritten_is_not_acknowledged(begun: bool) -> None:
    async with _cluster() as cluster:
        async with _overwriting(cluster) as publication:
            with pytest.raises(SyncTimeoutError):
                await cluster.scheme.wait_ack(0, timeout=BRIEF)
            waiting = asyncio.create_task(cluster.scheme.wait_ack(0))
            await asyncio.sleep(0)
            publication.writes[0].begun = begun
            publication.publisher.discard(publication)
        for worker in cluster.workers:
            await worker.serve()
        if begun:  # version 1 is lost, which is not the worker's fault
            for call in (waiting, cluster.scheme.wait_ack(0)):
                with pytest.raises(AiosyncError, match="overwritten before it had it"):
                    await within(call)
            await cluster.scheme.send(wait=False)
        else:
            assert (await within(waiting)).ok
        report = await within(cluster.scheme.wait_ack(0))
        assert report.workers[0].version == 1 + begun
        assert value_of(cluster.workers[0].model) == 1 + begun


async def test_a_version_in_another_slot_outlives_a_write_that_fails() -> None:
    """All workers have refused the version whose slot is overwritten: the one before is the newest."""
    async with _cluster() as cluster:
        (group,) = groups_of(cluster.scheme)
        async with _overwriting(cluster) as publication:
            (other,) = (slot for slot in group.pool.slots if slot is not publication.writes[0].slot)
            before = SlotVersion(other, 0, 0)
            group._make_newest(before)
            publication.writes[0].begun = True
            publication.publisher.discard(publication)
            assert group.newest is before


@pytest.mark.parametrize("wait", [False, True])
async def test_a_slot_is_used_again_if_there_is_no_memory_for_another(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalCluster(SHARED, workers=1, serve=False) as cluster:
        (group,), (worker,) = groups_of(cluster.scheme), cluster.workers

        def allocate(nbytes: int) -> Segment:
            raise ArenaAllocationError(nbytes, "there is none left")

        monkeypatch.setattr(group.pool, "_allocate", allocate)
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        kept = [group.pool.lease(slot, LeaseKind.WRITING) for slot in group.pool.slots if not slot.leases]
        fill(cluster.model, 2)
        sending = asyncio.create_task(cluster.scheme.send(wait=wait))
        await eventually(lambda: cluster.scheme.version == 2, "version 2 is published")
        await worker.serve()
        await within(sending)
        assert (await within(cluster.scheme.wait_ack())).ok
        assert value_of(worker.model) == 2
        for lease in kept:
            lease.release()


async def test_an_overflow_version_that_is_lost_is_not_acknowledged() -> None:
    async with LocalCluster(SHARED, workers=1, serve=False, max_slots=2) as cluster:
        (group,), sender = groups_of(cluster.scheme), cluster.scheme.get_sender()
        kept = [group.pool.lease(slot, LeaseKind.WRITING) for slot in group.pool.slots]
        await cluster.scheme.send(wait=False)
        assert group.overflow is not None
        deadline = Deadline.after(PATIENCE)
        sources = await sender.source.extract(None, {0}, deadline)
        async with sender.publisher.lock.hold():
            publication = await sender.publisher.prepare(
                sources, {0}, strict=True, joint=None, deadline=deadline, may_overflow=True
            )
            publication.writes[0].begun = True
            publication.publisher.discard(publication)
        with pytest.raises(AiosyncError, match="overwritten before it had it"):
            await within(cluster.scheme.wait_ack())
        for lease in kept:
            lease.release()
        await cluster.workers[0].serve()
        assert (await within(cluster.scheme.send())).ok
        assert (await within(cluster.scheme.wait_ack())).ok


class _Gathering:
    """Gives up while its thread may still write. In place of a :class:`ShardGather`."""

    def __init__(self) -> None:
        self.work: Future[None] = Future()

    async def gather(self, *args: object) -> None:
        raise SyncTimeoutError("stage", seconds=1.0)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_slot_that_a_thread_may_write_holds_no_version(ended: bool) -> None:
    async with _cluster() as cluster:
        (group,), gathering = groups_of(cluster.scheme), _Gathering()
        async with _overwriting(cluster) as publication:
            (write,) = publication.writes
            if ended:
                gathering.work.set_result(None)
            write.sharded = [("values.0", write.slot.views["values.0"], torch.zeros(16))]
            given: Any = gathering
            with pytest.raises(SyncTimeoutError):
                await publication.publisher.fill(publication, given)
        assert (group.newest is not None) == ended
        assert (connections_of(cluster.scheme)[0].notified is not None) == ended
        if not ended:
            assert write.slot.leases
            gathering.work.set_result(None)
        for worker in cluster.workers:
            await worker.serve()
        assert (await within(cluster.scheme.send())).ok


async def test_a_device_that_does_not_end_does_not_hold_up_a_model_with_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme = SharedMemWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Adapter(), num_workers=1)

    async def settle(self: Offloader, devices: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Offloader, "settle", settle)
    with pytest.raises(SyncTimeoutError, match="the device has not done"):
        await within(scheme.connect(timeout=BRIEF))
    await scheme.aclose()
