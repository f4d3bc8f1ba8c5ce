"""Who is connected to a sender, and what becomes of a worker's answers, refusals and death."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from aiosync._deadline import Deadline, DeadlineTimer
from aiosync.errors import (
    AiosyncError,
    InvalidArgumentError,
    NotConnectedError,
    UnknownWorkerError,
    WorkerLostError,
)
from aiosync.events import EventKind, EventSource, SchemeStats, logger
from aiosync.protocol.events import Applied, Fetched, Left, Rejected, SenderEvent, StageDone
from aiosync.protocol.frames import Hello, Joint
from aiosync.protocol.nack import remote_error
from aiosync.protocol.sender_session import SenderSession
from aiosync.reports import WorkerReport
from aiosync.sender.admission import Admission, Refusal
from aiosync.sender.connection import DroppedConnection, Introduction, WorkerConnection
from aiosync.sender.lost_workers import LostWorkers
from aiosync.sender.pending_acks import Round
from aiosync.sender.tickets import Tickets
from aiosync.sender.worker_group import WeightGroup
from aiosync.transfer.base import OutboundTransfer
from aiosync.transports._tasks import BackgroundTasks
from aiosync.transports.base import Listener, Transport

__all__ = ["AwayWorkers", "Deliver", "WorkerRegistry"]

Deliver: TypeAlias = Callable[[Transport, WeightGroup], OutboundTransfer]
"""Says how a group's versions get over a connection."""


_MOMENT = 2.0
"""Seconds that a worker whose connection broke has to come back before the trainer learns of its absence."""


