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
from aiosync.protocol.events import Applied, Fetched, Left, Rejected, SenderEvent, StageDone
from aiosync.protocol.frames import Hello, Joint
from aiosync.protocol.session import SenderSession
from aiosync.schemes._host import TaskHost
from aiosync.schemes.delivery import Delivery
from aiosync.schemes.group import WeightGroup
from aiosync.schemes.link import Introduction, Lingering, WorkerLink
from aiosync.schemes.orphans import Orphans
from aiosync.schemes.reception import Reception, Refusal
from aiosync.schemes.refusal import remote_error
from aiosync.schemes.report import WorkerReport
from aiosync.schemes.rounds import Round
from aiosync.schemes.stats import EventKind, EventSource, SchemeStats, logger
from aiosync.schemes.tickets import Tickets
from aiosync.transports.base import Listener, Transport

__all__ = ["AwayWorkers", "Deliver", "Roster"]

Deliver: TypeAlias = Callable[[Transport, WeightGroup], Delivery]
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


class Roster:
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
        links: those that are connected.
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
        self.links: dict[int, WorkerLink] = {}
        self.rounds: list[Round] = []
        self.timer = DeadlineTimer()
        self._model_id = model_id
        self._listener = listener
        self.reception = Reception(token, listener, self._admit)
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
        self._host: TaskHost | None = None
        self._lost: dict[int, WorkerLostError] = {}
        self._last: dict[int, int] = {}
        self._unreported: dict[int, AiosyncError] = {}
        self._orphans = Orphans()
        self._tickets = Tickets()
        self._lingering: dict[Transport, Lingering] = {}

    async def open(self, host: TaskHost, groups: Sequence[WeightGroup]) -> None:
        """Let workers in; each group has something to welcome them with."""
        self._host, self._groups = host, groups
        await self._listener.listen(self._accept, self.never_coming)

    async def close(self, reason: str) -> None:
        """Say goodbye to everybody and close the connections; whoever waits for answers is told."""
        self._host = None
        for round_ in self.rounds:
            for worker in list(round_.pending):
                error = NotConnectedError(f"{reason} before worker {worker} had answered")
                round_.settle(WorkerReport(worker, "lost", self.version_of(worker), error=error))
        links, self.links = list(self.links.values()), {}
        for link in links:
            link.session.close(reason)
            link.transport.flush(link.session)
            link.leave(reason)
        leaving = [*(link.transport for link in links), *self._lingering]
        await asyncio.gather(*(transport.aclose() for transport in leaving))
        self._lingering.clear()
        self._orphans.close()
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
        return self._wire_nbytes + sum(link.wire_nbytes for link in self.links.values())

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
        return sum(link.session.acked_version >= 0 for link in self.links.values())

    def members(self, group: WeightGroup) -> list[WorkerLink]:
        """The connected workers of a group."""
        return [link for link in self.links.values() if link.group is group]

    def make_room(self, group: WeightGroup) -> None:
        """Where every slot is in use: take back what is being sent to workers that do not take it."""
        if group.arena.free_slot() is None:
            for link in self.members(group):
                link.cut()

    def parked(self, group: WeightGroup) -> set[Any]:
        """The holders of a group's slots that are not expected to move on."""
        parked: set[Any] = {
            holder
            for slot in group.arena.slots
            for holder in slot.holders
            if isinstance(holder, tuple) and holder[0] == "orphan"
        } | group.unstoppable
        for link in self.members(group):
            if link.parked:
                parked |= {link.worker, ("due", link.worker)}
        return parked

    def tell(self, round_: Round, targets: Iterable[int]) -> None:
        """Announce the newest version of their group to these workers."""
        for worker in targets:
            link = self.links.get(worker)
            if link is None or link.group.latest is None:
                if round_.joint is not None:
                    round_.joint.call_off(worker)
                round_.settle(self._absent(worker))
                continue
            link.announce(link.group.latest)
            link.serve()

    def note_absent(self, round_: Round, group: WeightGroup) -> None:
        """Settle the round for the workers of a group that are not there."""
        for worker in group.workers & round_.pending - self.links.keys():
            round_.settle(self._absent(worker))

    def await_all(self, targets: Iterable[int]) -> Round:
        """A round for what was sent before; the caller takes it out of ``rounds`` again."""
        newest = max((link.reaches for link in self.links.values()), default=-1)
        round_ = Round(-1, newest, targets, phase="ack")
        for worker in list(round_.phases):
            link = self.links.get(worker)
            if link is None:
                round_.settle(self._absent(worker))
                continue
            round_.wanted[worker] = link.reaches
            version = link.session.acked_version
            error = self._unreported.pop(worker, None)
            if error is not None:
                round_.settle(WorkerReport(worker, "failed", version, error=error))
            elif not link.behind:
                round_.settle(WorkerReport(worker, "applied", version))
        self.rounds.append(round_)
        return round_

    def take_unreported(self, targets: Iterable[int]) -> list[WorkerReport]:
        """Refusals of updates that nobody waited for; each is handed out once."""
        reports = []
        for worker in targets:
            error = self._unreported.pop(worker, None)
            if error is not None:
                reports.append(WorkerReport(worker, "failed", self.version_of(worker), error=error))
        return reports

    def version_of(self, worker: int) -> int:
        """The version that a worker last acknowledged; -1 for none."""
        link = self.links.get(worker)
        return link.session.acked_version if link else -1

    def last_version_of(self, worker: int) -> int:
        """The same, also of a worker that has gone since."""
        return self.version_of(worker) if worker in self.links else self._last.get(worker, -1)

    def begin_anew(self, reason: str) -> None:
        """Versions will count from another beginning: whoever is here is to connect again, and hear of it."""
        self._instance = secrets.token_hex(8)
        for link in list(self.links.values()):
            self._on_lost(link, reason)

    def peer_of(self, worker: int) -> str:
        """Where a worker is; "" if it is not there."""
        link = self.links.get(worker)
        return link.transport.peer_name if link else ""

    def mark_late(self, worker: int) -> None:
        """A worker has missed a deadline: until it answers, it is not waited for with a slot."""
        link = self.links.get(worker)
        if link is not None:
            link.late = True
            link.group.wake()

    def drop(self, worker: int, reason: str) -> None:
        """Go on without a worker; it is told, if it can be, and may come back."""
        self.workers.discard(worker)
        link = self.links.pop(worker, None)
        if link is not None:
            self._tickets.leave(worker, reserve=False)
            link.session.close(reason, dropped=True)
            link.transport.flush(link.session)
            # It may be computing with a slot until it hears of this: the slot is its own until it says that
            # it has let go; or has ended, which its process tells, or else its side of the connection.
            unseen = ("orphan", id(link))
            self._lost[worker] = link.leave(reason, orphan=self._orphans.adopt(link, unseen))
            self._lingering[link.transport] = Lingering(
                lambda said_so: self._forget(link, unseen, said_so=said_so)
            )
            link.transport.start(self._lingering[link.transport])
        self._emit("dropped", worker=worker, message=reason)

    def _forget(self, link: WorkerLink, unseen: Hashable, *, said_so: bool) -> None:
        link.group.release(unseen)
        if said_so:
            self._orphans.let_go(link.worker, link.pid)
        if self._lingering.pop(link.transport, None) is not None and self._host is not None:
            self._host.spawn(self._hang_up, link.transport)

    def abort(self, joint: Joint, worker: int) -> None:
        """Abort a worker's part of a joint update, if it has been offered."""
        link = self.links.get(worker)
        if link is not None and link.holds_part_of(joint):
            link.session.abort(joint.id)
            link.transport.flush(link.session)

    def expect(self, worker: int | None, *, may_be_new: bool) -> int:
        """Let in a further worker, or one that was lost or dropped; returns which. A further one counts when
        it is there: see :meth:`expect_no_more`.

        Raises:
            InvalidArgumentError: it is there, or whose weights would it have?
        """
        known = {w for group in self._groups for w in group.workers} | self._expected.keys()
        number = max(known, default=-1) + 1 if worker is None else worker
        if number in self.links or number in self._expected:
            raise InvalidArgumentError(f"worker {number} is connected, or about to be: give another index")
        if number not in known:
            if len(self._groups) > 1 or not may_be_new:
                raise InvalidArgumentError(
                    f"worker {number} would have no weights of its own: only those that init_on_sender() was "
                    f"told of can come again, {sorted(known)}"
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
        if worker not in self.links:
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
        if worker in self.links:
            self._replace(self.links[worker])
        elif self._listener.full:
            return Refusal("the sender serves as many connections as its max_connections= allows", retry=True)
        self._lost.pop(worker, None)
        self.workers.add(worker)
        group.workers.add(worker)
        delivery = self._deliver(transport, group)
        delivery.knows(hello.codecs)
        link = self.links[worker] = WorkerLink(
            worker,
            transport.peer_pid or (hello.pid if transport.same_machine else 0),
            transport,
            session,
            group,
            delivery,
            Introduction(self._instance, self._tickets.issue(worker), self.via),
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        if hello.signature:  # it has been connected before
            self._orphans.let_go(worker, link.pid)
            self._is_back(worker, hello.before)
        elif self.away is not None and hello.worker >= 0:
            self.away.returns(worker)  # another process has taken its place
        try:
            link.serve()
            transport.start(link)
        except Exception as exc:
            self._on_lost(link, f"it could not be served: {exc!r}")
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

    def _replace(self, link: WorkerLink) -> None:
        """The worker is here anew. If what it was before is still alive, it is told to stay away: else two
        with the same index would take each other's place for ever."""
        reason = f"another connection took the place of worker {link.worker}: is its worker_idx given twice?"
        link.session.close(reason, dropped=True, replaced=True)
        link.transport.flush(link.session)
        self._on_lost(link, reason)

    # -- what they say ------------------------------------------------------------------------------

    def _on_event(self, link: WorkerLink, event: SenderEvent) -> None:
        match event:
            case Applied():
                self._on_applied(link, event)
            case Fetched():
                link.fetched(event)
                if link.due is not None:
                    link.serve()
            case StageDone(copied=copied):
                for round_ in self.rounds:
                    if link.worker in round_.phases:
                        round_.phases[link.worker] = "commit"
                if copied:
                    link.copied()
            case Rejected():
                self._on_rejected(link, event)
            case Left(reason=reason, dropped=dropped):
                # Dropped, it has not let go of what it reads.
                self._on_lost(link, reason or "it closed its side", orderly=not dropped)
            case _:
                pass

    def _on_applied(self, link: WorkerLink, event: Applied) -> None:
        kind: EventKind = "joined" if link.applied() else "applied"
        self._joined.set()
        report = WorkerReport(link.worker, "applied", event.version, event.seconds)
        for round_ in self.rounds:
            if event.version >= round_.wanted.get(link.worker, event.version + 1):
                round_.settle(report)
        if self._events.hooks:
            self._emit(kind, event.version, link.worker, seconds=event.seconds)

    def _on_rejected(self, link: WorkerLink, event: Rejected) -> None:
        nack, worker = event.nack, link.worker
        error = remote_error(worker, nack)
        if link.session.acked_version < 0:
            self.reception.note(link.transport, str(error))
        link.rejected(nack)
        self.stats.failures += 1
        self._joined.set()  # a relay that has the version may say so
        report = WorkerReport(worker, "failed", link.session.acked_version, error=error)
        waiting = [r for r in self.rounds if worker in r.pending and nack.version >= r.wanted[worker]]
        for round_ in waiting:
            round_.settle(report)
        if not waiting:
            self._unreported[worker] = error
        self._emit("failed", nack.version, worker, message=str(error))

    def _on_lost(self, link: WorkerLink, reason: str, *, orderly: bool = False) -> None:
        worker = link.worker
        if self.links.get(worker) is not link:
            return
        del self.links[worker]
        # A local process that has ended cannot come back; one on another machine may have lost the link only.
        self._tickets.leave(worker, reserve=not orderly and link.pid == 0)
        self._last[worker] = link.session.acked_version
        self._wire_nbytes += link.wire_nbytes
        orphan = self._orphans.adopt(link) if not orderly else None
        error = self._lost[worker] = link.leave(reason, orphan=orphan)
        self.stats.lost += 1
        for round_ in self.rounds:
            round_.settle(WorkerReport(worker, "lost", link.session.acked_version, error=error))
        hello = link.session.hello
        # One that has been connected before may act on the version that it had then.
        acts = link.session.acked_version >= 0 or (hello is not None and bool(hello.signature))
        if self.away is not None and acts and not orderly and not link.died:
            self.away.leaves(worker)
        if self._elastic:
            self.workers.discard(worker)
            link.group.workers.discard(worker)
            # Any number of them may come and go: nothing is kept of one that is gone.
            for kept in (self._last, self._lost, self._unreported):
                kept.pop(worker, None)
        if self._host is not None:
            self._host.spawn(self._hang_up, link.transport, link.died)
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
        self._events.tell(kind, self._model_id, version, worker, seconds=seconds, message=message)
