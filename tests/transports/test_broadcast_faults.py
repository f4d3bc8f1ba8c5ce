"""Ranks that are killed or suspended during a broadcast, and workers that come and go meanwhile.

gloo's broadcast is a tree. With three workers, worker 0 passes the messages on to worker 2.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from aiosync import DistributedWeightSyncScheme, SyncTimeoutError, WorkerLostError
from aiosync.protocol.sender_session import SenderSession
from aiosync.receiver.applier import WeightApplier
from aiosync.transfer import broadcast
from aiosync.transfer.broadcast import BroadcastGroup
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember
from tests.kit import scenarios
from tests.kit.cases import SCHEMES
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster, Worker
from tests.kit.ranks import before_message, check, close_in_the_middle, send_and_hold
from tests.kit.seams import connections_of, threads_of_ranks

# More messages than gloo has threads: what waits for a dead rank holds up the rest.
LARGE = 3 << 20
BROADCAST = next(case for case in SCHEMES if case.name == "distributed-broadcast")
DEADLINE = PATIENCE / 6
"""Less than the 10 seconds for which gloo holds a thread."""


def before_start(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call ``call()`` when a worker has got the announcement of a broadcast."""
    start = BroadcastGroup.start

    def begin(*args: Any) -> None:
        call()
        start(*args)

    monkeypatch.setattr(BroadcastGroup, "start", begin)


async def applied(cluster: ProcessCluster, version: int, workers: list[int]) -> None:
    """Wait until these workers have acknowledged ``version``; check what they have."""
    sessions = [connections_of(cluster.scheme)[worker].session for worker in workers]
    await eventually(lambda: all(one.acked_version == version for one in sessions), "they have it")
    await check(cluster, version, workers)


async def without_one(cluster: ProcessCluster) -> Worker:
    """Worker 2 leaves, and the sender goes on without it. Returns a process that takes its place."""
    scheme = cluster.scheme
    assert isinstance(scheme, DistributedWeightSyncScheme)
    await cluster.workers[2].run(scenarios.aclose)
    await eventually(lambda: 2 not in connections_of(scheme), "it is gone")
    fill(cluster.model, 1)
    await scheme.send()
    await scheme.reconnect()
    return cluster.spawn(2)


async def send_without(cluster: ProcessCluster, lost: int) -> None:
    """Send; this worker is lost, and the others have the version within the deadline."""
    with pytest.raises(WorkerLostError, match=f"worker {lost} lost") as caught:
        await cluster.scheme.send(timeout=DEADLINE)
    report = caught.value.report
    assert report is not None  # the error alone would not name workers that missed the deadline
    statuses = {worker: one.status for worker, one in report.workers.items()}
    assert statuses == {worker: "lost" if worker == lost else "applied" for worker in range(3)}