class AwayWorkers:
    """Workers that have lost their relay without a goodbye, and may still act on what they have.

    Args:
        patience: seconds after which a worker that has not come back has given its relay up.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # Worker -> when its connection broke, in monotonic seconds.
        self._since: dict[int, float] = {}
        self._returned = asyncio.Event()

    def leaves(self, worker: int) -> None:
        """The connection of this worker broke."""
        self._since[worker] = time.monotonic()

    def returns(self, worker: int) -> bool:
        """The worker that had this index is here again; whether it was away."""
        self._returned.set()
        return self._since.pop(worker, None) is not None

    def now(self) -> list[int]:
        """The indices of those that are away."""
        now = time.monotonic()
        self._since = {w: since for w, since in self._since.items() if since + self._patience > now}
        return sorted(self._since)

    async def one_returns(self, deadline: Deadline) -> bool:
        """Wait for a worker that left a moment ago to come back, as most do. Returns whether one has."""
        left = [self._since[worker] + _MOMENT - time.monotonic() for worker in self.now()]
        seconds = min(max(left, default=0.0), deadline.remaining())
        if seconds <= 0:
            return False
        self._returned.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._returned.wait()
        except TimeoutError:
            return False
        return True


class WorkerRegistry:
    """The workers of one sender.

    Args:
        workers: the indices that are served.
        model_id: a worker that asks for another model is refused.
        listener: where they connect.
        token: the secret that they must know.
        elastic: whether workers are taken as they come, and are no more expected when they have gone.
        deliver: says how versions of a group get over a connection.

    Attributes:
        workers: the indices that a send without ``worker_ids`` goes to.
        connections: those that are connected.
        reception: lets them in.
        rounds: what is being waited for.
        timer: ends the calls that wait for a round at their deadlines.
        stats: the sender's figures.
        via: the ids of the senders that an update passes before it gets to a worker, this one last.
        away: of a relay, the workers whose connection broke and that may still act on an older version.
    """

    def __init__(
        self,
        workers: Iterable[int],
        model_id: str | None,
        listener: Listener,
        token: bytes,
        *,
        elastic: bool,
        deliver: Deliver,
        events: EventSource,
        stats: SchemeStats,
    ) -> None:
        self.workers = set(workers)
        self.connections: dict[int, WorkerConnection] = {}
        self.rounds: list[Round] = []
        self.timer = DeadlineTimer()
        self._model_id = model_id
        self._listener = listener
        self.reception = Admission(token, listener, self._admit)
        self._elastic = elastic
        self._deliver = deliver
        self._instance = secrets.token_hex(8)
        self.via: Sequence[str] = (self._instance,)
        self.away: AwayWorkers | None = None
        self._joined = asyncio.Event()
        self._wire_nbytes = 0
        self._events = events
        self.stats = stats
        self._groups: Sequence[WeightGroup] = ()
        self._expected: dict[int, WeightGroup] = {}
        self._host: BackgroundTasks | None = None
        self._lost: dict[int, WorkerLostError] = {}
        self._last: dict[int, int] = {}
        self._unreported: dict[int, AiosyncError] = {}
        self._lost_workers = LostWorkers()
        self._tickets = Tickets()
        self._lingering: dict[Transport, DroppedConnection] = {}

    async def open(self, host: BackgroundTasks, groups: Sequence[WeightGroup]) -> None:
        """Let workers in; each group has something to welcome them with."""
        self._host, self._groups = host, groups
        await self._listener.listen(self._accept, self.never_coming)

    async def close(self, reason: str) -> None:
        """Send a Bye to each worker and close the connections. Calls that wait for answers get an error."""
        self._host = None
        for round_ in self.rounds:
            for worker in list(round_.pending):
                error = NotConnectedError(f"{reason} before worker {worker} had answered")
                round_.settle(WorkerReport(worker, "lost", self.version_of(worker), error=error))
        connections, self.connections = list(self.connections.values()), {}
        for connection in connections:
            connection.session.close(reason)
            connection.transport.flush(connection.session)
            connection.leave(reason)
        leaving = [*(connection.transport for connection in connections), *self._lingering]
        await asyncio.gather(*(transport.aclose() for transport in leaving))
        self._lingering.clear()
        self._lost_workers.close()
        self.reception.close()
        self.timer.close()

    # -- asked by the sender ------------------------------------------------------------------------

    def resolve(self, worker_ids: int | Iterable[int] | None) -> set[int]:
        """The workers that ``worker_ids`` means.

        Raises:
            UnknownWorkerError: one that this scheme does not serve.
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
        return self._wire_nbytes + sum(connection.wire_nbytes for connection in self.connections.values())

    async def gather(self, count: int, deadline: Deadline) -> None:
        """Wait until ``count`` workers, whichever, run on some version.

        Raises:
            SyncTimeoutError: there were fewer when the deadline passed.
        """
        try:
            async with asyncio.timeout(deadline.remaining()):
                while self._running() < count:
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            reasons = self.reception.refused
            refused = f"; connections were refused: {'; '.join(reasons)}" if reasons else ""
            hint = f"{self._running()} of {count} workers have connected{refused}"
            raise deadline.error("connect", version=0, hint=hint) from None

    def _running(self) -> int:
        return sum(connection.session.acked_version >= 0 for connection in self.connections.values())

    def members(self, group: WeightGroup) -> list[WorkerConnection]:
        """The connected workers of a group."""
        return [connection for connection in self.connections.values() if connection.group is group]

    def make_room(self, group: WeightGroup) -> None:
        """Where every slot is in use: take back what is being sent to workers that do not take it."""
        if group.arena.free_slot() is None:
            for connection in self.members(group):
                connection.cut()

    def parked(self, group: WeightGroup) -> set[Any]:
        """The holders of a group's slots that are not expected to move on."""
        parked: set[Any] = {
            holder
            for slot in group.arena.slots
            for holder in slot.holders
            if isinstance(holder, tuple) and holder[0] == "orphan"
        } | group.unstoppable
        for connection in self.members(group):
            if connection.parked:
                parked |= {connection.worker, ("due", connection.worker)}
        return parked

    def tell(self, round_: Round, targets: Iterable[int]) -> None:
        """Announce the newest version of their group to these workers."""
        for worker in targets:
            connection = self.connections.get(worker)
            if connection is None or connection.group.latest is None:
                if round_.joint is not None:
                    round_.joint.call_off(worker)
                round_.settle(self._absent(worker))
                continue
            connection.announce(connection.group.latest)
            connection.serve()

    def note_absent(self, round_: Round, group: WeightGroup) -> None:
        """Settle the round for the workers of a group that are not there."""
        for worker in group.workers & round_.pending - self.connections.keys():
            round_.settle(self._absent(worker))

    def await_all(self, targets: Iterable[int]) -> Round:
        """A round for what was sent before; the caller takes it out of ``rounds`` again."""
        newest = max((connection.reaches for connection in self.connections.values()), default=-1)
        round_ = Round(-1, newest, targets, phase="ack")
        for worker in list(round_.phases):
            connection = self.connections.get(worker)
            if connection is None:
                round_.settle(self._absent(worker))
                continue
            round_.wanted[worker] = connection.reaches
            version = connection.session.acked_version
            error = self._unreported.pop(worker, None)
            if error is not None:
                round_.settle(WorkerReport(worker, "failed", version, error=error))
            elif not connection.behind:
                round_.settle(WorkerReport(worker, "applied", version))
        self.rounds.append(round_)
        return round_

    def take_unreported(self, targets: Iterable[int]) -> list[WorkerReport]:
        """Refusals of updates that no call waited for. Each is returned once."""
        reports = []
        for worker in targets:
            error = self._unreported.pop(worker, None)
            if error is not None:
                reports.append(WorkerReport(worker, "failed", self.version_of(worker), error=error))
        return reports

    def version_of(self, worker: int) -> int:
        """The version that a worker last acknowledged; -1 for none."""
        connection = self.connections.get(worker)
        return connection.session.acked_version if connection else -1

    def last_version_of(self, worker: int) -> int:
        """The same, also of a worker that has gone since."""
        return self.version_of(worker) if worker in self.connections else self._last.get(worker, -1)

    def begin_anew(self, reason: str) -> None:
        """Versions will count from another beginning: disconnect all workers, so that they connect again and
        learn of it."""
        self._instance = secrets.token_hex(8)
        for connection in list(self.connections.values()):
            self._on_lost(connection, reason)

    def address_of(self, worker: int) -> str:
        """Where a worker is; "" if it is not there."""
        connection = self.connections.get(worker)
        return connection.transport.peer_name if connection else ""

    def mark_late(self, worker: int) -> None:
        """A worker has missed a deadline: until it answers, it is not waited for with a slot."""
        connection = self.connections.get(worker)
        if connection is not None:
            connection.late = True
            connection.group.wake()

    def drop(self, worker: int, reason: str) -> None:
        """Go on without a worker. It gets a Bye, if its connection still works, and may come back."""
        self.workers.discard(worker)
        connection = self.connections.pop(worker, None)
        if connection is not None:
            self._tickets.leave(worker, reserve=False)
            connection.session.close(reason, dropped=True)
            connection.transport.flush(connection.session)
            # It may be computing with a slot until it hears of this: the slot is its own until it says that
            # it has let go; or has ended, which its process tells, or else its side of the connection.
            unseen = ("orphan", id(connection))
            self._lost[worker] = connection.leave(reason, orphan=self._lost_workers.adopt(connection, unseen))
            self._lingering[connection.transport] = DroppedConnection(
                lambda said_so: self._forget(connection, unseen, said_so=said_so)
            )
            connection.transport.start(self._lingering[connection.transport])
        self._emit("dropped", worker=worker, message=reason)

    def _forget(self, connection: WorkerConnection, unseen: Hashable, *, said_so: bool) -> None:
        connection.group.release(unseen)
        if said_so:
            self._lost_workers.let_go(connection.worker, connection.pid)
        if self._lingering.pop(connection.transport, None) is not None and self._host is not None:
            self._host.spawn(self._hang_up, connection.transport)

    def abort(self, joint: Joint, worker: int) -> None:
        """Abort a worker's part of a joint update, if it has been offered."""
        connection = self.connections.get(worker)
        if connection is not None and connection.holds_part_of(joint):
            connection.session.abort(joint.id)
            connection.transport.flush(connection.session)

    def expect(self, worker: int | None, *, may_be_new: bool) -> int:
        """Let in a further worker, or one that was lost or dropped; returns which. A further one counts when
        it is there: see :meth:`expect_no_more`.

        Raises:
            InvalidArgumentError: it is there, or whose weights would it have?
        """
        known = {w for group in self._groups for w in group.workers} | self._expected.keys()
        number = max(known, default=-1) + 1 if worker is None else worker
        if number in self.connections or number in self._expected:
            raise InvalidArgumentError(f"worker {number} is connected, or about to be: give another index")
        if number not in known:
            if len(self._groups) > 1 or not may_be_new:
                raise InvalidArgumentError(
                    f"worker {number} would have no weights of its own: only workers that init_on_sender() "
                    f"was given can come again: {sorted(known)}"
                )
            self._expected[number] = self._groups[0]
        return number

    def expect_no_more(self, worker: int) -> None:
        """It is there, or will not come."""
        self._expected.pop(worker, None)

    # -- workers come -------------------------------------------------------------------------------

    def _accept(self, transport: Transport) -> None:
        if self._host is not None:
            self._host.spawn(self.reception.greet, transport)

    def never_coming(self, worker: int, reason: str) -> None:
        """The channel that this worker would have connected over has broken, or its process has ended."""
        if worker not in self.connections:
            self._lost[worker] = WorkerLostError([worker], reason)
            for round_ in self.rounds:
                round_.settle(self._absent(worker))

    def _admit(self, hello: Hello, transport: Transport, session: SenderSession) -> Refusal | None:
        """Take a worker in, or say why not."""
        worker = self._index_for(hello, session)
        group = next((g for g in self._groups if self._elastic or worker in g.workers), None)
        group = group or self._expected.get(worker)
        if group is None:
            known = sorted(self._known())
            if worker < 0:
                return Refusal(f"all workers, {known}, are connected, or were a moment ago", retry=True)
            return Refusal(f"there is no worker {worker} here, only {known}")
        if hello.model_id != self._model_id:
            return Refusal(f"this is about model {self._model_id!r}, not {hello.model_id!r}")
        if not self._tickets.may_take(worker, session.claims):
            return Refusal(f"worker {worker} is connected: is its worker_idx given twice?", retry=True)
        if worker in self.connections:
            self._replace(self.connections[worker])
        elif self._listener.full:
            return Refusal("the sender serves as many connections as its max_connections= allows", retry=True)
        self._lost.pop(worker, None)
        self.workers.add(worker)
        group.workers.add(worker)
        outbound = self._deliver(transport, group)
        outbound.knows(hello.codecs)
        connection = self.connections[worker] = WorkerConnection(
            worker,
            transport.peer_pid or (hello.pid if transport.same_machine else 0),
            transport,
            session,
            group,
            outbound,
            Introduction(self._instance, self._tickets.issue(worker), self.via),
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        if hello.signature:  # it has been connected before
            self._lost_workers.let_go(worker, connection.pid)
            self._is_back(worker, hello.before)
        elif self.away is not None and hello.worker >= 0:
            self.away.returns(worker)  # another process has taken its place
        try:
            connection.serve()
            transport.start(connection)
        except Exception as exc:
            self._on_lost(connection, f"it could not be served: {exc!r}")
            raise
        return None

    def _is_back(self, worker: int, before: int) -> None:
        """A worker that was away has the index ``worker``, which was ``before``: what is being sent is only
        acknowledged when it has it."""
        if self.away is not None and self.away.returns(before):
            for round_ in self.rounds:
                round_.include(worker)

    def _index_for(self, hello: Hello, session: SenderSession) -> int:
        """The index of a worker: the one that it asks for, or one that is free."""
        if hello.worker >= 0:
            return hello.worker
        taken = self._tickets.taken()
        known = set(range(len(taken) + 1)) if self._elastic else self._known()
        before = hello.before
        mine = before >= 0 and self._tickets.may_take(before, session.claims)
        if mine and (self._elastic or before in known):
            return before
        return min(known - taken, default=hello.worker)

    def _known(self) -> set[int]:
        """The indices that this sender gives out, also those of workers that were dropped."""
        return {worker for group in self._groups for worker in group.workers} | self._expected.keys()

    def _replace(self, connection: WorkerConnection) -> None:
        """The worker has connected again. Its former connection, if it is alive, gets a Bye that forbids it
        to come back: else two processes with one index would replace each other for ever."""
        worker = connection.worker
        reason = f"another connection took the place of worker {worker}: is its worker_idx given twice?"
        connection.session.close(reason, dropped=True, replaced=True)
        connection.transport.flush(connection.session)
        self._on_lost(connection, reason)

    # -- what they say ------------------------------------------------------------------------------

    def _on_event(self, connection: WorkerConnection, event: SenderEvent) -> None:
        match event:
            case Applied():
                self._on_applied(connection, event)
            case Fetched():
                connection.fetched(event)
                if connection.due is not None:
                    connection.serve()
            case StageDone(copied=copied):
                for round_ in self.rounds:
                    if connection.worker in round_.phases:
                        round_.phases[connection.worker] = "commit"
                if copied:
                    connection.copied()
            case Rejected():
                self._on_rejected(connection, event)
            case Left(reason=reason, dropped=dropped):
                # Dropped, it has not let go of what it reads.
                self._on_lost(connection, reason or "it closed its side", orderly=not dropped)
            case _:
                pass

    def _on_applied(self, connection: WorkerConnection, event: Applied) -> None:
        kind: EventKind = "joined" if connection.applied() else "applied"
        self._joined.set()
        report = WorkerReport(connection.worker, "applied", event.version, event.seconds)
        for round_ in self.rounds:
            if event.version >= round_.wanted.get(connection.worker, event.version + 1):
                round_.settle(report)
        if self._events.hooks:
            self._emit(kind, event.version, connection.worker, seconds=event.seconds)

    def _on_rejected(self, connection: WorkerConnection, event: Rejected) -> None:
        nack, worker = event.nack, connection.worker
        error = remote_error(worker, nack)
        if connection.session.acked_version < 0:
            self.reception.note(connection.transport, str(error))
        connection.rejected(nack)
        self.stats.failures += 1
        self._joined.set()  # a relay that has the version may say so
        report = WorkerReport(worker, "failed", connection.session.acked_version, error=error)
        waiting = [r for r in self.rounds if worker in r.pending and nack.version >= r.wanted[worker]]
        for round_ in waiting:
            round_.settle(report)
        if not waiting:
            self._unreported[worker] = error
        self._emit("failed", nack.version, worker, message=str(error))

    def _on_lost(self, connection: WorkerConnection, reason: str, *, orderly: bool = False) -> None:
        worker = connection.worker
        if self.connections.get(worker) is not connection:
            return
        del self.connections[worker]
        # A local process that has ended cannot come back; one on another machine may have lost the link only.
        self._tickets.leave(worker, reserve=not orderly and connection.pid == 0)
        self._last[worker] = connection.session.acked_version
        self._wire_nbytes += connection.wire_nbytes
        orphan = self._lost_workers.adopt(connection) if not orderly else None
        error = self._lost[worker] = connection.leave(reason, orphan=orphan)
        self.stats.lost += 1
        for round_ in self.rounds:
            round_.settle(WorkerReport(worker, "lost", connection.session.acked_version, error=error))
        hello = connection.session.hello
        # One that has been connected before may act on the version that it had then.
        acts = connection.session.acked_version >= 0 or (hello is not None and bool(hello.signature))
        if self.away is not None and acts and not orderly and not connection.died:
            self.away.leaves(worker)
        if self._elastic:
            self.workers.discard(worker)
            connection.group.workers.discard(worker)
            # Any number of them may come and go: nothing is kept of one that is gone.
            for kept in (self._last, self._lost, self._unreported):
                kept.pop(worker, None)
        if self._host is not None:
            self._host.spawn(self._hang_up, connection.transport, connection.died)
            if not orderly:
                self._host.spawn(self._listener.lost, worker)
        logger.log(logging.INFO if orderly else logging.WARNING, "worker %d has gone: %s", worker, reason)
        self._emit("lost", worker=worker, message=reason)

    async def _hang_up(self, transport: Transport, died: bool = False) -> None:
        await transport.aclose()
        if died and self._host is not None:
            try:
                await self._listener.replace(transport)
            except OSError as exc:
                logger.warning("a lost worker has no way to come back: %s", exc)

    def _absent(self, worker: int) -> WorkerReport:
        error = self._lost.get(worker) or WorkerLostError([worker], "it has not connected yet")
        return WorkerReport(worker, "lost", self.last_version_of(worker), error=error)

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
