"""torch.distributed on one machine: workers that can read the sender's memory view its slots."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from aiosync import (
    ArenaAllocationError,
    DistributedWeightSyncScheme,
    LayoutMismatchError,
    RemoteApplyError,
    WeightStrategy,
    WeightSyncScheme,
)
from aiosync.sender.slot_write import SlotWrite
from aiosync.transfer.broadcast import BroadcastGroup
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.transfer.slots import LeaseKind
from aiosync.transports.torch_distributed.transport import StoreConnection, TorchDistributedListener
from aiosync.transports.unix_socket import UnixConnection
from aiosync.weights.module_binding import ModuleBinding
from aiosync.weights.segment import Segment
from tests.kit import scenarios
from tests.kit.cases import Recipe, SchemeCase
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ProcessCluster
from tests.kit.seams import connections_of, leases_of, slots_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps another process's memory by /proc")

LARGE = 1 << 21
"""Of so large a model the first blocks are sent while the last are being copied."""

NEAR, FAR = UnixConnection, StoreConnection
COMING_BACK = SchemeCase(
    "distributed", lambda _, options: Recipe(DistributedWeightSyncScheme(reconnect_for=60, **options))
)


def a_store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def a_sender(store: Any, model: Uniform, workers: int = 1, **options: Any) -> DistributedWeightSyncScheme:
    scheme = DistributedWeightSyncScheme(store=store.clone(), timeout=PATIENCE, **options)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=workers)
    return scheme


def a_worker(store: Any, index: int, size: int = 16, **options: Any) -> LocalWorker:
    scheme = DistributedWeightSyncScheme(store=store.clone(), timeout=PATIENCE, **options)
    return LocalWorker(scheme, index, Uniform(-1.0, size=size), {})


def way_of(worker: LocalWorker) -> type[Any]:
    return type(worker.scheme.receiver_transport)


@asynccontextmanager
async def job(
    *shares: bool, size: int = 16, **options: Any
) -> AsyncIterator[tuple[DistributedWeightSyncScheme, Uniform, list[LocalWorker]]]:
    """A sender, and workers of which each is told whether it may view the sender's memory."""
    store, model = a_store(), Uniform(size=size)
    scheme = a_sender(store, model, len(shares), **options)
    workers = [a_worker(store, index, size, share_memory=may) for index, may in enumerate(shares)]
    try:
        await within(asyncio.gather(scheme.connect(), *(worker.connect() for worker in workers)))
        for worker in workers:
            await worker.serve()
        yield scheme, model, workers
    finally:
        for worker in workers:
            await worker.close()
        await within(scheme.aclose())


async def sent(scheme: WeightSyncScheme, model: Uniform, workers: Sequence[LocalWorker], value: int) -> None:
    fill(model, value)
    assert (await scheme.send()).ok
    assert [value_of(worker.model) for worker in workers] == [value] * len(workers)


# -- which way -------------------------------------------------------------------------------------------


async def test_a_worker_on_the_machine_views_the_slots() -> None:
    async with job(True, True, size=LARGE) as (scheme, model, workers):
        assert [way_of(worker) for worker in workers] == [NEAR, NEAR]
        for value in (1, 2, 3):
            await sent(scheme, model, workers, value)
        assert [worker.scheme.stats.memory for worker in workers] == [0, 0]
        fill(model, 9)
        assert [value_of(worker.model) for worker in workers] == [3, 3]


@pytest.mark.parametrize("refuses", ["sender", "worker"])
async def test_either_side_can_have_it_sent(refuses: str) -> None:
    async with job(refuses == "sender", share_memory=refuses == "worker") as (scheme, model, workers):
        assert way_of(workers[0]) is FAR
        await sent(scheme, model, workers, 1)


@pytest.mark.parametrize("what", ["memory", "socket"])
async def test_a_worker_that_cannot_come_near(what: str) -> None:
    """As in another container: what is found under the same names is something else, or nothing."""
    store, model = a_store(), Uniform()
    scheme, worker = a_sender(store, model), a_worker(store, 0)
    listener = scheme.shared_transport
    assert isinstance(listener, TorchDistributedListener)
    if what == "memory":
        assert listener._sample is not None
        listener._sample.buffer.zero_()
    else:
        listener._listeners.pop().close()
    await within(asyncio.gather(scheme.connect(), worker.connect()))
    assert way_of(worker) is FAR
    await worker.serve()
    await sent(scheme, model, [worker], 1)
    await worker.close()
    await within(scheme.aclose())


async def test_a_machine_where_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(nbytes: int, device: Any = None) -> Segment:
        raise ArenaAllocationError(nbytes, "Operation not permitted")

    monkeypatch.setattr(Segment, "shared", forbidden)
    async with job(True) as (scheme, model, workers):
        assert way_of(workers[0]) is FAR
        await sent(scheme, model, workers, 1)


def test_it_is_asked_for_by_a_truth_value() -> None:
    with pytest.raises(ValueError, match="share_memory: expected True or False, got 'no'"):
        DistributedWeightSyncScheme(share_memory="no")  # type: ignore[arg-type]


