"""What happens when two things happen at once. Each of these was once a bug."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from aiosync import (
    AiosyncError,
    ArenaAllocationError,
    InvalidArgumentError,
    JointUpdateError,
    Layout,
    MemoryWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    ProtocolError,
    RemoteApplyError,
    SharedMemWeightSyncScheme,
    SyncTimeoutError,
    WorkerLostError,
    _deadline,
    atomic,
)
from aiosync.protocol.frames import Fetch, Joint, Update
from aiosync.receiver import joint_commit as joint
from aiosync.receiver.commit_gate import CommitGate
from aiosync.transfer.base import MemoryAccess
from aiosync.transfer.mapped import MappedInbound
from aiosync.transfer.slots import LeaseKind
from aiosync.transports.mp.queues import QueueListener
from aiosync.weights.segment import Segment
from tests.kit import scenarios
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster
from tests.kit.seams import (
    binding_of,
    connections_of,
    copier_of,
    groups_of,
    leases_of,
    session_of,
    stop_reading,
    waits_for_readers,
    wake_reading,
)

CASES = {case.name: case for case in SCHEMES}
SHARED, PROCESS, PIPES = CASES["shared"], CASES["process"], CASES["process-pipes"]
MEMORY = CASES["memory"]


def _hang(worker: LocalWorker) -> None:
    """The worker's process does nothing any more, as far as the sender can see."""
    stop_reading(worker.scheme.receiver_transport)


def _wake(worker: LocalWorker) -> None:
    wake_reading(worker.scheme.receiver_transport)


def _refuse(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(views: object) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(binding_of(worker.scheme), "check", check)


def test_a_joint_commit_and_its_calling_off_take_the_same_lock() -> None:
    gate, reader = CommitGate(), object()
    assert gate.try_enter(reader, reader)
    committing, go_on = threading.Event(), threading.Event()

    @contextmanager
    def commit() -> Iterator[None]:
        committing.set()
        go_on.wait(BRIEF)
        yield

    joint.join(Joint(id="race", size=1), 0, gate, commit)
    forward = threading.Thread(target=gate.leave, args=(reader,), daemon=True)
    forward.start()
    committing.wait(PATIENCE)
    aborting = threading.Thread(target=joint.give_up, args=("race", 0, "called off"), daemon=True)
    aborting.start()
    go_on.set()
    for thread in (forward, aborting):
        thread.join(PATIENCE)
        assert not thread.is_alive()


async def test_a_hung_worker_does_not_starve_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deadline, "LATE_AFTER", BRIEF)
    async with LocalCluster(SHARED, sync=False) as cluster:
        hung, well = cluster.workers
        _hang(hung)
        for version in range(1, 12):
            fill(cluster.model, version)
            await cluster.scheme.send()
        await eventually(lambda: well.scheme.version == 11, "the healthy worker has the newest version")
        assert value_of(well.model) == 11
        draining = [task for task in asyncio.all_tasks() if "_drain" in repr(task.get_coro())]
        assert len(draining) <= 1
        connections = connections_of(cluster.scheme)
        # Before that, a send may wait for its slot, for as long as this one has.
        await eventually(lambda: connections[0].unresponsive, "the hung worker counts as unresponsive")
        fill(cluster.model, 12)
        with pytest.raises(SyncTimeoutError) as caught:
            await cluster.scheme.send(wait=True, timeout=3 * BRIEF)
        assert caught.value.workers == (0,)
        assert value_of(well.model) == 12
        _wake(hung)
        await eventually(lambda: hung.scheme.version == 12, "the hung worker is back")


async def test_a_worker_that_came_again_is_not_dropped_for_its_loss() -> None:
    async with LocalCluster(SHARED, on_failure="drop") as cluster:
        slow, leaving = cluster.workers
        await leaving.close()
        await eventually(lambda: set(cluster.scheme.sender_transports) == {0}, "its leaving is noticed")
        async with slow.scheme.pinned():
            sending = asyncio.create_task(cluster.scheme.send())
            again = cluster.add(1)
            await again.connect()
            await again.serve()
        report = await within(sending)
        assert report.dropped == ()
        assert report.workers[1].status == "lost"
        assert again.scheme.ended is None
        fill(cluster.model, 2)
        assert (await cluster.scheme.send()).ok
        assert value_of(again.model) == 2


