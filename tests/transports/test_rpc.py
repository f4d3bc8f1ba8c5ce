"""torch RPC: how workers find their sender, and objects of other processes."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed import rpc

from aiosync import (
    InvalidArgumentError,
    LayoutMismatchError,
    NotInitializedError,
    RemoteApplyError,
    RPCWeightSyncScheme,
    SyncTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
    updaters,
)
from aiosync.schemes import attach as enlisted
from aiosync.sync import updaters as blocking_updaters
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.transports.torch_rpc import rendezvous as rpc_rendezvous
from aiosync.transports.torch_rpc.transport import RPCObject, is_member
from aiosync.transports.unix_socket import UnixConnection
from tests.conformance.test_g07_one_bad_worker import SOON
from tests.kit import rpc as kit_rpc
from tests.kit import scenarios
from tests.kit.cases import SchemeCase, over_rpc
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Other, Uniform, fill, value_of
from tests.kit.processes import ProcessCluster
from tests.kit.rpc import World, free_address, in_a_process
from tests.transports.rpc_objects import Collector, Fallible, leave, linger, serve

MANY = 20
"""More calls than an agent has threads."""


@asynccontextmanager
async def world_of(workers: int) -> AsyncIterator[Sequence[BaseProcess]]:
    """This process is rank 0; as many others take part."""
    # This process has torch, and no thread yet. A server to fork from would have to import torch first.
    context, address = multiprocessing.get_context("fork"), free_address()
    processes = [context.Process(target=serve, args=(address, w, 1 + workers)) for w in range(workers)]
    try:
        for process in processes:
            process.start()
        World(address, 1 + workers)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        if is_member():
            rpc.shutdown(graceful=False)


def others() -> list[Any]:
    """Who takes part besides this process, by rank."""
    agent: Any = rpc.api._get_current_rpc_agent()  # type: ignore[attr-defined]
    return sorted((info for info in agent.get_worker_infos() if info.id), key=lambda info: info.id)


class Context:
    """What torchrl's RPCCollector shows a scheme."""

    def __init__(self, kind: type[Collector], workers: int, model: Uniform, **arguments: Any) -> None:
        self.policy = model
        self.num_workers = workers
        self.collector_class = kind
        self.collector_infos = others()
        self.collector_rrefs = [rpc.remote(info, kind, kwargs=arguments) for info in self.collector_infos]

    def call(self, worker: int, method: str, *args: Any) -> Any:
        """A method of one of the objects."""
        return getattr(self.collector_rrefs[worker].rpc_sync(), method)(*args)


@asynccontextmanager
async def collectors(
    kind: type[Collector] = Collector, workers: int = 2, size: int = 16, **options: Any
) -> AsyncIterator[tuple[RPCWeightSyncScheme, Context, Sequence[BaseProcess]]]:
    """A connected sender and objects that know nothing of it."""
    async with world_of(workers) as processes:
        context = Context(kind, workers, Uniform(size=size), size=size)
        scheme = RPCWeightSyncScheme(timeout=PATIENCE, **options)
        scheme.init_on_sender(model_id="policy", context=context)
        try:
            await within(scheme.connect())
            yield scheme, context, processes
        finally:
            await within(scheme.aclose())


# -- objects that join by themselves -----------------------------------------------------------------


@in_a_process
async def test_objects_join_and_are_told() -> None:
    await _joined_and_told()


@in_a_process
async def test_objects_join_over_any_of_torchs_transports() -> None:
    kit_rpc.TRANSPORTS = None  # torch's default
    await _joined_and_told()


@in_a_process
async def test_objects_join_and_are_sent_everything() -> None:
    await _joined_and_told(size=1 << 16, share_memory=False)


async def _joined_and_told(**options: Any) -> None:
    async with collectors(**options) as (scheme, context, _):
        kind = TCPConnection if options else UnixConnection
        assert all(isinstance(transport, kind) for transport in scheme.sender_transports.values())
        for version in (1, 2):
            fill(context.policy, version)
            assert set((await scheme.send()).workers) == {0, 1}
        for worker in (0, 1):
            assert context.call(worker, "values") == (2, [0, 1, 2])