class Applying:
    """A context that puts what it is told in its policy by itself, in place, unless it refuses."""

    def __init__(self) -> None:
        self.policy = Uniform(-1.0)
        self.refuses = False

    def update_policy_weights_(self, policy_or_weights: Any, model_id: str) -> None:
        if self.refuses:
            raise ArithmeticError("no more")
        self.policy.load_state_dict(WeightStrategy("state_dict").extract_weights(policy_or_weights))


async def test_who_applies_weights_by_itself_writes_into_its_own_memory() -> None:
    store, model = a_store(), Uniform()
    scheme = a_sender(store, model, 2)
    contexts = [Applying(), Applying()]
    workers = [a_worker(store, index) for index in range(2)]
    for worker, context in zip(workers, contexts, strict=True):
        worker.init(model=None, context=context)
        worker.model = context.policy
    await within(asyncio.gather(scheme.connect(), *(worker.connect() for worker in workers)))
    assert [way_of(worker) for worker in workers] == [NEAR, NEAR]
    for worker in workers:
        await worker.serve()
    await sent(scheme, model, workers, 1)
    contexts[0].refuses = True
    fill(model, 2)
    with pytest.raises(RemoteApplyError, match="no more"):
        await scheme.send()
    assert [value_of(context.policy) for context in contexts] == [1, 2]
    for worker in workers:
        await worker.close()
    await within(scheme.aclose())


# -- beside workers that are sent everything ----------------------------------------------------------------


@pytest.mark.parametrize("size", [16, LARGE])
async def test_workers_of_both_kinds(size: int) -> None:
    async with job(True, False, True, size=size) as (scheme, model, workers):
        assert [way_of(worker) for worker in workers] == [NEAR, FAR, NEAR]
        for value in (1, 2, 3):
            await sent(scheme, model, workers, value)
        changed = {"values.2": torch.full((size,), 7.0)}
        assert (await scheme.send(changed, strict=False)).ok
        for worker in workers:
            assert value_of([worker.model.get_parameter("values.2")]) == 7
            assert value_of([worker.model.get_parameter("values.1")]) == 3


async def test_nobody_sees_half_a_version() -> None:
    async with job(True, False, True, size=LARGE, sync=False) as (scheme, model, workers):
        last = 30
        for value in range(1, last + 1):
            fill(model, value)
            await scheme.send()
            seen = [value_of(worker.model) for worker in workers]  # which fails if they are not all the same
            assert all(one == int(one) <= value for one in seen)
        assert (await scheme.wait_ack()).ok
        assert [value_of(worker.model) for worker in workers] == [last] * 3


async def test_a_broadcast_is_for_those_to_whom_something_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    begin = BroadcastGroup.start

    def note(self: BroadcastGroup, published: Any) -> None:
        rounds.append(published.version)
        begin(self, published)

    monkeypatch.setattr(BroadcastGroup, "start", note)
    async with job(False, True, False, collective="broadcast") as (scheme, model, workers):
        for value in (1, 2):
            await sent(scheme, model, workers, value)
    assert rounds[-4:] == [1, 1, 2, 2]


async def test_who_comes_in_the_middle_of_a_copy_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, finish = asyncio.Event(), SlotWrite.finish_copy

    async def finish_later(self: SlotWrite, *, paced: bool) -> None:
        await go_on.wait()
        await finish(self, paced=False)

    store, model = a_store(), Uniform(size=LARGE)
    scheme = a_sender(store, model, 2)
    far = a_worker(store, 0, LARGE, share_memory=False)
    near = a_worker(store, 1, LARGE)
    go_on.set()
    connecting = asyncio.create_task(scheme.connect())
    await within(far.connect())
    # Not served: or what it is sent would have been copied to its end by who sends it.
    monkeypatch.setattr(SlotWrite, "finish_copy", finish_later)
    await within(near.connect())
    await within(connecting)
    await near.close()
    await eventually(lambda: 1 not in scheme.sender_transports, "it is gone")
    go_on.clear()
    fill(model, 1)
    sending = asyncio.create_task(scheme.send(worker_ids=[0], wait=False))
    await eventually(lambda: scheme.version == 1, "it has been published")
    again = a_worker(store, 1, LARGE)
    coming = asyncio.create_task(again.connect())
    links = connections_of(scheme)
    await eventually(lambda: 1 in links and links[1].ready, "it is there, and has come for it")
    for _ in range(50):
        links[1].offer_next()
        await asyncio.sleep(0)
    assert links[1].ready
    assert again.scheme.version == -1
    go_on.set()
    await within(asyncio.gather(coming, sending))
    assert value_of(again.model) == 1
    await far.serve()
    assert (await scheme.wait_ack()).ok
    assert value_of(far.model) == 1
    for worker in (far, again):
        await worker.close()
    await within(scheme.aclose())


# -- connections that are lost ------------------------------------------------------------------------------


