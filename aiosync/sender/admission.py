"""The handshake of a new connection: who may connect, which index it gets, and what its Welcome says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from aiosync._deadline import Deadline
from aiosync.errors import AiosyncError, InvalidArgumentError, SyncTimeoutError, WorkerLostError
from aiosync.events import logger
from aiosync.protocol.frames import Hello, Welcome
from aiosync.protocol.framing import clean
from aiosync.protocol.sender_session import SenderSession
from aiosync.sender.worker_group import WorkerGroup
from aiosync.transports.base import FramedTransport, Listener
from aiosync.transports.log_limit import LogLimit

_EAGER_LIMIT = 8 << 20
"""Bytes up to which a worker gets an update without a Notify before it. This saves a round trip. It costs a
slot if the worker hangs at that moment."""

_LONGEST = 1000
"""Characters of a reason."""

_REMEMBERED = 5
"""Reasons that are kept for an error's text."""

_TICKET_SIZE = 16

RESERVED = 2.0
"""Seconds for which an index is reserved for a worker whose connection broke."""


class Refusal(NamedTuple):
    """Why a worker is refused; ``retry``: it may be admitted a little later."""

    reason: str
    retry: bool = False


@dataclass(eq=False, repr=False)
class Admission:
    """Authenticates each new connection and hands it to the registry."""

    _token: bytes  # the secret that workers must know
    _listener: Listener  # says how long a handshake may take
    _admit: Callable[
        [Hello, FramedTransport, SenderSession], Refusal | None
    ]  # admits a worker, or returns why not
    # The reasons of the last refusals.
    refused: list[str] = field(default_factory=list, init=False)
    _log: LogLimit = field(default_factory=partial(LogLimit, logger), init=False)

    async def greet(self, transport: FramedTransport) -> None:
        """Authenticate a connection. It ends as an admitted worker's, or is closed."""
        session = SenderSession(self._token, os.getpid() if transport.same_machine else 0)
        admitted = False
        try:
            deadline = transport.greeting or Deadline.after(self._listener.patience)
            hello = await transport.authenticate_worker(session, deadline)
            refusal = self._admit(hello, transport, session)
            admitted = refusal is None
            if refusal is not None:
                session.refuse(refusal.reason, retry=refusal.retry)
                transport.flush(session)
                self.note(transport, refusal.reason)
        except WorkerLostError as exc:
            # A connection that ends before its first frame is a port scan or a health check.
            if session.hello is not None:
                self.note(transport, f"it left when it was to prove that it knows the token: {exc.reason}")
        except SyncTimeoutError as exc:
            # It may be this side's event loop that was busy.
            session.refuse("the handshake was not finished in time", retry=True)
            transport.flush(session)
            self.note(transport, str(exc))
        except (AiosyncError, OSError) as exc:
            self.note(transport, str(exc))
        except Exception as exc:  # noqa: BLE001 - the end of this connection, and of no other
            logger.error("a connection is given up", exc_info=exc)
        finally:
            if not admitted:
                await transport.aclose()

    def note(self, transport: FramedTransport, reason: str) -> None:
        """Log and remember why a connection was refused."""
        reason = clean(reason, _LONGEST)
        self._log.warning("a connection was refused (%s): %s", transport.peer_name, reason)
        self.refused = [*self.refused, reason][-_REMEMBERED:]

    def close(self) -> None:
        """Write the lines that were left out of the log."""
        self._log.flush()


@dataclass(eq=False, repr=False)
class Tickets:
    """The secrets of the workers that are connected, or whose connection broke a moment ago.

    Each Welcome has a new ticket. A peer that knows the scheme's token but not the ticket cannot take the
    index of such a worker.
    """

    # Of each index the tickets that its worker may have: the one that it showed last, and the one
    # that was issued since. The connection may break before the worker has read its Welcome.
    _tickets: dict[int, list[bytes]] = field(default_factory=dict)
    # Worker whose connection broke -> until when its index is reserved, in monotonic seconds.
    _until: dict[int, float] = field(default_factory=dict)

    def issue(self, worker: int) -> bytes:
        """A new ticket for the worker that has this index from now on."""
        self._until.pop(worker, None)
        ticket = os.urandom(_TICKET_SIZE)
        self._tickets[worker] = [*self._tickets.get(worker, []), ticket]
        return ticket

    def leave(self, worker: int, *, reserve: bool) -> None:
        """The worker's connection has ended; ``reserve``: it may come back."""
        if reserve:
            self._until[worker] = time.monotonic() + RESERVED
        else:
            self._tickets.pop(worker, None)

    def may_take(self, worker: int, claims: Callable[[bytes], bool]) -> bool:
        """Whether a peer may take this index: it is free, or ``claims()`` is true for one of its tickets."""
        issued = self._tickets.get(worker) if worker in self.taken() else None
        if issued is None:
            return True
        shown = [ticket for ticket in issued if claims(ticket)]
        if shown:
            self._tickets[worker] = shown
        return bool(shown)

    def taken(self) -> set[int]:
        """The indices that need a ticket."""
        now = time.monotonic()
        for worker in [worker for worker, until in self._until.items() if until <= now]:
            del self._until[worker]
            self._tickets.pop(worker, None)
        return set(self._tickets)


