"""The workers of a sender: the connected ones, and what is remembered of the others."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TypeAlias

from aiosync._deadline import DeadlineTimer, StallTimer
from aiosync.errors import AiosyncError, UnknownWorkerError, WorkerLostError
from aiosync.events import EventKind, EventSource, logger
from aiosync.protocol.frames import Hello, Joint, Nack
from aiosync.protocol.nack import remote_error
from aiosync.protocol.sender_session import SenderSession
from aiosync.reports import WorkerReport, WorkerState
from aiosync.sender.admission import RESERVED, Admission, Refusal, WorkerIndices, welcome_for
from aiosync.sender.connection import WorkerConnection
from aiosync.sender.lost_workers import AwayWorkers, DroppedConnection, LostWorkers, WorkerRecords
from aiosync.sender.pending_acks import AwaitedAcks, PendingAcks
from aiosync.sender.worker_group import WorkerGroup
from aiosync.stats import SchemeStats
from aiosync.transfer.base import OutboundTransfer
from aiosync.transfer.slots import Lease, release_all
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import FramedTransport, Listener

Deliver: TypeAlias = Callable[[FramedTransport, WorkerGroup], OutboundTransfer]
"""Makes the transfer of a group's versions over a connection."""


@dataclass(eq=False, repr=False)
class WorkerRegistry:
    """The workers of one sender."""

    workers: set[int]  # the indices that are served: a send without ``worker_ids`` goes to all of them
    _model_id: str | None  # a worker that asks for another model is refused; None: it gives the name
    _listener: Listener  # where workers connect
    token: InitVar[bytes]  # the secret that they must know
    elastic: bool  # workers are taken as they come, and are not expected any more when they have gone
    _deliver: Deliver
    _events: EventSource
    stats: SchemeStats = field(default_factory=SchemeStats, init=False)
    connections: dict[int, WorkerConnection] = field(default_factory=dict, init=False)
    records: WorkerRecords = field(default_factory=WorkerRecords, init=False)
    # What ends calls at their deadlines.
    timer: DeadlineTimer = field(default_factory=DeadlineTimer, init=False)
    # What finds workers that do not answer.
    stalls: StallTimer = field(default_factory=StallTimer, init=False)
    # Of a relay: the workers whose connection broke and that may still act on an older version.
    away: AwayWorkers | None = field(default=None, init=False)
    # The newest version that a worker may have which is not connected any more; -1: none.
    last_gone: int = field(default=-1, init=False)
    _instance: str = field(default_factory=partial(secrets.token_hex, 8), init=False)
    # Bytes sent over connections that have ended.
    _wire_nbytes: int = field(default=0, init=False)
    _host: BackgroundTasks | None = field(default=None, init=False)
    _lost_workers: LostWorkers = field(default_factory=LostWorkers, init=False)
    # Connections of dropped workers whose Bye has not come yet.
    _lingering: dict[FramedTransport, DroppedConnection] = field(default_factory=dict, init=False)

    def __post_init__(self, token: bytes) -> None:
        # The answers that calls wait for.
        self.awaited = AwaitedAcks(self._model_id, self._events)
        self.admission = Admission(token, self._listener, self._admit)
        self.indices = WorkerIndices(self.elastic)
        # The ids of the senders that an update passes before it gets to a worker, this one last.
        self.via: Sequence[str] = (self._instance,)

    async def open(self, host: BackgroundTasks, groups: Sequence[WorkerGroup]) -> None:
        """Let workers connect; each group has a version to welcome them with."""
        self._host, self.indices.groups = host, groups
        await self._listener.listen(self._accept, self.never_coming)

    async def close(self, reason: str) -> None:
        """Send a Bye to each worker and close the connections. Calls that wait for answers get an error."""
        self._host = None
        self.awaited.close(reason, self.version_of)
        connections = list(self.connections.values())
        for connection in connections:
            self._remove(connection)
            connection.session.close(reason)
            connection.transport.flush(connection.session)
            release_all(connection.detach())
        leaving = [*(connection.transport for connection in connections), *self._lingering]
        await asyncio.gather(*(transport.aclose() for transport in leaving))
        self._lingering.clear()
        self._lost_workers.close()
        self.admission.close()
        self.timer.close()
        self.stalls.close()

    def abandon_loop(self) -> None:
        """Release what can be released without the event loop, which is closed."""
        self._host = None
        for connection in list(self.connections.values()):
            self._remove(connection)
            connection.watch.close()
            connection.session.close("the sender has closed")
            with suppress(RuntimeError):  # what the kernel does not take at once would wait for the loop
                connection.transport.flush(connection.session)
            connection.transport.abandon_loop()
        for transport in self._lingering:
            transport.abandon_loop()
        self._lost_workers.close()

    # -- asked by the sender ------------------------------------------------------------------------

    def resolve(self, worker_ids: int | Iterable[int] | None) -> set[int]:
        """The workers that ``worker_ids`` names.

        Raises:
            UnknownWorkerError: this scheme does not serve one of them.
        """
        if worker_ids is None:
            return set(self.workers)
        ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        for worker in ids:
            if isinstance(worker, bool) or worker not in self.workers:
                raise UnknownWorkerError(worker, self.workers)
        return set(ids)

    @property
    def wire_nbytes(self) -> int:
        """Bytes that went to workers over connections that carry the weights."""
        return self._wire_nbytes + sum(
            connection.outbound.progress for connection in self.connections.values()
        )

    def version_of(self, worker: int) -> int:
        """The version that a connected worker last acknowledged; -1 for none."""
        connection = self.connections.get(worker)
        return connection.session.acked_version if connection else -1

    def last_version_of(self, worker: int) -> int:
        """The version that a worker last acknowledged, also if it is not connected any more."""
        if worker in self.connections:
            return self.version_of(worker)
        return self.records.last_version(worker)

    def states(self, newest: int) -> dict[int, WorkerState]:
        """Worker -> its state, for all that are served; ``newest`` is the sender's version."""
        states = {}
        for worker in sorted(self.workers):
            connection, version = self.connections.get(worker), self.last_version_of(worker)
            address = connection.transport.peer_name if connection else ""
            states[worker] = WorkerState(connection is not None, version, newest - version, address)
        return states

    def abort(self, joint: Joint, worker: int) -> None:
        """Abort a worker's part of a joint update, if the worker was sent it."""
        connection = self.connections.get(worker)
        if connection is not None and connection.holds_part_of(joint):
            connection.session.abort(joint.id)
            connection.transport.flush(connection.session)

    # -- answers that calls wait for ----------------------------------------------------------------

    def acks_for_current(self, targets: Iterable[int]) -> PendingAcks:
        """The answers for what was sent to these workers before. The caller tracks them."""
        workers = set(targets)
        versions = {w: c.target_version for w, c in self.connections.items() if w in workers}
        newest = max((c.target_version for c in self.connections.values()), default=-1)
        acks = PendingAcks(newest, workers, phase="ack", versions=versions)
        for worker in workers:
            connection = self.connections.get(worker)
            if connection is None:
                acks.settle(self.records.absence(worker))
                continue
            version = connection.session.acked_version
            error = self.records.take_unreported(worker)
            if error is None and connection.misses_version:
                error = _overwritten()
            if error is not None:
                acks.settle(WorkerReport(worker, "failed", version, error=error))
            elif not connection.has_pending:
                acks.settle(WorkerReport(worker, "applied", version))
        return acks

    # -- workers come -------------------------------------------------------------------------------

    def _accept(self, transport: FramedTransport) -> None:
        if self._host is not None:
            self._host.spawn(self.admission.greet, transport)

    def never_coming(self, worker: int, reason: str) -> None:
        """The channel that this worker would have connected over has broken, or its process has ended."""
        if worker not in self.connections:
            self.records[worker].lost = WorkerLostError([worker], reason)
            self.awaited.settle(self.records.absence(worker))

    def _admit(self, hello: Hello, transport: FramedTransport, session: SenderSession) -> Refusal | None:
        """Admit a worker, or return why not."""
        indices = self.indices
        worker = indices.index_for(hello, session)
        group = indices.group_of(worker)
        if group is None:
            known = sorted(indices.known())
            if worker < 0:
                return Refusal(f"all workers, {known}, are connected, or were a moment ago", retry=True)
            return Refusal(f"there is no worker {worker} here, only {known}")
        # Without a name on one side, the other one gives it: a collector names the models of its workers.
        if None not in (hello.model_id, self._model_id) and hello.model_id != self._model_id:
            return Refusal(f"this is about model {self._model_id!r}, not {hello.model_id!r}")
        if not indices.tickets.may_take(worker, session.claims):
            if worker in self.connections:
                return Refusal(f"worker {worker} is connected: is its worker_idx given twice?", retry=True)
            reason = (
                f"worker {worker} was connected a moment ago, and its index is reserved for {RESERVED:g} s"
            )
            return Refusal(reason, retry=True)
        if worker in self.connections:
            self._replace(self.connections[worker])
        elif self._listener.full:
            return Refusal("the sender serves as many connections as its max_connections= allows", retry=True)
        if worker in self.records:
            self.records[worker].lost = None
        self.workers.add(worker)
        group.workers.add(worker)
        outbound = self._deliver(transport, group)
        outbound.accept_codecs(hello.codecs)
        pid = transport.peer_pid or (hello.pid if transport.same_machine else 0)
        ticket = indices.tickets.issue(worker)
        welcome = partial(welcome_for, worker, group, hello, self._instance, ticket, self.via)
        connection = WorkerConnection(worker, pid, transport, session, group, outbound, welcome, self)
        self.connections[worker] = group.connections[worker] = connection
        if hello.signature:  # the worker has been connected before
            self._lost_workers.release(worker, pid)
            self._returned(worker, hello.before)
        elif self.away is not None and hello.worker >= 0:
            self.away.remove(worker)  # another process has taken its place
        try:
            connection.offer_next()
            transport.start(connection)
        except Exception as exc:
            self.lost(connection, f"it could not be served: {exc!r}")
            raise
        return None

    def _returned(self, worker: int, before: int) -> None:
        """A worker that was away has the index ``worker``, and had the index ``before``.

        The version that is being sent is acknowledged to the trainer only when this worker has it.
        """
        if self.away is not None and self.away.remove(before):
            self.awaited.include(worker)

    def _replace(self, connection: WorkerConnection) -> None:
        """The worker has connected again.

        If its former connection is alive, that gets a Bye that forbids it to come back: otherwise two
        processes with one index would replace each other for ever.
        """
        worker = connection.worker
        reason = f"another connection took the place of worker {worker}: is its worker_idx given twice?"
        connection.session.close(reason, dropped=True, replaced=True)
        connection.transport.flush(connection.session)
        self.lost(connection, reason)

    # -- outcomes of connections --------------------------------------------------------------------

    def refused(self, connection: WorkerConnection, nack: Nack) -> None:
        """The worker refused a version."""
        worker, version = connection.worker, connection.session.acked_version
        error = remote_error(worker, nack)
        if version < 0:
            self.admission.note(connection.transport, str(error))
        self.stats.failures += 1
        self.awaited.joined.set()  # a relay may have the version although it refuses it
        report = WorkerReport(worker, "failed", version, error=error)
        if not self.awaited.answered(report, nack.version):
            self.records[worker].unreported = error
        self._emit("failed", nack.version, worker, message=str(error))

    def missed(self, connection: WorkerConnection) -> None:
        """The worker will not get the version that it was to get, but an older one or none."""
        error, acked = _overwritten(), connection.session.acked_version
        report = WorkerReport(connection.worker, "failed", acked, error=error)
        self.awaited.missed(report, connection.target_version)

    def lost(
        self, connection: WorkerConnection, reason: str, *, orderly: bool = False, reads: bool = False
    ) -> None:
        """The connection has ended. ``orderly``: the worker said goodbye and released its slots. ``reads``:
        it said goodbye, and will say when it has released them."""
        worker, version = connection.worker, connection.session.acked_version
        if self.connections.get(worker) is not connection:
            return
        # A local process that has ended cannot come back; one on another machine may have lost the link only.
        self.indices.tickets.leave(worker, reserve=not orderly and connection.pid == 0)
        self._wire_nbytes += connection.outbound.progress
        self._remove(connection)
        leases = connection.detach()
        if not orderly:
            leases = self._lost_workers.keep(worker, connection.pid, leases)
        if reads:
            self._linger(connection, leases)
        else:
            release_all(leases)
        self.stats.lost += 1
        error = WorkerLostError([worker], reason)
        self.records.disconnected(worker, version, error)
        self.awaited.settle(WorkerReport(worker, "lost", version, error=error))
        hello = connection.session.hello
        # A worker that has been connected before may act on the version that it had then.
        acts = version >= 0 or (hello is not None and bool(hello.signature))
        if self.away is not None and acts and not orderly and not connection.died:
            self.away.add(worker)
        if self.elastic:
            # Any number of such workers may come and go: nothing is kept of one that has gone.
            self.workers.discard(worker)
            connection.group.forget(worker)
            del self.records[worker]
        if self._host is not None:
            if not reads:
                self._host.spawn(self._hang_up, connection.transport, connection.died)
            if not orderly:
                self._host.spawn(self._listener.lost, worker)
        logger.log(logging.INFO if orderly else logging.WARNING, "worker %d has gone: %s", worker, reason)
        self._emit("lost", worker=worker, message=reason)

    def _remove(self, connection: WorkerConnection) -> None:
        """Remove a connection. If it breaks after this, that is not reported as a loss."""
        self.last_gone = max(self.last_gone, connection.target_version)
        del self.connections[connection.worker]
        del connection.group.connections[connection.worker]

    def drop(self, worker: int, reason: str) -> None:
        """Remove a worker. It gets a Bye, if its connection still works, and may connect again."""
        self.workers.discard(worker)
        connection = self.connections.get(worker)
        if connection is not None:
            self.indices.tickets.leave(worker, reserve=False)
            self._remove(connection)
            connection.session.close(reason, dropped=True)
            connection.transport.flush(connection.session)
            # The worker may be computing with a slot until it reads the Bye. Its leases end when it confirms
            # that it has released the slots, when its process has ended, or else when its connection has.
            leases = self._lost_workers.keep(worker, connection.pid, connection.detach())
            error = WorkerLostError([worker], reason)
            self.records.disconnected(worker, connection.session.acked_version, error)
            self._linger(connection, leases)
        self._emit("dropped", worker=worker, message=reason)

    def _linger(self, connection: WorkerConnection, leases: list[Lease]) -> None:
        transport = connection.transport

        def ended(released: bool) -> None:
            release_all(leases)
            if released:
                self._lost_workers.release(connection.worker, connection.pid)
            if self._lingering.pop(transport, None) is not None and self._host is not None:
                self._host.spawn(self._hang_up, transport)

        self._lingering[transport] = DroppedConnection(ended)
        transport.start(self._lingering[transport])

    def begin_anew(self, reason: str) -> None:
        """Disconnect all workers. They connect again, and follow a sender whose versions count anew."""
        self._instance = secrets.token_hex(8)
        for connection in list(self.connections.values()):
            self.lost(connection, reason)
        self.last_gone = -1

    async def _hang_up(self, transport: FramedTransport, died: bool = False) -> None:
        await transport.aclose()
        if died and self._host is not None:
            try:
                await self._listener.replace(transport)
            except OSError as exc:
                logger.warning("a lost worker has no way to come back: %s", exc)

    def _emit(
        self,
        kind: EventKind,
        version: int = -1,
        worker: int | None = None,
        *,
        seconds: dict[str, float] | None = None,
        message: str = "",
    ) -> None:
        self._events.emit(kind, self._model_id, version, worker, seconds=seconds, message=message)


def _overwritten() -> AiosyncError:
    return AiosyncError("the version that it was to get was overwritten before it had it: send again")