async def test_a_version_that_somebody_has_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(SHARED) as cluster:
        refusing, leaving = cluster.workers
        await leaving.close()
        with monkeypatch.context() as patch:
            _refuse(refusing, patch)
            _hang(refusing)
            fill(cluster.model, 1)
            sending = asyncio.create_task(cluster.scheme.send())
            again = cluster.add(1)
            await again.connect()
            await again.serve()
            _wake(refusing)
            with pytest.raises(RemoteApplyError):
                await within(sending)
        assert cluster.scheme.version == 1
        fill(cluster.model, 2)
        assert (await cluster.scheme.send()).version == 2
        assert value_of(refusing.model) == value_of(again.model) == 2


async def test_nothing_is_taken_back_where_a_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(SHARED) as cluster:
        cut: list[int] = []
        for worker, its in connections_of(cluster.scheme).items():
            monkeypatch.setattr(its, "cancel_if_stuck", lambda worker=worker: cut.append(worker))
        (group,) = groups_of(cluster.scheme)
        await cluster.scheme.send()
        assert cut == []
        leases = [group.pool.lease(slot, LeaseKind.DETACHED) for slot in group.pool.slots]
        await cluster.scheme.send()
        assert sorted(cut) == [0, 1]
        for lease in leases:
            lease.release()