async def test_the_sender_is_somewhere_else_now() -> None:
    """Each comes in the place of one that is gone without a goodbye."""
    store, model = a_store(), Uniform(size=LARGE)
    worker = a_worker(store, 0, LARGE)
    senders = [a_sender(store, model)]
    await within(asyncio.gather(senders[0].connect(), worker.connect()))
    await worker.serve()
    for number, share in enumerate([False, True, True, False]):
        before = senders[-1].sender_transports[0]
        listener = senders[-1].shared_transport
        assert listener is not None
        listener.stop()
        senders.append(a_sender(store, model, share_memory=share))
        fill(model, 10 * number)
        connecting = asyncio.create_task(senders[-1].connect())
        await before._close()  # without a word
        await within(connecting)
        assert way_of(worker) is (NEAR if share else FAR)
        for value in range(1, 4):
            await sent(senders[-1], model, [worker], 10 * number + value)
    await worker.close()
    for scheme in senders:
        await within(scheme.aclose())


async def test_a_sender_with_another_order_of_entries() -> None:
    """The same names and shapes, but in other places: nothing is to be read by the old order."""
    store, model = a_store(), Uniform()
    first, worker = a_sender(store, model), a_worker(store, 0)
    await within(asyncio.gather(first.connect(), worker.connect()))
    await worker.serve()
    assert first.shared_transport is not None
    first.shared_transport.stop()
    await first.sender_transports[0]._close()
    weights = {name: tensor.detach() + 1 for name, tensor in reversed(model.state_dict().items())}
    second = DistributedWeightSyncScheme(store=store.clone(), timeout=PATIENCE)
    second.init_on_sender(model_id="policy", weights=weights, num_workers=1)
    with pytest.raises(LayoutMismatchError, match="order of entries"):
        await within(second.connect())
    await eventually(lambda: worker.lost is not None, "it has given up")
    assert value_of(worker.model) == 0
    await worker.close()
    for scheme in (first, second):
        await within(scheme.aclose())


async def test_another_way_is_gone_to_its_end_without_the_call_that_began_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender is reached another way than before; that takes memory, and the call is cancelled."""
    entered, go_on = threading.Event(), threading.Event()
    reserve = DoubleBuffer.reserve

    def reserve_slowly(self: DoubleBuffer) -> None:
        entered.set()
        assert go_on.wait(PATIENCE)
        reserve(self)

    store, model = a_store(), Uniform()
    first, worker = a_sender(store, model), a_worker(store, 0)
    await within(asyncio.gather(first.connect(), worker.connect()))
    assert first.shared_transport is not None
    first.shared_transport.stop()
    fill(model, 5)
    second = a_sender(store, model, share_memory=False)
    connecting = asyncio.create_task(second.connect())
    await first.sender_transports[0]._close()
    monkeypatch.setattr(DoubleBuffer, "reserve", reserve_slowly)
    receiving = asyncio.create_task(worker.scheme.receive())
    await eventually(entered.is_set, "it takes memory")
    receiving.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await worker.serve()
    await within(connecting)
    assert way_of(worker) is FAR
    for value in range(6, 9):
        await sent(second, model, [worker], value)
    await worker.close()
    for scheme in (first, second):
        await within(scheme.aclose())


async def test_weights_are_taken_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    detach = ModuleBinding.detach

    def note(self: ModuleBinding, is_lent: Callable[[int], bool]) -> None:
        taken.append(self)
        detach(self, is_lent)

    monkeypatch.setattr(ModuleBinding, "detach", note)
    store, model = a_store(), Uniform(3.0)
    first, worker = a_sender(store, model), a_worker(store, 0)
    await within(asyncio.gather(first.connect(), worker.connect()))
    assert first.shared_transport is not None
    first.shared_transport.stop()
    await first.sender_transports[0]._close()
    for _ in range(4):
        assert await worker.scheme.receive(timeout=BRIEF) is None
    assert len(taken) == 1
    assert value_of(worker.model) == 3
    await within(first.aclose())
    fill(model, 4)
    second = a_sender(store, model)
    connecting = asyncio.create_task(second.connect())
    await worker.serve()
    await within(connecting)
    for value in (5, 6):
        await sent(second, model, [worker], value)
    await worker.close()
    await within(second.aclose())


def _has_another(scheme: WeightSyncScheme, known: set[Any]) -> bool:
    return scheme.sender_transports.get(0) not in known


async def test_a_process_that_has_lost_the_sender_lets_go_of_its_slots() -> None:
    async with ProcessCluster(COMING_BACK, workers=1, size=LARGE) as cluster:
        scheme, worker = cluster.scheme, cluster.workers[0]
        for value in range(1, 7):
            fill(cluster.model, value)
            assert (await scheme.send()).ok
            known = {None, scheme.sender_transports[0]}
            await worker.run(scenarios.cut)
            await eventually(partial(_has_another, scheme, known), "it is back")
            await eventually(lambda: scheme.workers[0].version == scheme.version, "it has the newest")
            assert await worker.run(scenarios.report) == {"version": value, "value": value}
        assert len(slots_of(scheme)) <= 3
        assert {lease.kind for lease in leases_of(scheme)} <= {
            LeaseKind.NEWEST,
            LeaseKind.NOTIFIED,
            LeaseKind.READING,
        }