@in_a_process
async def test_no_forward_pass_of_an_object_is_torn() -> None:
    await _untorn()


@in_a_process
async def test_no_forward_pass_of_an_object_that_is_sent_everything_is_torn() -> None:
    await _untorn(share_memory=False)


async def _untorn(**options: Any) -> None:
    async with collectors(workers=1, size=1 << 16, **options) as (scheme, context, _):
        passing = context.collector_rrefs[0].rpc_async().torn(3000)
        version = 0
        while not passing.done() or version < 20:
            version += 1
            fill(context.policy, version)
            await scheme.send()
        assert passing.wait() == 0


@in_a_process
async def test_an_object_that_refuses() -> None:
    async with collectors(Fallible) as (scheme, context, _):
        fill(context.policy, 13)
        with pytest.raises(RemoteApplyError, match="thirteen is refused") as caught:
            await scheme.send()
        assert caught.value.remote_type.endswith("ArithmeticError")
        fill(context.policy, 14)
        await scheme.send()
        assert context.call(0, "values")[0] == 14


@in_a_process
async def test_an_object_without_such_a_model() -> None:
    async with world_of(1):
        context = Context(Collector, 1, Uniform())
        context.value_net = context.policy  # type: ignore[attr-defined]
        scheme = RPCWeightSyncScheme(timeout=PATIENCE)
        scheme.init_on_sender(model_id="value_net", context=context)
        with pytest.raises(RemoteApplyError, match="value_net") as caught:
            await scheme.connect()
        assert caught.value.worker == 0
        await within(scheme.aclose())


@in_a_process
async def test_an_object_whose_model_does_not_fit() -> None:
    async with world_of(1):
        context = Context(Collector, 1, Uniform(), size=3)
        scheme = RPCWeightSyncScheme(timeout=PATIENCE)
        scheme.init_on_sender(model_id="policy", context=context)
        with pytest.raises((LayoutMismatchError, SyncTimeoutError), match="16"):
            await scheme.connect(timeout=SOON)
        await within(scheme.aclose())


@in_a_process
async def test_an_object_whose_process_dies() -> None:
    async with collectors() as (scheme, context, processes):
        processes[1].kill()
        fill(context.policy, 1)
        with pytest.raises(WorkerLostError) as caught:
            await within(scheme.send(), SOON)
        assert caught.value.workers == (1,)
        assert context.call(0, "values")[0] == 1


@in_a_process
async def test_objects_may_join_a_second_sender() -> None:
    async with collectors(workers=1) as (scheme, context, _):
        await scheme.aclose()
        second = RPCWeightSyncScheme(timeout=PATIENCE)
        fill(context.policy, 5)
        second.init_on_sender(model_id="policy", context=context)
        await within(second.connect())
        assert context.call(0, "values")[0] == 5
        await within(second.aclose())


def test_one_object_per_worker() -> None:
    context = SimpleNamespace(
        policy=Uniform(), num_workers=2, collector_rrefs=[object()], collector_infos=[object()]
    )
    world = World()
    try:
        scheme = RPCWeightSyncScheme()
        with pytest.raises(InvalidArgumentError, match="1 collector_infos and 1 collector_rrefs for 2 work"):
            scheme.init_on_sender(model_id="policy", context=context)
        asyncio.run(scheme.aclose())
    finally:
        world.close()


# -- one remote object -------------------------------------------------------------------------------


@asynccontextmanager
async def remote_object(kind: type[Collector]) -> AsyncIterator[tuple[RPCObject, BaseProcess]]:
    async with world_of(1) as processes:
        (info,) = others()
        transport = RPCObject(info, rpc.remote(info, kind), kind, worker_idx=0)
        yield transport, processes[0]
        await transport.aclose()