async def test_connections_that_are_lost_while_slots_are_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to a connection may lose it at once, and others with it."""
    async with LocalCluster(SHARED, workers=3) as cluster:
        (group,) = groups_of(cluster.scheme)
        connections = list(connections_of(cluster.scheme).values())

        def lose_the_others() -> None:
            for connection in connections[1:]:
                connection.connection_lost("broken")

        monkeypatch.setattr(connections[0], "cancel_if_stuck", lose_the_others)
        kept = [group.pool.lease(slot, LeaseKind.DETACHED) for slot in group.pool.slots]
        fill(cluster.model, 1)
        with pytest.raises(WorkerLostError):
            await cluster.scheme.send()
        assert value_of(cluster.workers[0].model) == 1
        for lease in kept:
            lease.release()
        for connection in connections[1:]:
            assert group.newest is not None
            connection.notify(group.newest)
            connection.offer_next()
        assert all(lease.reader in (None, connections[0]) for lease in leases_of(cluster.scheme))


async def test_a_frame_that_was_read_after_the_loss() -> None:
    """The process watch and the socket may be ready in one turn of the event loop."""
    async with LocalCluster(SHARED, workers=2, sync=False) as cluster:
        (group,) = groups_of(cluster.scheme)
        lost = connections_of(cluster.scheme)[0]
        async with cluster.workers[0].scheme.pinned():
            fill(cluster.model, 1)
            await cluster.scheme.send()
            lost.connection_lost("its process has ended")
            lost.frame_received(Fetch())
            assert all(lease.reader is not lost for lease in leases_of(cluster.scheme))
        assert group.connections.keys() == {1}


async def test_a_dropped_worker_that_is_still_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 20
    async with LocalCluster(MEMORY, model=lambda: Uniform(size=size), on_failure="drop") as cluster:
        slow, _ = cluster.workers
        offloader = copier_of(slow.scheme)
        half_way, go_on = asyncio.Event(), asyncio.Event()

        async def copy_slowly(pairs: list[tuple[Tensor, Tensor]], *rest: object) -> bool:
            ((target, source),) = pairs
            half = len(target) // 2
            target[:half].copy_(source[:half])
            half_way.set()
            await go_on.wait()
            target[half:].copy_(source[half:])
            return True

        monkeypatch.setattr(offloader, "copy", copy_slowly)
        fill(cluster.model, 1)
        assert (await cluster.scheme.send(timeout=BRIEF)).dropped == (0,)
        await within(half_way.wait())
        for version in range(2, 6):
            fill(cluster.model, version)
            await cluster.scheme.send()
        go_on.set()
        await slow.rest()
        assert value_of(slow.model) == slow.scheme.version


@pytest.mark.parametrize("case", [SHARED, PROCESS], ids=lambda case: case.name)
async def test_nothing_is_committed_after_the_receiver_has_closed(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        closing, _ = cluster.workers
        async with closing.scheme.pinned():
            fill(cluster.model, 1)
            await cluster.scheme.send(wait=False)
            await eventually(lambda: waits_for_readers(closing.scheme), "the commit waits for the reader")
            await closing.scheme.aclose()
        assert value_of(closing.model) == 0
        for version in range(2, 6):
            fill(cluster.model, version)
            with pytest.raises(WorkerLostError):
                await cluster.scheme.send()
        assert value_of(closing.model) == 0


async def test_a_queue_whose_writer_was_killed_in_the_middle_of_a_message() -> None:
    listener = QueueListener([0], multiprocessing.get_context("spawn"))
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    await listener.listen(accepted.put_nowait, lambda worker, reason: None)
    queue: Any = listener.pairs[0].to_sender
    queue._writer.send_bytes(b"aiosync\x01" + b"T" * 8)
    connection = await within(accepted.get())
    queue._wlock.acquire()
    os.write(queue._writer.fileno(), struct.pack("!i", 20_000) + b"the rest never comes")
    await asyncio.to_thread(_until_empty, queue._reader)
    before = listener.pairs[0]
    await within(listener.replace(connection))
    assert listener.pairs[0] is not before
    listener.close()
    await asyncio.get_running_loop().shutdown_default_executor()


def _until_empty(reader: Any) -> None:
    while reader.poll():
        os.sched_yield()


async def test_closing_does_not_wait_for_a_worker_that_reads_nothing() -> None:
    names = {f"layers.{i:05}.{os.urandom(8).hex()}.weight": torch.zeros(1) for i in range(20_000)}
    scheme = SharedMemWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(weights=names, num_workers=1)
    stuck = copy.copy(scheme)
    stuck.init_on_receiver(worker_idx=0)
    receiver = stuck.create_receiver()
    session = session_of(stuck)
    answer = session._answer

    def answer_and_hang(challenge: Any) -> Any:
        stop_reading(receiver.transport)
        return answer(challenge)

    session._answer = answer_and_hang  # type: ignore[method-assign]
    joining = asyncio.create_task(stuck.connect())
    with pytest.raises(SyncTimeoutError):
        await scheme.connect(timeout=10 * BRIEF)
    await within(scheme.aclose(), PATIENCE / 2)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    await stuck.aclose()


def test_memory_that_could_not_be_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of({"weight": torch.zeros(4)})
    segment = Segment.local(layout.nbytes)
    mapped = MappedInbound(layout, MemoryAccess.VIEWED)
    update = Update(round=0, version=0, payload={"slot": 7, "new": [[7, segment.handle]], "gone": []})

    def too_many(handle: dict[str, Any], **how: bool) -> Segment:
        raise ProtocolError("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "attach", too_many)
        with pytest.raises(ProtocolError, match="Too many"):
            mapped.expect(update)
            mapped.find(update)
    again = Update(round=1, version=1, payload={"slot": 7, "new": [], "gone": []})
    mapped.expect(again)
    buffer, _ = mapped.find(again)
    assert buffer.data_ptr() == segment.buffer.data_ptr()
    mapped.close()
    segment.close()


async def test_no_memory_for_a_slot_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deadline, "LATE_AFTER", BRIEF)
    async with LocalCluster(SHARED, sync=False) as cluster:
        hung, well = cluster.workers
        (group,) = groups_of(cluster.scheme)
        _hang(hung)
        with monkeypatch.context() as patch:

            def allocate(nbytes: int) -> Segment:
                raise ArenaAllocationError(nbytes, "there is none left")

            for version in range(1, 6):
                fill(cluster.model, version)
                await cluster.scheme.send()
            patch.setattr(group.pool, "_allocate", allocate)
            with pytest.raises(SyncTimeoutError):
                await cluster.scheme.wait_ack(timeout=3 * BRIEF)
        _wake(hung)
        await eventually(lambda: well.scheme.version == hung.scheme.version == 5, "both have the newest")
        await well.close()
        again = cluster.add(1)
        await again.connect()
        assert value_of(again.model) == 5


@pytest.mark.parametrize("timeout", [BRIEF, PATIENCE])
async def test_a_model_that_joins_in_the_middle_of_a_joint_update(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    async with LocalCluster(SHARED, workers=1) as policy, LocalCluster(SHARED, workers=1) as value:
        await value.workers[0].close()
        await eventually(lambda: not value.scheme.sender_transports, "its leaving is noticed")
        late = value.add(0)
        welcomed, go_on = asyncio.Event(), asyncio.Event()
        receiver = late.scheme.create_receiver()
        prepare = receiver.applier.prepare

        async def prepare_later(transport: Any) -> None:
            welcomed.set()
            await go_on.wait()
            await prepare(transport)

        monkeypatch.setattr(receiver.applier, "prepare", prepare_later)
        joining = asyncio.create_task(late.connect())
        await within(welcomed.wait())
        fill(policy.model, 1)
        fill(value.model, 1)

        async def send() -> None:
            async with atomic(policy.scheme, value.scheme, timeout=timeout):
                pass

        sending = asyncio.create_task(send())
        await eventually(lambda: value.scheme.version == 1, "both parts are published")
        go_on.set()
        await within(joining)
        await late.serve()
        with pytest.raises(JointUpdateError):
            await within(sending)
        fill(policy.model, 2)
        assert (await policy.scheme.send()).ok
        await within(send())
        assert value_of(policy.workers[0].model) == 2
        assert late.scheme.version == value.scheme.version


async def test_a_sibling_that_takes_nothing_blocks_no_later_update() -> None:
    async with LocalCluster(SHARED, workers=1) as policy, LocalCluster(SHARED, workers=1) as value:
        await value.workers[0].rest()
        with pytest.raises(SyncTimeoutError):
            async with atomic(policy.scheme, value.scheme, timeout=BRIEF):
                pass
        fill(policy.model, 2)
        assert (await within(policy.scheme.send())).ok
        assert value_of(policy.workers[0].model) == 2
        await value.workers[0].serve()
        fill(value.model, 3)
        assert (await within(value.scheme.send())).ok


async def test_two_that_receive_at_once() -> None:
    model = lambda: Uniform(size=1 << 18)  # noqa: E731 - so that staging takes a thread
    async with LocalCluster(PROCESS, workers=1, model=model, serve=False) as cluster:
        scheme = cluster.workers[0].scheme
        seen: list[list[int]] = [[], []]

        async def receive(who: int) -> None:
            while scheme.version < 20:
                if await scheme.receive(timeout=PATIENCE) is not None:
                    seen[who].append(scheme.version)

        receiving = [asyncio.create_task(receive(who)) for who in range(2)]
        for version in range(1, 21):
            fill(cluster.model, version)
            await cluster.scheme.send()
        await within(asyncio.gather(*receiving))
        for versions in seen:
            assert versions == sorted(versions)
        assert value_of(cluster.workers[0].model) == 20


async def test_a_worker_that_polls_reports_a_commit_that_waits() -> None:
    """Each call submits the commit again. The sender gets its slot back all the same."""
    async with LocalCluster(PROCESS, workers=1, serve=False) as cluster:
        scheme, connection = cluster.workers[0].scheme, connections_of(cluster.scheme)[0]
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        async with asyncio.timeout(PATIENCE), scheme.pinned():
            while not connection.staged:
                assert await scheme.receive(timeout=0.005) is None
        assert await scheme.receive(timeout=PATIENCE) is not None


async def test_a_message_of_the_callers_that_is_half_read_at_the_end() -> None:
    ours, theirs = multiprocessing.Pipe()
    heard: list[int] = []
    scheme = MultiProcessWeightSyncScheme(
        pipes=[ours], on_other_message=lambda worker, message: heard.append(len(message)), timeout=PATIENCE
    )
    scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=Uniform(), worker_idx=0, pipe=theirs)
    await asyncio.gather(scheme.connect(), worker.connect())
    talking = threading.Thread(target=theirs.send, args=(b"z" * 20_000_000,))
    talking.start()
    listener: Any = scheme.shared_transport
    pipe = listener._workers[0].pipe
    await eventually(lambda: len(pipe._buffer) > 0, "a part of it has been read")
    await scheme.aclose()
    await asyncio.sleep(0)
    talking.join(PATIENCE)
    assert heard == [20_000_000]
    theirs.send("the next")
    assert await asyncio.to_thread(ours.recv) == "the next"
    await worker.aclose()
    ours.close()
    theirs.close()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_what_was_refused_while_nobody_waited_is_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalCluster(SHARED, workers=1) as cluster:
        with monkeypatch.context() as patch:
            _refuse(cluster.workers[0], patch)
            await cluster.scheme.send(wait=False)
            await eventually(lambda: cluster.scheme.stats.failures == 1, "it is refused")
        assert (await cluster.scheme.send()).ok
        with pytest.raises(RemoteApplyError, match="not this one"):
            await cluster.scheme.wait_ack()
        assert (await cluster.scheme.wait_ack()).ok


async def test_a_part_builds_on_what_the_worker_was_sent() -> None:
    async with LocalCluster(SHARED) as cluster:
        first, second = cluster.workers
        part = {"values.0": torch.full((16,), 5.0)}
        await cluster.scheme.send(part, worker_ids=0, strict=False)
        with pytest.raises(InvalidArgumentError, match=r"version 1, which was not for workers \[1\]"):
            await cluster.scheme.send(part, worker_ids=1, strict=False)
        assert value_of(second.model) == 0
        await cluster.scheme.send(part, worker_ids=0, strict=False)
        assert value_of([first.model.values[0]]) == 5
        fill(cluster.model, 3)
        await cluster.scheme.send()
        await cluster.scheme.send(part, strict=False)
        assert [value_of([w.model.values[0]]) for w in (first, second)] == [5, 5]
        assert [value_of([w.model.values[1]]) for w in (first, second)] == [3, 3]


async def test_a_refused_connection_is_named_when_the_deadline_passes() -> None:
    scheme = MemoryWeightSyncScheme(timeout=BRIEF)
    scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    stranger = LocalWorker(copy.copy(scheme), 3, Uniform(), {})
    connecting = asyncio.create_task(scheme.connect())
    with pytest.raises(AiosyncError, match="no worker 3"):
        await stranger.connect()
    with pytest.raises(SyncTimeoutError, match="no worker 3 here"):
        await connecting
    await stranger.close()
    await scheme.aclose()


async def test_a_pipe_that_breaks_before_its_worker_has_connected() -> None:
    recipe = PIPES.build(1, {"timeout": PATIENCE})
    recipe.scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    recipe.receiver_arguments[0]["pipe"].close()
    with pytest.raises(WorkerLostError) as caught:
        await within(recipe.scheme.connect(), PATIENCE / 2)
    assert caught.value.workers == (0,)
    await recipe.scheme.aclose()
    recipe.close()


async def test_a_body_that_waits_for_a_lost_sender_is_cut_short() -> None:
    async with LocalCluster(SHARED, workers=1, serve=False) as cluster:
        scheme = cluster.workers[0].scheme
        cleaned_up = False
        with pytest.raises(WorkerLostError):
            async with scheme.receiving():
                try:
                    transport: Any = scheme.receiver_transport
                    transport._sock.shutdown(socket.SHUT_RDWR)
                    await within(asyncio.Event().wait())
                finally:
                    await asyncio.sleep(0)  # a body may clean up after itself
                    cleaned_up = True
        assert cleaned_up
        assert scheme.ended
        with pytest.raises(TimeoutError, match="the body's own"):
            async with LocalCluster(SHARED, workers=1, serve=False) as other:
                async with other.workers[0].scheme.receiving():
                    raise TimeoutError("the body's own")


def _detached(cluster: ProcessCluster) -> bool:
    """Whether a process that is no worker any more keeps a slot."""
    return any(lease.kind is LeaseKind.DETACHED for lease in leases_of(cluster.scheme))


@pytest.mark.parametrize("case", [SHARED, PROCESS, PIPES], ids=lambda case: case.name)
async def test_what_a_dropped_process_reads_is_its_own_until_it_has_ended(case: SchemeCase) -> None:
    async with ProcessCluster(case, on_failure="drop") as cluster:
        stopped = cluster.workers[1]
        stopped.stop()
        fill(cluster.model, 1)
        assert (await cluster.scheme.send(timeout=BRIEF)).dropped == (1,)
        for version in range(2, 6):
            fill(cluster.model, version)
            assert (await cluster.scheme.send()).ok
        assert _detached(cluster)
        stopped.kill()
        await stopped.ended()
        await eventually(lambda: not _detached(cluster), "no process has detached slots")


@pytest.mark.parametrize("case", [SHARED, PROCESS, PIPES], ids=lambda case: case.name)
async def test_what_a_dropped_process_reads_is_its_own_until_it_says_otherwise(case: SchemeCase) -> None:
    async with ProcessCluster(case, on_failure="drop") as cluster:
        late = cluster.workers[1]
        late.stop()
        fill(cluster.model, 1)
        assert (await cluster.scheme.send(timeout=BRIEF)).dropped == (1,)
        assert _detached(cluster)
        late.resume()
        await late.run(scenarios.aclose)
        await eventually(lambda: not _detached(cluster), "no process has detached slots")
