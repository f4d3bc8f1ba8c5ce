"""The sender: one model's weights, out to its workers.

States: NEW → LIVE → CLOSED. Everything happens on the loop that ``connect`` ran on, except copies and
allocations, which one thread does. ``send`` drafts, writes and publishes a version (see
:mod:`aiosync.sender.publisher` for what a cancellation does there) and then awaits the answers; cancelled
in that, the version stays published and the answers are taken as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiosync._deadline import Deadline, FairLock
from aiosync._endpoint import HomeLoop, OpenCalls, SendingEndpoint, WorkerIds
from aiosync._options import SchemeOptions
from aiosync.errors import InvalidArgumentError, NotConnectedError
from aiosync.events import EventSource
from aiosync.reports import SendReport, WorkerState
from aiosync.sender.extraction import WeightSource, is_per_worker
from aiosync.sender.pending_acks import AckWaiter
from aiosync.sender.publish_together import publish_together
from aiosync.sender.publisher import Publication, Publisher
from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.sharded.gather import GatherLeader, ShardGather, leading
from aiosync.sender.worker_group import WorkerGroup
from aiosync.stats import SchemeStats
from aiosync.transfer.base import Transfer
from aiosync.transfer.slots import SlotPool
from aiosync.transfer.yield_request import asking_to_yield
from aiosync.transports._offload import Offloader, uninterrupted
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import FramedTransport, Listener
from aiosync.weights.devices import cuda_devices, pin_memory_of
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment


class WeightSender(SendingEndpoint):
    """The live sending endpoint. Made by a scheme; see :class:`~aiosync.WeightSyncScheme` for its use.

    Args:
        spec: the scheme's options.
        source: finds the weights to send; has the plan of the workers.
        model_id: the model's name.
        listener: where workers connect.
        token: the secret that workers must know.
        transfer: how versions get to workers; the sender closes it.
        events: gets what happens.
        leader: gathers the shards of a model that is spread over ranks; the sender closes it.
    """

    def __init__(
        self,
        spec: SchemeOptions,
        source: WeightSource,
        model_id: str | None,
        listener: Listener,
        token: bytes,
        *,
        transfer: Transfer,
        events: EventSource,
        leader: GatherLeader | None = None,
    ) -> None:
        self.spec = spec
        self.source = source
        self.plan = plan = source.plan
        self._leader = leader
        self.model_id = model_id
        self.registry = WorkerRegistry(
            set(plan.workers), model_id, listener, token, plan.elastic, transfer.outbound, events
        )
        self.transfer = transfer
        self._events = events
        self._listener = listener
        self._host = BackgroundTasks("aiosync-sender")
        self._offloader = Offloader("aiosync-sender")
        self._groups: list[WorkerGroup] = []
        self.publisher = Publisher(self._groups, self.registry, self._host, spec.first_version)
        self._acks = AckWaiter(self.registry, spec, model_id, events)
        self._live = False
        self._opening = FairLock()  # held by the connect() that publishes version 0
        self._closed = False
        self._calls = OpenCalls()
        self.home = HomeLoop("this sender")

    @property
    def version(self) -> int:
        """The version last published, -1 before ``connect``."""
        return self.publisher.version

    @property
    def stats(self) -> SchemeStats:
        """Figures so far."""
        stats = self.registry.stats
        stats.lag = {w: self.version - self.registry.version_of(w) for w in sorted(self.registry.workers)}
        stats.wire_nbytes = self.registry.wire_nbytes
        stats.memory = sum(group.pool.nbytes for group in self._groups)
        return stats

    @property
    def workers(self) -> dict[int, WorkerState]:
        """Worker -> whether it is connected, its version, its lag and its address."""
        return self.registry.states(self.version)

    @property
    def transports(self) -> dict[int, FramedTransport]:
        return {w: connection.transport for w, connection in sorted(self.registry.connections.items())}

    @property
    def weights_in_use(self) -> Mapping[str, Tensor] | None:
        """The newest version's tensors in the memory that workers read, of the first group.

        They are new tensors: if a caller shares one with another process, torch moves that one alone.
        """
        return next(iter(self.group_weights), None)

    @property
    def group_weights(self) -> list[Mapping[str, Tensor]]:
        """As :attr:`weights_in_use`, for each group of workers; empty before ``connect``."""
        return [group.newest.slot.fresh_views() for group in self._groups if group.newest is not None]

    def check_alive(self) -> None:
        self.home.check_alive()

    # -- connect ----------------------------------------------------------------------------------

    async def connect(
        self,
        weights: Any,
        deadline: Deadline,
        *,
        min_workers: int | None = None,
        before: Callable[[Any, Deadline], Awaitable[Any]] | None = None,
    ) -> None:
        """Publish version 0 and wait until every worker runs on it, or any ``min_workers`` of them.

        Args:
            weights: version 0; its names, shapes and dtypes are those of all that follow.
            deadline: when to give up.
            min_workers: how many workers are enough; None: all.
            before: called first, with the weights; returns the weights, which it may have found.

        Raises:
            SyncTimeoutError: some workers did not come in time; it names them. Call again to wait again.
            RemoteApplyError, LayoutMismatchError: a worker refused; it may connect again.
            NotConnectedError: this sender was closed meanwhile.
        """
        self.home.enter()
        self.is_matched = self._leader is not None
        if self._live:
            if before is not None:
                await before({}, deadline)  # workers that have stopped trying are asked to connect again
        else:
            # A sharded trainer's other ranks match each call with one of theirs, also one that fails while it
            # waits for its turn. So leading() comes first.
            async with leading(self._leader, "connect", deadline) as gathering, self._opening.hold(deadline):
                if not self._live:  # else another call has opened it meanwhile
                    if before is not None:
                        weights = await before(weights, deadline)
                    async with self._calls.call():
                        await self._open(weights, deadline, gathering)
        await self._wait_for_start(min_workers, deadline)

    async def _wait_for_start(self, min_workers: int | None, deadline: Deadline) -> None:
        async with self._calls.call():
            if min_workers is not None:
                await self._acks.wait_for_any(min_workers, deadline)
            else:
                await self._acks.wait_for(self.registry.workers, deadline)
        self._events.emit("connected", self.model_id, self.version)

    async def await_workers(self, deadline: Deadline) -> None:
        """Wait until every worker is connected, also the ones that were lost.

        Raises:
            SyncTimeoutError: some did not come in time; it names them.
            NotConnectedError: this was closed.
        """
        self.check_open()
        await self._acks.wait_for(self.registry.workers, deadline)

    async def add_worker(
        self, worker: int | None, join: Callable[[int], Awaitable[object]], deadline: Deadline
    ) -> int:
        """Add a worker, or one in the place of a lost one, and wait until it runs on the newest version.

        Args:
            worker: its index; None: the next.
            join: has it connect; given its index.

        Raises:
            InvalidArgumentError: it is connected already.
            SyncTimeoutError: it did not connect in time.
            RemoteApplyError, LayoutMismatchError: it refused.
            Exception: what ``join`` raises.
        """
        self.check_open()
        return await self._acks.add(worker, join, deadline, may_be_new=not self.plan.per_worker)

    async def _open(self, weights: Any, deadline: Deadline, gathering: ShardGather | None) -> None:
        self.check_open()
        sources = await self.source.extract(weights, self.registry.workers, deadline)
        bases = await self.source.presumed(weights, self.spec.cast, deadline)
        optional = self.source.optional(weights)
        await self._host.start()
        try:
            for number, plan in enumerate(self.plan.groups):
                tensors, base = sources[number], bases.get(number, {})
                # A user's strategy may extract entries that would be left out otherwise.
                base = {name: text for name, text in base.items() if name not in tensors}
                layout = Layout.of(tensors, cast=self.spec.cast, optional=optional, base=base)
                devices = cuda_devices(tensors.values())
                allocate = partial(self._allocate, device=plan.device, sources=devices)
                pool = SlotPool(layout, allocate, self.spec.max_slots)
                workers, streams = set(plan.workers), self.transfer.streams
                group = WorkerGroup(workers, plan.device, pool, self._offloader, streams, devices)
                self._groups.append(group)
                # Two at once: the first send after this one then runs into warm pages too.
                await group.reserve(2)
            async with self.publisher.lock.hold(deadline):
                publication = await self.publisher.prepare(
                    sources, set(), strict=True, joint=None, deadline=deadline
                )
                await self.publisher.fill(publication, gathering)
                await publish_together([publication], fallback=False)
                self.publisher.settle(publication)
            await self.registry.open(self._host, self._groups)
        except BaseException:
            await self._abandon()
            raise
        self._live = True
        if gathering is not None:
            gathering.version = self.version

    def _allocate(self, nbytes: int, *, device: torch.device, sources: Collection[torch.device]) -> Segment:
        """Allocate a slot's memory. ``sources``: the CUDA devices that the weights come from."""
        segment = self.transfer.allocate(nbytes, device)
        for source in sources:
            pin_memory_of(segment.buffer, source)
        return segment

    async def _abandon(self) -> None:
        await self._host.aclose()
        for group in self._groups:
            group.close()
        self._groups.clear()
        self.publisher = Publisher(self._groups, self.registry, self._host, self.spec.first_version)

    # -- send -------------------------------------------------------------------------------------

    async def send_until(
        self, weights: Any, worker_ids: WorkerIds, *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        if self._leader is None or not self.is_matched:
            return await self._send(weights, worker_ids, wait, strict, deadline, None)
        async with self._leader.calling("send", deadline) as gathering:
            try:
                self._check_live()
                return await self._send(weights, worker_ids, wait, strict, deadline, gathering)
            finally:
                gathering.version = self.version if self._live else None

    async def _send(
        self,
        weights: Any,
        worker_ids: WorkerIds,
        wait: bool,
        strict: bool,
        deadline: Deadline,
        gathering: ShardGather | None,
    ) -> SendReport:
        if weights is None and self.plan.made_here:
            raise InvalidArgumentError(
                "no weights were given, and the context has only a policy_factory: say which to send"
            )
        if worker_ids is None and type(weights) is dict and is_per_worker(weights):
            worker_ids = list(weights)
        targets = self.registry.resolve(worker_ids)
        sources = await self.source.extract(weights, targets, deadline)
        self.check_open()
        if not (publisher := self.publisher).lock.acquire_nowait():
            await publisher.lock.acquire(deadline)
        try:
            publication = await publisher.prepare(
                sources,
                targets,
                strict=strict,
                joint=None,
                deadline=deadline,
                may_overflow=not wait and gathering is None,
            )
            publication.to_all = worker_ids is None
            if gathering is not None or publication.sharded:
                await publisher.fill(publication, gathering)
            await publish_together([publication], fallback=wait)
        finally:
            publisher.lock.release()
        report = await self.finish(publication, wait=wait)
        acks = publication.acks
        if not wait or acks is None or acks.troubled or acks.pending:
            self._acks.raise_failure(report, deadline)
        return report

    async def finish(self, publication: Publication, *, wait: bool) -> SendReport:
        """Wait for the answers if ``wait``, and report; raises nothing but a cancellation."""
        acks, seconds, begun = publication.acks, publication.seconds, time.perf_counter()
        assert acks is not None
        try:
            if wait:
                await self._acks.until_answered(acks, publication.deadline)
        finally:
            if publication.joint is None:  # the parts of a joint update are settled together
                self.publisher.settle(publication)
        now = time.perf_counter()
        seconds["ack"], seconds["total"] = now - begun, now - publication.started
        report = self._acks.conclude(
            acks, publication.deadline, waited=wait, nbytes=publication.nbytes, seconds=seconds
        )
        stats = self.registry.stats
        stats.updates += 1
        stats.nbytes += report.nbytes
        stats.add_phases(report.seconds)
        self._acks.emit_sent(report)
        return report

    async def wait_ack_until(self, worker_ids: WorkerIds, deadline: Deadline) -> SendReport:
        self._check_live()
        targets = self.registry.resolve(worker_ids)
        with asking_to_yield(group.yield_request for group in self._groups):
            return await self._acks.wait_for_acks(targets, deadline)

    # -- close --------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Disconnect the workers and release everything; idempotent. Workers keep their version."""
        if self._closed:
            return
        if self.home.closed:
            self._closed = True
            self._abandon_loop()
        self.home.check()
        self._closed = True
        await uninterrupted(lambda _: self._close())

    def _abandon_loop(self) -> None:
        """Release what can be released after the event loop has been closed."""
        with ExitStack() as last:
            self._release_memory(last)
            last.enter_context(suppress(RuntimeError))  # parts of what follows lived on that loop
            last.callback(self._listener.close)
            last.callback(self.registry.abandon_loop)

    async def _close(self) -> None:
        if self._leader is not None:
            await self._leader.stop()
        await self._calls.stop()
        async with AsyncExitStack() as last:  # the last first, whatever raises
            last.callback(self._events.emit, "closed", self.model_id, self.version)
            self._release_memory(last)
            last.callback(self._listener.close)
            last.push_async_callback(self._host.aclose)
            self._listener.stop()
            await self.publisher.stop()
            await self.registry.close("the sender has closed")

    def _release_memory(self, last: ExitStack | AsyncExitStack) -> None:
        if self._leader is not None:
            last.callback(self._leader.close)
        last.callback(self.transfer.close)
        last.callback(self._offloader.close)
        for group in self._groups:
            last.callback(group.close)

    def check_open(self) -> None:
        """Check that this endpoint can be used here.

        Raises:
            NotConnectedError: it is not connected, or has been closed.
            WrongEventLoopError: it lives on another event loop.
        """
        if self._closed:
            raise NotConnectedError("this sender is closed; make a new scheme to send again")
        if self.home.loop is None:
            raise NotConnectedError("connect() first: this sender is not connected")
        if self.home.loop is not asyncio.get_running_loop():
            self.home.check()

    def _check_live(self) -> None:
        """Raise as :meth:`check_open`, and if :meth:`connect` has failed."""
        self.check_open()
        if not self._live:
            raise NotConnectedError("connect() has not succeeded: call it again")