@in_a_process
async def test_calls_are_awaited() -> None:
    async with remote_object(Collector) as (transport, _):
        assert transport.check_connection()
        before = threading.active_count()
        waiting = [asyncio.ensure_future(transport.call("torn", 1, timeout=PATIENCE)) for _ in range(MANY)]
        await asyncio.sleep(0)
        assert threading.active_count() == before
        assert await asyncio.gather(*waiting) == [0] * MANY


@in_a_process
async def test_weights_for_an_object() -> None:
    async with remote_object(Fallible) as (transport, _):
        model = Uniform(3.0)
        await transport.send_weights(model, timeout=PATIENCE)
        assert (await transport.call("values", timeout=PATIENCE))[0] == 3
        fill(model, 4)
        await transport.send_weights_async(model, timeout=PATIENCE)
        fill(model, 99)  # what was sent is a copy
        await transport.wait_ack()
        assert (await transport.call("values", timeout=PATIENCE))[0] == 4
        await transport.send_weights(None, timeout=PATIENCE)
        assert (await transport.call("values", timeout=PATIENCE))[1] == [-2]


@in_a_process
async def test_what_an_object_raises() -> None:
    async with remote_object(Fallible) as (transport, _):
        with pytest.raises(RemoteApplyError, match="thirteen is refused") as caught:
            await transport.send_weights(Uniform(13.0), timeout=PATIENCE)
        assert (caught.value.worker, caught.value.remote_type) == (0, "ArithmeticError")
        assert "update_policy_weights_" in caught.value.remote_traceback
        with pytest.raises(RemoteApplyError, match="nothing_of_the_kind"):
            await transport.call("nothing_of_the_kind", timeout=PATIENCE)


@in_a_process
async def test_an_object_that_does_not_answer() -> None:
    async with remote_object(Collector) as (transport, process):
        slow = Collector.torn.__name__
        with pytest.raises(SyncTimeoutError, match="did not answer a call of torch RPC"):
            await within(transport.call(slow, 10**8, timeout=BRIEF), SOON)
        pending = asyncio.ensure_future(transport.call(slow, 10**8, timeout=PATIENCE))
        await asyncio.sleep(BRIEF)
        process.kill()
        with pytest.raises(WorkerLostError) as caught:
            await within(pending, SOON)
        assert caught.value.workers == (0,)


@in_a_process
async def test_a_cancelled_call_leaves_nothing() -> None:
    async with remote_object(Fallible) as (transport, _):
        pending = asyncio.ensure_future(transport.call("torn", 10**5, timeout=PATIENCE))
        await asyncio.sleep(0)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await transport.send_weights(Uniform(3.0), timeout=PATIENCE)
        await transport.send_weights_async(Uniform(13.0), timeout=PATIENCE)  # its failure is not awaited


# -- the updater ---------------------------------------------------------------------------------------


def updater_of(library: Any, context: Context) -> Any:
    """An updater of all the context's objects."""
    return library.RPCWeightUpdater(
        context.collector_infos,
        context.collector_class,
        context.collector_rrefs,
        context.policy,
        context.num_workers,
    )


@in_a_process
async def test_the_updater_pushes_to_remote_objects() -> None:
    async with world_of(2) as processes:
        context = Context(Fallible, 2, Uniform(1.0))
        updater = updater_of(updaters, context)
        heard: list[int] = []
        updater.register_post_hook(lambda: heard.append(1))
        assert updater.all_worker_ids() == [0, 1]
        await updater.push_weights()
        assert [context.call(w, "values")[0] for w in (0, 1)] == [1, 1]
        await updater(Uniform(2.0), worker_ids=1)
        await updater.push_weights(weights=Uniform(3.0), worker_ids=[0])
        assert [context.call(w, "values")[0] for w in (0, 1)] == [3, 2]
        await updater.push_weights(Uniform(4.0), wait=False)
        await updater.push_weights(Uniform(5.0), worker_ids=[0])
        assert context.call(0, "values")[0] == 5
        assert len(heard) == 5
        heard.clear()
        await updater.push_weights(Uniform(13.0), wait=False)
        with pytest.raises(RemoteApplyError, match="thirteen"):  # of the push before; these have been sent
            await updater.push_weights(Uniform(7.0))
        assert [context.call(w, "values")[0] for w in (0, 1)] == [7, 7]
        with pytest.raises(UnknownWorkerError, match="unknown worker 2"):
            await updater.push_weights(worker_ids=[2])
        with pytest.raises(RemoteApplyError, match="thirteen is refused"):
            await updater.push_weights(Uniform(13.0))
        processes[0].kill()
        with pytest.raises(WorkerLostError) as caught:
            await within(updater.push_weights(Uniform(6.0)), SOON)
        assert caught.value.workers == (0,)
        assert context.call(1, "values")[0] == 6
        await updater.aclose()