@dataclass(eq=False, repr=False)
class WorkerIndices:
    """The indices that a sender gives out."""

    _elastic: bool  # a worker may have any index
    # The groups that workers are admitted to.
    groups: Sequence[WorkerGroup] = ()
    # Prove that an index is a worker's own.
    tickets: Tickets = field(default_factory=Tickets)
    # Workers that a caller is adding -> the group that each will be in.
    _expected: dict[int, WorkerGroup] = field(default_factory=dict)

    def known(self) -> set[int]:
        """The indices that this sender gives out, also those of workers that were dropped."""
        return {worker for group in self.groups for worker in group.workers} | self._expected.keys()

    def group_of(self, worker: int) -> WorkerGroup | None:
        """The group for a worker with this index; None if the index is not given out."""
        group = next((g for g in self.groups if self._elastic or worker in g.workers), None)
        return group or self._expected.get(worker)

    def index_for(self, hello: Hello, session: SenderSession) -> int:
        """The index of a worker: the one that it asks for, or one that is free; -1 if none is free."""
        if hello.worker >= 0:
            return hello.worker
        taken = self.tickets.taken()
        known = set(range(len(taken) + 1)) if self._elastic else self.known()
        before = hello.before
        mine = before >= 0 and self.tickets.may_take(before, session.claims)
        if mine and (self._elastic or before in known):
            return before
        return min(known - taken, default=hello.worker)

    def expect(self, worker: int | None, connected: Collection[int], *, may_be_new: bool) -> int:
        """Give out an index for a further worker, or again for a worker that was lost or dropped.

        Args:
            worker: the index; None: the next one.
            connected: the workers that are connected.
            may_be_new: whether the index may be a new one.

        Returns:
            The index. Call :meth:`expect_no_more` once the worker is connected, or will not connect.

        Raises:
            InvalidArgumentError: that worker is connected, or a new one would have no weights.
        """
        known = self.known()
        number = max(known, default=-1) + 1 if worker is None else worker
        if number in connected or number in self._expected:
            raise InvalidArgumentError(f"worker {number} is connected, or about to be: give another index")
        if number not in known:
            if len(self.groups) > 1 or not may_be_new:
                raise InvalidArgumentError(
                    f"worker {number} would have no weights of its own: only workers that init_on_sender() "
                    f"was given can come again: {sorted(known)}"
                )
            self._expected[number] = self.groups[0]
        return number

    def expect_no_more(self, worker: int) -> None:
        """The worker is connected, or will not connect."""
        self._expected.pop(worker, None)


def welcome_for(
    worker: int, group: WorkerGroup, hello: Hello | None, instance: str, ticket: bytes, via: Sequence[str]
) -> Welcome:
    """The Welcome frame for a worker.

    Args:
        worker: its index.
        group: its group, which has a newest version.
        hello: its Hello frame.
        instance: an id of this sender, different from the next sender's at the same address.
        ticket: the secret with which the worker proves that the index is its own.
        via: the ids of the senders that an update passes on its way.
    """
    layout, newest = group.pool.layout, group.newest
    assert newest is not None
    known = hello is not None and hello.signature == layout.identity
    return Welcome(
        layout=None if known else layout.to_wire(),
        signature=layout.identity,
        version=newest.version,
        worker=worker,
        instance=instance,
        device=str(newest.slot.segment.buffer.device),
        eager=layout.nbytes <= _EAGER_LIMIT,
        ticket=ticket,
        via=list(via),
    )