@pytest.mark.parametrize("victim", [0, 1])
async def test_killed_in_the_middle(
    broadcasts: list[int], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    async with ProcessCluster(BROADCAST, workers=3, size=LARGE, timeout=PATIENCE / 3) as cluster:
        scheme, others = cluster.scheme, [worker for worker in range(3) if worker != victim]
        assert isinstance(scheme, DistributedWeightSyncScheme)
        before_message(monkeypatch, 2, cluster.workers[victim].kill, size=3)
        fill(cluster.model, 1)
        await send_without(cluster, victim)
        await check(cluster, 1, others)
        # Meanwhile each gets everything by itself, and then all again at once.
        broadcasts.clear()
        fill(cluster.model, 2)
        assert (await scheme.send(worker_ids=others)).ok
        with pytest.raises(SyncTimeoutError):
            await scheme.reconnect(timeout=BRIEF)
        cluster.spawn(victim)
        await within(asyncio.gather(scheme.reconnect(), cluster.connect_worker(victim)))
        assert broadcasts == []
        fill(cluster.model, 3)
        assert (await scheme.send()).ok
        assert broadcasts == [3]
        await check(cluster, 3, [0, 1, 2])
        # gloo does not tell who waits to send to a rank that has died; that ends by the message's timeout.
        await eventually(lambda: threads_of_ranks() == 3 + 1, "the broken group is dropped")


async def test_killed_while_the_others_join_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ProcessCluster(BROADCAST, workers=3, timeout=PATIENCE / 3) as cluster:
        scheme, make = cluster.scheme, ProcessGroupMember._make
        assert isinstance(scheme, DistributedWeightSyncScheme)
        cluster.workers[1].kill()
        await cluster.workers[1].ended()
        victim = cluster.spawn(1)
        await within(asyncio.gather(scheme.reconnect(), cluster.connect_worker(1)))

        def join(self: ProcessGroupMember, store: Any) -> Any:
            if self.size == 4:
                victim.kill()
            return make(self, store)

        before_start(monkeypatch, victim.stop)  # it has sent its Fetch
        monkeypatch.setattr(ProcessGroupMember, "_make", join)
        fill(cluster.model, 1)
        await send_without(cluster, 1)
        # The sender's thread does not wait for the victim in the store any more.
        await eventually(lambda: threads_of_ranks() == 2, "the group is given up", DEADLINE)


@pytest.mark.parametrize("victim", [0, 1])
async def test_suspended(broadcasts: list[int], monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    monkeypatch.setattr(broadcast, "STALLED", BRIEF)
    async with ProcessCluster(BROADCAST, workers=3, size=LARGE, timeout=PATIENCE) as cluster:
        scheme, others = cluster.scheme, [worker for worker in range(3) if worker != victim]
        assert isinstance(scheme, DistributedWeightSyncScheme)
        broadcasts.clear()
        before_start(monkeypatch, cluster.workers[victim].stop)
        fill(cluster.model, 1)
        await scheme.send(wait=False)
        started = time.monotonic()
        await applied(cluster, 1, others)
        assert time.monotonic() - started < PATIENCE / 4  # gloo holds its threads for 10 s
        assert broadcasts == [1]
        monkeypatch.undo()
        cluster.workers[victim].resume()
        assert (await scheme.wait_ack()).ok
        await check(cluster, 1, [victim])
        await eventually(lambda: threads_of_ranks() <= 3, "the broken group is dropped")


async def test_suspended_after_the_sender_has_sent_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that passes the messages on has them in its socket only."""
    monkeypatch.setattr(broadcast, "STALLED", BRIEF)
    async with ProcessCluster(BROADCAST, workers=3, size=1 << 16, timeout=PATIENCE) as cluster:
        scheme, victim, move = cluster.scheme, cluster.workers[0], ProcessGroupMember._move_all
        fill(cluster.model, 1)
        await scheme.send()  # makes the group
        sent = threading.Event()

        def stop_and_move(self: ProcessGroupMember, *args: Any) -> None:
            if self.size == 4:
                time.sleep(0.3)  # the others wait for the messages by now
                victim.stop()
            move(self, *args)
            sent.set()

        monkeypatch.setattr(ProcessGroupMember, "_move_all", stop_and_move)
        fill(cluster.model, 2)
        await scheme.send(wait=False)
        await eventually(sent.is_set, "the sender has sent all")
        started = time.monotonic()
        await applied(cluster, 2, [1, 2])
        assert time.monotonic() - started < PATIENCE / 4
        victim.resume()
        assert (await scheme.wait_ack()).ok
        await check(cluster, 2, [0])


async def test_one_comes_meanwhile(broadcasts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the version alone. The others have it from the broadcast."""
    interrupted: list[int] = []
    monkeypatch.setattr(SenderSession, "interrupt", lambda self, round_: interrupted.append(round_))
    async with ProcessCluster(BROADCAST, workers=3, size=LARGE, on_failure="drop") as cluster:
        await without_one(cluster)
        broadcasts.clear()
        interrupted.clear()
        release = await send_and_hold(monkeypatch, cluster, 2, 2, size=3)
        assert await within(cluster.connect_worker(2)) == 2
        release.set()
        await applied(cluster, 2, [0, 1, 2])
        fill(cluster.model, 3)
        assert (await cluster.scheme.send()).ok
        assert broadcasts == [2, 3]
        assert interrupted == []


async def test_a_worker_closes_while_it_waits_for_a_suspended_rank(
    broadcasts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ProcessCluster(BROADCAST, workers=3, size=LARGE, timeout=PATIENCE) as cluster:
        victim, closing = cluster.workers[1], cluster.workers[2]
        before_start(monkeypatch, victim.stop)
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        await eventually(lambda: broadcasts[-1:] == [1], "the broadcast runs")
        started = time.monotonic()
        await closing.run(scenarios.aclose)
        assert time.monotonic() - started < PATIENCE / 6  # the broadcast is given up after a fourth
        await applied(cluster, 1, [0])  # the group is broken: it gets the version alone
        victim.resume()
        await applied(cluster, 1, [1])
        await eventually(lambda: threads_of_ranks() <= 3, "the broken group is dropped")


async def test_a_copy_that_takes_long_is_progress(
    broadcasts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "STALLED", 2.0)
    async with ProcessCluster(BROADCAST, workers=2, size=LARGE, timeout=PATIENCE) as cluster:
        for number in range(1, 7):
            before_message(monkeypatch, number, lambda: time.sleep(0.5), size=3)  # in all longer than STALLED
        broadcasts.clear()
        for version in (1, 2):
            fill(cluster.model, version)
            assert (await cluster.scheme.send()).ok
            await check(cluster, version, [0, 1])
        assert broadcasts == [1, 2]


class Clock:
    """In place of an event loop: time passes when the next timer is due."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.timers.append((self.now + seconds, lambda: call(*args)))

    def run(self) -> None:
        while self.timers:
            due = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove(due)
            self.now = due[0]
            due[1]()


def test_a_stall_is_counted_from_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stalled = Clock(), list[float]()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    member, worker = Mock(steps=0, moved=0), Mock(staged=False)
    watched = broadcast._Broadcast(1, 10.0, lambda: stalled.append(clock.now), member, [worker])
    watched.begin()
    clock.call_later(0.1, setattr, member, "moved", 1)  # right after the first look
    clock.run()
    assert len(stalled) == 1 and 110.1 <= stalled[0] <= 111.2


async def test_a_slow_worker_fails_no_broadcast(
    broadcasts: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the bytes, and takes long to apply them."""
    monkeypatch.setattr(broadcast, "STALLED", BRIEF)
    commit = WeightApplier.commit

    async def slow(self: WeightApplier, *args: Any) -> None:
        if self.worker == 0:
            await asyncio.sleep(4 * BRIEF)
        await commit(self, *args)

    async with LocalCluster(BROADCAST, workers=2, model=lambda: Uniform(size=LARGE)) as cluster:
        monkeypatch.setattr(WeightApplier, "commit", slow)
        broadcasts.clear()
        for version in range(1, 6):
            fill(cluster.model, version)
            assert (await cluster.scheme.send()).ok
            assert [value_of(worker.model) for worker in cluster.workers] == [version] * 2
        assert broadcasts == [1, 2, 3, 4, 5]
    assert "in a row" not in caplog.text


async def test_three_failures_in_a_row(broadcasts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "STALLED", BRIEF)
    move, release = ProcessGroupMember._move_all, threading.Event()

    def hold(self: ProcessGroupMember, *args: Any) -> None:
        if self.size == 3:
            assert release.wait(PATIENCE)  # the workers wait for this rank, until they are interrupted
        move(self, *args)

    async with ProcessCluster(BROADCAST, workers=2, size=1 << 10, timeout=PATIENCE) as cluster:
        scheme = cluster.scheme
        assert isinstance(scheme, DistributedWeightSyncScheme)
        broadcasts.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ProcessGroupMember, "_move_all", hold)
            for version in (1, 2, 3, 4):
                fill(cluster.model, version)
                assert (await scheme.send()).ok
                await check(cluster, version, [0, 1])
            release.set()
        assert broadcasts == [1, 2, 3]
        await scheme.reconnect()
        fill(cluster.model, 5)
        assert (await scheme.send()).ok
        assert broadcasts == [1, 2, 3, 5]
        await check(cluster, 5, [0, 1])
        await eventually(lambda: threads_of_ranks() <= 3, "the broken groups are dropped")


async def test_one_comes_and_goes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[int] = []
    monkeypatch.setattr(SenderSession, "interrupt", lambda self, round_: interrupted.append(round_))
    async with ProcessCluster(BROADCAST, workers=3, size=LARGE, on_failure="drop") as cluster:
        late = await without_one(cluster)
        interrupted.clear()
        release = await send_and_hold(monkeypatch, cluster, 2, 2, size=3)
        await within(cluster.connect_worker(2))
        late.kill()
        await eventually(lambda: 2 not in connections_of(cluster.scheme), "it is gone again")
        release.set()
        await applied(cluster, 2, [0, 1])
        assert interrupted == []


async def test_the_last_broadcast_of_a_sender_that_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ProcessCluster(BROADCAST, workers=3, size=LARGE) as cluster:
        await close_in_the_middle(monkeypatch, cluster, 1, 2, size=3)