@in_a_process
async def test_the_blocking_updater_pushes_to_remote_objects() -> None:
    async with world_of(1):
        context = Context(Fallible, 1, Uniform(1.0))
        updater = updater_of(blocking_updaters, context)
        updater.push_weights()
        updater.push_weights(Uniform(2.0), wait=False)
        updater(Uniform(3.0))
        assert context.call(0, "values")[0] == 3
        with pytest.raises(RemoteApplyError, match="thirteen is refused"):
            updater.push_weights(Uniform(13.0))
        updater.close()


# -- where the sender is -----------------------------------------------------------------------------


@asynccontextmanager
async def here() -> AsyncIterator[None]:
    """This process alone, with senders and workers in it."""
    # The last world of this process may have ended before the cancellation of a lookup arrived.
    rpc_rendezvous._directory._asked.clear()
    world = World()
    try:
        yield
        assert not rpc_rendezvous._directory._asked
        assert not rpc_rendezvous._directory._senders
        assert not rpc_rendezvous._pending
    finally:
        world.close()


def worker_of(scheme: RPCWeightSyncScheme, model: nn.Module | None = None) -> LocalWorker:
    return LocalWorker(scheme, 0, Uniform(-1.0) if model is None else model, {})


async def test_a_worker_without_the_senders_scheme() -> None:
    """It asks rank 0, or the process named by sender=. The worker may start first."""
    async with here():
        for sender in (None, rpc.get_worker_info().name):
            worker = worker_of(RPCWeightSyncScheme(sender=sender, timeout=PATIENCE))
            coming = asyncio.ensure_future(worker.connect())
            await eventually(lambda: bool(rpc_rendezvous._directory._asked), "it has asked")
            scheme = RPCWeightSyncScheme(timeout=PATIENCE)
            scheme.init_on_sender(model_id="policy", model=Uniform(7.0), num_workers=1)
            await within(asyncio.gather(scheme.connect(), coming))
            assert value_of(worker.model) == 7
            await worker.close()
            await within(scheme.aclose())


async def test_a_process_that_takes_no_part_is_sent_everything() -> None:
    """It comes in the place of one that has died."""
    case = SchemeCase("rpc-apart", over_rpc(share_memory=False))
    async with ProcessCluster(case, workers=2, size=1 << 16) as cluster:
        assert all(isinstance(t, TCPConnection) for t in cluster.scheme.sender_transports.values())
        cluster.workers[1].kill()
        await cluster.workers[1].ended()
        fill(cluster.model, 1)
        with pytest.raises(WorkerLostError, match="worker 1 lost"):
            await cluster.scheme.send()
        cluster.spawn(1)
        await cluster.connect_worker(1)
        fill(cluster.model, 2)
        assert (await cluster.scheme.send()).ok
        for worker in cluster.workers.values():
            assert await worker.run(scenarios.report) == {"version": 2, "value": 2}


async def test_a_worker_whose_sender_does_not_come() -> None:
    async with here():
        worker = worker_of(RPCWeightSyncScheme(timeout=PATIENCE))
        with pytest.raises(SyncTimeoutError, match=r"'trainer' of torch RPC has no sender of this model"):
            await worker.connect(timeout=BRIEF)
        await eventually(lambda: not rpc_rendezvous._directory._asked, "it does not ask any more")
        await worker.close()


