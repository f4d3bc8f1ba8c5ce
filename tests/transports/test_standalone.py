"""Transports that are used alone, without a scheme."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

import aiosync
from aiosync import (
    AlreadyConnectedError,
    InvalidArgumentError,
    LayoutMismatchError,
    NotConnectedError,
    SyncTimeoutError,
    WorkerLostError,
)
from aiosync.schemes.standalone.base import StandaloneTransport
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.models import Other, Uniform, fill, value_of

SPAWNED = multiprocessing.get_context("forkserver")


class Pair:
    """Both ends of one kind of transport; ``ends`` creates another (sender, receiver) over the same means."""

    def __init__(
        self, ends: Callable[[], tuple[StandaloneTransport, StandaloneTransport]], *carriers: Any
    ) -> None:
        self.ends = ends
        self.carriers = carriers  # closed at the end
        self.sender, self.receiver = ends()

    async def aclose(self) -> None:
        await within(asyncio.gather(self.sender.aclose(), self.receiver.aclose()))
        for each in self.carriers:
            each.close()
        self.__dict__.clear()  # pytest refers to this object longer


def over_queue(make: Callable[[], Any]) -> Pair:
    carrier = make()
    carriers = [carrier] if hasattr(carrier, "close") else []
    return Pair(lambda: (aiosync.MPTransport(carrier), aiosync.MPTransport(carrier)), *carriers)


def over_pipe() -> Pair:
    ours, theirs = multiprocessing.Pipe()
    return Pair(lambda: (aiosync.MPTransport(ours), aiosync.MPTransport(pipe=theirs)), ours, theirs)


def over_unix_socket() -> Pair:
    path = f"unix:///tmp/aiosync-{os.getpid()}-{time.monotonic_ns()}"
    return Pair(lambda: (aiosync.TCPTransport(path), aiosync.TCPTransport(path)))


def over_store() -> Pair:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Pair(
        lambda: (
            aiosync.DistributedTransport(weights_buffer=None, store=store, rank=2),
            aiosync.DistributedTransport(weights_buffer=None, store=store, rank=2),
        )
    )


PAIRS: dict[str, Callable[[], Pair]] = {
    "unix": over_unix_socket,
    "pipe": over_pipe,
    "mp.SimpleQueue": lambda: over_queue(multiprocessing.SimpleQueue),
    "queue.Queue": lambda: over_queue(queue.Queue),
    "distributed": over_store,
}


@pytest.fixture(params=PAIRS)
async def pair(request: pytest.FixtureRequest) -> Any:
    made = PAIRS[request.param]()
    yield made
    await made.aclose()


async def send(pair: Pair, weights: Any, **arguments: Any) -> Any:
    """Send weights while the receiver receives; returns what it received."""
    sending = asyncio.create_task(pair.sender.send_weights(weights, timeout=PATIENCE))
    received = await pair.receiver.receive_weights(PATIENCE, **arguments)
    await within(sending)
    return received


async def test_each_version_arrives_and_is_acknowledged(pair: Pair) -> None:
    model, replica = Uniform(1.0), Uniform(-1.0)
    assert isinstance(pair.sender, aiosync.Transport)
    assert not pair.sender.check_connection()
    assert await pair.receiver.receive_weights(0.0) is None
    received = await send(pair, model, model=replica)
    assert value_of(replica) == 1
    assert isinstance(received, TensorDict)
    assert pair.sender.check_connection()
    assert pair.receiver.check_connection()
    fill(model, 2.0)
    await pair.sender.send_weights_async(model)
    received = await pair.receiver.receive_weights(PATIENCE, strategy="state_dict")
    await pair.receiver.send_ack()
    await pair.sender.wait_ack(timeout=PATIENCE)
    assert value_of(replica) == 2
    assert received.keys() == model.state_dict().keys()
    assert await pair.receiver.receive_weights(BRIEF) is None
    fill(model, 3.0)  # not sent
    assert value_of(replica) == 2


async def test_without_a_model_the_weights_are_the_callers_own(pair: Pair) -> None:
    model = Uniform(1.0)
    first = await send(pair, model.state_dict())
    fill(model, 2.0)
    second = await send(pair, model.state_dict())
    assert [each["values", "0"][0].item() for each in (first, second)] == [1, 2]


async def test_what_does_not_fit_is_refused_on_both_sides(pair: Pair) -> None:
    sending = asyncio.create_task(pair.sender.send_weights(Uniform(1.0), timeout=PATIENCE))
    with pytest.raises(LayoutMismatchError):
        await pair.receiver.receive_weights(PATIENCE, model=Other())
    with pytest.raises(LayoutMismatchError):
        await within(sending)
    replica = Uniform(-1.0)
    assert await pair.receiver.receive_weights(PATIENCE, model=replica) is not None
    assert value_of(replica) == 1
    with pytest.raises(LayoutMismatchError):
        await pair.sender.send_weights(Other())
    assert value_of(replica) == 1


async def test_nothing_to_wait_for(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"call send_weights_async\(\) first") as raised:
        await pair.sender.wait_ack()
    assert isinstance(raised.value, NotConnectedError)
    await send(pair, Uniform(1.0))
    with pytest.raises(RuntimeError):  # that call has waited itself
        await pair.sender.check_ack()
    with pytest.raises(InvalidArgumentError, match="expected 'updated'"):
        await pair.sender.check_ack("done")


async def test_deadlines(pair: Pair) -> None:
    with pytest.raises(SyncTimeoutError):
        await pair.sender.send_weights(Uniform(1.0), timeout=BRIEF)
    lonely = PAIRS["queue.Queue"]()
    with pytest.raises(SyncTimeoutError):
        await lonely.receiver.setup_connection_and_weights_on_receiver(timeout=0.01)
    await lonely.aclose()
    replica = Uniform(-1.0)  # what was published before the deadline is not lost
    await within(pair.receiver.setup_connection_and_weights_on_receiver(model=replica))
    await pair.receiver.receive_weights(BRIEF)
    assert value_of(replica) == 1


async def test_one_object_is_used_on_one_side(pair: Pair) -> None:
    await send(pair, Uniform(1.0))
    with pytest.raises(AlreadyConnectedError, match="another transport object"):
        await pair.sender.receive_weights(0.0)
    with pytest.raises(AlreadyConnectedError, match="another transport object"):
        await pair.receiver.send_weights(Uniform(1.0))


async def test_cancelled_calls_lose_nothing(pair: Pair) -> None:
    waiting = asyncio.create_task(pair.receiver.receive_weights(PATIENCE))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    sending = asyncio.create_task(pair.sender.send_weights(Uniform(1.0)))
    await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.wait([sending])
    replica = Uniform(-1.0)
    sending = asyncio.create_task(pair.sender.send_weights(Uniform(2.0)))
    while value_of(replica) != 2:  # perhaps 1 first, which was published before the call was cancelled
        assert await pair.receiver.receive_weights(PATIENCE, model=replica) is not None
    await within(sending)


async def test_a_worker_that_connects_while_the_sender_publishes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.sender.setup_connection_and_weights_on_sender()
    await pair.sender.send_weights_async(Uniform(1.0))
    replica, send = Uniform(-1.0), aiosync.WeightSyncScheme.send
    receiving: list[asyncio.Task[Any]] = []

    async def send_and_connect(scheme: aiosync.WeightSyncScheme, *args: Any, **options: Any) -> Any:
        try:
            return await send(scheme, *args, **options)
        finally:  # the version was published, and no worker was there
            receiving.append(asyncio.create_task(pair.receiver.receive_weights(PATIENCE, model=replica)))
            await eventually(lambda: scheme.workers[0].connected, "the worker has connected")

    monkeypatch.setattr(aiosync.WeightSyncScheme, "send", send_and_connect)
    await within(pair.sender.send_weights(Uniform(2.0)))
    await within(receiving[0])
    assert value_of(replica) == 2


async def test_closed_while_a_call_waits(pair: Pair) -> None:
    for transport, call in (
        (pair.receiver, pair.receiver.receive_weights(PATIENCE)),
        (pair.sender, pair.sender.send_weights(Uniform(1.0), timeout=PATIENCE)),
    ):
        waiting = asyncio.ensure_future(call)
        await asyncio.sleep(0.01)
        await transport.aclose()
        with pytest.raises(NotConnectedError):
            await within(waiting)


async def test_a_sender_that_is_started_again(pair: Pair) -> None:
    if isinstance(pair.receiver, aiosync.MPTransport) and pair.receiver.pipe is not None:
        pytest.skip("a closed pipe is not opened again")
    replica = Uniform(-1.0)
    await send(pair, Uniform(1.0), model=replica)
    await pair.sender.aclose()
    with pytest.raises(NotConnectedError, match="is closed"):
        await pair.sender.send_weights(Uniform(1.0))
    with pytest.raises(WorkerLostError):
        await pair.receiver.receive_weights(PATIENCE)
    assert value_of(replica) == 1
    pair.sender, other = pair.ends()
    await other.aclose()
    await send(pair, Uniform(5.0))
    assert value_of(replica) == 5


async def test_a_free_port() -> None:
    sender = aiosync.TCPTransport(token="0123456789abcdef")
    assert sender.address.endswith(":0")
    await sender.setup_connection_and_weights_on_sender()
    receiver = aiosync.TCPTransport(sender.address, token="0123456789abcdef")
    pair = Pair(lambda: (sender, receiver))
    replica = Uniform(-1.0)
    await send(pair, Uniform(1.0), model=replica)
    assert value_of(replica) == 1
    await pair.aclose()


def _receive(transport: StandaloneTransport, count: int, stay: bool) -> None:
    async def run() -> None:
        replica = Uniform(-1.0)
        for _ in range(count):
            await transport.receive_weights(PATIENCE, model=replica)
        if stay:
            await asyncio.sleep(PATIENCE)
        await transport.aclose()

    asyncio.run(run())


async def test_a_killed_worker_and_its_successor() -> None:
    sender = aiosync.MPTransport(SPAWNED.SimpleQueue())
    model = Uniform(1.0)
    first = SPAWNED.Process(target=_receive, args=(sender, 1, True))
    first.start()
    await sender.send_weights(model, timeout=PATIENCE)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerLostError):
        while time.monotonic() < begun + PATIENCE:
            await sender.send_weights(model, timeout=PATIENCE)
    second = SPAWNED.Process(target=_receive, args=(sender, 1, False))
    second.start()
    for _ in range(2):
        try:
            await sender.send_weights(model, timeout=PATIENCE)
        except WorkerLostError:
            await asyncio.sleep(BRIEF)
    await sender.aclose()
    for process in (first, second):
        process.join()
        process.close()


# -- shared memory --------------------------------------------------------------------------------------


async def test_shared_memory_for_several_workers() -> None:
    queues = {0: SPAWNED.SimpleQueue(), 1: SPAWNED.SimpleQueue()}
    weights = TensorDict({"a": torch.zeros(3)})
    sender = aiosync.SharedMemTransport(PATIENCE)
    with pytest.raises(RuntimeError, match="register_weights"):
        await sender.send_weights(weights)
    with pytest.raises(RuntimeError, match="register_weights"):
        sender.unique_weights  # noqa: B018
    sender.register_weights({0: weights, 1: weights}, queues)
    await sender.setup_connection_and_weights_on_sender()
    receivers = [pickle.loads(pickle.dumps(aiosync.SharedMemTransport(PATIENCE))) for _ in range(2)]
    models = [{"a": torch.full((3,), -1.0)} for _ in receivers]
    for index, receiver in enumerate(receivers):
        receiver.register_weights({}, queues)
        with pytest.raises(RuntimeError, match="has no queue"):
            await receiver.setup_connection_and_weights_on_receiver(worker_idx=2)
        found = await receiver.setup_connection_and_weights_on_receiver(worker_idx=index, model=models[index])
        assert found["a"].tolist() == [0, 0, 0]
    sending = asyncio.create_task(sender.send_weights({"a": torch.ones(3)}))
    for receiver, model in zip(receivers, models, strict=True):
        await receiver.receive_weights(PATIENCE)
        assert model["a"].tolist() == [1, 1, 1]
    await within(sending)
    assert [each["a"].tolist() for each in sender.unique_weights] == [[1, 1, 1]]
    assert (await receivers[0].receive_weights(model=models[0], strategy="tensordict"))["a"].tolist() == [
        1,
        1,
        1,
    ]
    assert await receivers[0].receive_weights(0.0, model=models[0]) is None
    for transport in (*receivers, sender):
        await transport.aclose()


async def test_shared_memory_per_worker() -> None:
    queues = {0: SPAWNED.SimpleQueue(), 1: SPAWNED.SimpleQueue()}
    weights = TensorDict({"a": torch.zeros(3)})
    sender = aiosync.SharedMemTransport(PATIENCE)
    sender.register_weights({0: weights, 1: weights}, queues, per_worker=True)
    await sender.send_weights({0: {"a": torch.ones(3)}, 1: {"a": torch.full((3,), 2.0)}})
    assert [each["a"][0].item() for each in sender.unique_weights] == [1, 2]
    await sender.send_weights({"a": torch.full((3,), 3.0)}, worker_ids=[1])
    assert [each["a"][0].item() for each in sender.unique_weights] == [1, 3]
    with pytest.raises(ValueError, match="worker"):
        await sender.send_weights({"a": torch.zeros(3)}, worker_ids=[7])
    await sender.aclose()


async def test_a_lost_worker_that_the_weights_are_not_for() -> None:
    queues = {worker: SPAWNED.SimpleQueue() for worker in range(3)}
    sender, first, lost = (aiosync.SharedMemTransport(PATIENCE) for _ in range(3))
    sender.register_weights(dict.fromkeys(queues, TensorDict({"a": torch.zeros(3)})), queues, per_worker=True)
    await sender.setup_connection_and_weights_on_sender()
    model = {"a": torch.full((3,), -1.0)}
    for worker, receiver in enumerate((first, lost)):
        receiver.register_weights({}, queues)
        await receiver.setup_connection_and_weights_on_receiver(worker_idx=worker, model=model)
    await lost.aclose()
    # Worker 2 has never connected.
    sending = asyncio.create_task(sender.send_weights({0: {"a": torch.ones(3)}}))
    await first.receive_weights(PATIENCE)
    await within(sending)
    assert model["a"].tolist() == [1, 1, 1]
    for transport in (first, sender):
        await transport.aclose()


# -- torch.distributed ------------------------------------------------------------------------------------


async def test_the_first_weights_of_a_rank() -> None:
    store, buffer = dist.HashStore(), TensorDict({"a": torch.zeros(3)})  # type: ignore[attr-defined]
    sender = aiosync.DistributedTransport(weights_buffer=buffer, store=store, rank=1)
    receiver = aiosync.DistributedTransport(weights_buffer=buffer, store=store, rank=1)
    await receiver.setup_connection_and_weights_on_receiver(worker_idx=0)
    sending = asyncio.create_task(sender.send_initial_weights({"a": torch.ones(3)}))
    assert await within(receiver.receive_initial_weights()) is buffer
    await within(sending)
    assert buffer["a"].tolist() == [1, 1, 1]
    other = TensorDict({"a": torch.zeros(3)})
    model = {"a": torch.zeros(3)}
    sending = asyncio.create_task(sender.send_weights({"a": torch.full((3,), 2.0)}))
    assert await receiver.receive_weights(PATIENCE, weights=other, model=model) is other
    await within(sending)
    assert other["a"].tolist() == [2, 2, 2] == model["a"].tolist()
    await asyncio.gather(sender.aclose(), receiver.aclose())