async def test_no_process_has_that_name() -> None:
    async with here():
        worker = worker_of(RPCWeightSyncScheme(sender="stranger", timeout=PATIENCE))
        with pytest.raises(WorkerLostError, match="could not find destination name stranger"):
            await worker.connect()
        await worker.close()


def test_a_lookup_that_arrives_after_its_cancellation() -> None:
    directory = rpc_rendezvous._Directory()
    directory.cancel("ticket")
    assert directory.look_up("model policy", "ticket", "worker", PATIENCE) is None
    assert not directory._asked
    assert not directory._cancelled


def test_a_lookup_whose_worker_died_is_forgotten_after_its_deadline() -> None:
    """No cancellation arrives from a worker that was killed, or from a world of torch RPC that has ended."""
    directory = rpc_rendezvous._Directory()
    assert directory.look_up("model policy", "killed", "worker", 0.0) is None
    assert directory.look_up("model other", "waits", "worker", PATIENCE) is None
    assert list(directory._asked) == ["waits"]


async def test_two_senders_of_one_model() -> None:
    async with here():
        schemes = [RPCWeightSyncScheme(timeout=PATIENCE) for _ in range(2)]
        workers = []
        for value, scheme in enumerate(schemes):
            scheme.init_on_sender(model_id="policy", model=Uniform(float(value)), num_workers=1)
            workers.append(worker_of(copy.copy(scheme)))
        await within(asyncio.gather(*(s.connect() for s in schemes), *(w.connect() for w in workers)))
        assert [value_of(worker.model) for worker in workers] == [0, 1]
        for worker in workers:
            await worker.close()
        for scheme in schemes:
            await within(scheme.aclose())


def _without_rpc(scheme: RPCWeightSyncScheme) -> str:
    try:
        scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    except NotInitializedError as exc:
        return str(exc)
    return ""


def test_who_takes_no_part() -> None:
    assert "call torch.distributed.rpc.init_rpc() first" in _without_rpc(RPCWeightSyncScheme())
    worker = RPCWeightSyncScheme()
    worker.init_on_receiver(model_id="policy", model=Other(), worker_idx=0)
    with pytest.raises(NotInitializedError, match="init_rpc"):
        asyncio.run(worker.connect())


# -- the job's own use of RPC ------------------------------------------------------------------------


@in_a_process
async def test_calls_of_the_job_that_keep_every_thread_busy() -> None:
    async with collectors(workers=1) as (scheme, context, _):
        info = context.collector_infos[0]
        calls = [rpc.rpc_async(info, linger, args=(10 * BRIEF,)) for _ in range(MANY)]
        fill(context.policy, 1)
        await within(scheme.send(), SOON)
        assert not calls[-1].done()
        for call in calls:
            call.wait()


@in_a_process
async def test_an_orderly_shutdown_is_not_held_up() -> None:
    async with collectors(workers=1) as (scheme, context, _):
        context.collector_rrefs.clear()  # torch waits for those
        rpc.rpc_sync(context.collector_infos[0], leave)
        shutting_down = threading.Thread(target=rpc.shutdown)
        shutting_down.start()
        await eventually(lambda: not shutting_down.is_alive(), "shut down")
        fill(context.policy, 1)
        assert (await scheme.send()).ok


async def test_endpoints_of_objects_end_with_their_sender() -> None:
    """In this very process, to look at what is left."""
    async with here():
        target = Collector()
        scheme = RPCWeightSyncScheme(timeout=PATIENCE)
        scheme.init_on_sender(model_id="policy", model=Uniform(3.0), num_workers=1)
        for _ in range(2):
            enlisted.enlist(target, copy.copy(scheme), "policy", 0)
        assert len(enlisted._seats) == 1
        await within(scheme.connect())
        assert target.received == [3]
        await within(scheme.aclose())
        await eventually(lambda: not enlisted._seats, "it has ended too")
