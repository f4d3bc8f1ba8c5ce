"""Broadcasts: one transfer for all workers of a group, if all of them are to have the same version.

All workers must join a broadcast at the same time, so a worker that has sent a Fetch waits for the others:

1. WAITING: some workers have sent a Fetch.
2. ANNOUNCED: all have. The Update frame of each announces a broadcast.
3. SENDING: each has got that frame, and the broadcast runs in the process group's thread.
4. BROKEN: a worker was lost, or a broadcast failed. Each worker is sent to alone until :meth:`renew`.

If a worker is disconnected, is not addressed, or sends no Fetch within :data:`_PATIENCE`, each worker is sent
this version alone.

gloo does not tell a rank that waits for one that has died, and cannot be interrupted. So the sender, which
notices that a worker is lost or that nothing moves, tells the other workers by an Interrupt frame. They fetch
the version again, and it comes to each alone. The threads that gloo holds end by its timeout.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from aiosync.protocol.stream import BLOCK
from aiosync.transfer.base import TransferConnection
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.torch_distributed.process_group import STALLED, ProcessGroupMember

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

logger = logging.getLogger("aiosync")

Ended = Callable[[BaseException | None], None]
"""Called on the event loop when a transfer has ended, with its error."""

_PATIENCE = 0.5
"""Most seconds that workers which have sent a Fetch wait for the others."""

_SHARE = 0.25
"""The wait for other workers, and for a broadcast without progress, takes at most this share of the call's
deadline: so the healthy workers meet it."""


class ProcessGroupPayload(msgspec.Struct, frozen=True):
    """What an Update frame says of a version that comes through a process group."""

    group: str  # its key
    rank: Annotated[int, Meta(ge=1, le=1 << 16)]  # the worker's; the sender is rank 0
    size: Annotated[int, Meta(ge=2, le=1 << 16)]  # the number of ranks


def tag_of(round_: int) -> int:
    """The tag of a version's messages."""
    return 1 + round_ % (1 << 30)


def send_by(member: ProcessGroupMember, group: WorkerGroup, published: SlotVersion, ended: Ended) -> None:
    """Send a version through a process group, then call ``ended``.

    The slot gets its own lease: torch.distributed cannot be interrupted. It reads the slot until the workers
    have the version or the process group breaks, even if their connections end before.
    """
    slot, copying = published.slot, published.copying

    def ready(nbytes: int) -> None:
        if copying is not None:
            copying.ready((nbytes - 1) // BLOCK)

    buffer = slot.segment.buffer[: group.pool.layout.nbytes]
    future = member.send(buffer, tag_of(published.round), ready)
    group.pool.keep_until(future, slot, lambda future: ended(future.exception()))


@dataclass(eq=False, repr=False)
class _Broadcast:
    """A broadcast that is announced or being sent."""

    round: int
    connections: list[TransferConnection]  # of its workers
    member: ProcessGroupMember  # rank 0
    # The callbacks of the workers that have got the announcement.
    on_sent: list[Callable[[], None]] = field(default_factory=list, init=False)
    # Gives the broadcast up, once it is being sent.
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def end(self) -> None:
        """The broadcast has ended, or is given up."""
        if self.timer is not None:
            self.timer.cancel()

    def interrupt(self) -> None:
        """Its bytes will not arrive: let the workers fetch the version again; idempotent."""
        self.end()
        # Only once: later the workers may be fetching the same version alone.
        connections, self.connections = self.connections, []
        for connection in connections:
            connection.interrupt(self.round)


class BroadcastGroup:
    """The sender's side: decides for each version whether it is broadcast. Used on the event loop.

    ``join(key, size)`` makes rank 0's member of a process group.
    """

    def __init__(self, group: WorkerGroup, join: Callable[[str, int], ProcessGroupMember]) -> None:
        self._group = group
        self._join = join
        self._connections: dict[int, TransferConnection] = {}
        # The workers that a broadcast waits for.
        self._expected = set(group.workers)
        # The process group of the connected workers, once a broadcast was announced; and its key.
        self._member: ProcessGroupMember | None = None
        self._key = ""
        self._broken = False
        # The broadcast that is announced or being sent.
        self._current: _Broadcast | None = None
        # The round of the last broadcast that was sent, and the last round up to which each worker is sent to
        # alone.
        self._sent = self._alone = -1
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, connection: TransferConnection) -> None:
        """A worker has connected."""
        self._connections[connection.worker] = connection
        self._expected.add(connection.worker)
        if self._announced:
            self._interrupt()  # it will not begin: the worker is not in this process group
        self._leave()

    def exclude(self, worker: int) -> None:
        """A worker has connected that needs no bytes: do not wait for it."""
        self._expected.discard(worker)
        self._schedule()

    def detach(self, connection: TransferConnection) -> None:
        """A worker was lost."""
        worker = connection.worker
        if self._connections.get(worker) is connection:
            del self._connections[worker]
            self._stop_timer()
            self._break(f"worker {worker} (rank {worker + 1}) was lost")
            self._schedule()

    def renew(self) -> None:
        """Broadcast again, in a new process group of the workers that are connected now."""
        self._broken = False
        self._expected = set(self._connections)

    # -- one version ---------------------------------------------------------------------------------

    @property
    def _announced(self) -> bool:
        """Whether a broadcast is announced that has not begun."""
        return self._current is not None and self._current.round != self._sent

    @property
    def moved(self) -> int:
        """Bytes that the running broadcast's process group has sent so far."""
        return 0 if self._current is None else self._current.member.moved

    def can_start(self, published: SlotVersion) -> bool:
        """Whether a worker that has sent a Fetch can be offered the version now."""
        if published.round == self._sent:
            self._break("a worker requested a version again after its broadcast")
        alone = self._broken or published.joint is not None or len(self._expected) < 2
        if alone or self.broadcasts(published) or published.round <= self._alone:
            return True
        self._schedule()
        return False

    def broadcasts(self, published: SlotVersion) -> bool:
        """Whether this version is announced as a broadcast."""
        return self._announced and self._current is not None and published.round == self._current.round

    def payload(self, worker: int) -> ProcessGroupPayload:
        """The payload of a worker's Update frame, for a broadcast."""
        order = sorted(self._connections)
        return ProcessGroupPayload(self._key, rank=1 + order.index(worker), size=1 + len(order))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        """A worker has got the announcement. The broadcast starts when all have."""
        current = self._current
        assert current is not None
        current.on_sent.append(on_sent)
        if len(current.on_sent) < len(current.connections):
            return
        self._sent = current.round  # a later Fetch of this version is served alone
        self._watch(current, min(STALLED, _SHARE * published.seconds), moved=-1)

        def ended(error: BaseException | None) -> None:
            current.end()
            if self._current is current:
                self._current = None
            if error is None:
                for callback in current.on_sent:
                    callback()
                return
            current.interrupt()
            if self._member is current.member:
                self._break(str(error))

        send_by(current.member, self._group, published, ended)

    def _watch(self, broadcast: _Broadcast, seconds: float, moved: int) -> None:
        """Give the broadcast up if it makes no progress for so long."""
        if broadcast.member.moved == moved:
            self._break(f"a broadcast has made no progress for {seconds:g} s")
        else:
            watch = partial(self._watch, broadcast, seconds, broadcast.member.moved)
            broadcast.timer = asyncio.get_running_loop().call_later(seconds, watch)

    # -- decisions -----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Decide in the next iteration of the event loop: more workers may be notified in this one."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self, *, timed_out: bool = False) -> None:
        """Announce a broadcast, send to each worker alone, or wait for more workers."""
        self._scheduled = False
        connections = self._connections.values()
        fetched = [c.notified for c in connections if c.ready and c.notified is not None]
        newest = max(fetched, key=lambda published: published.round, default=None)
        expected = [self._connections.get(worker) for worker in self._expected]
        notified = [c for c in expected if c is not None and c.notified is newest]
        if newest is None:
            self._stop_timer()
        elif self._broken or timed_out or len(notified) < len(expected):
            self._alone = max(newest.round, self._alone)
            self._offer_all()
        elif all(connection.ready for connection in notified):
            if self._member is None:
                self._key = secrets.token_hex(8)
                self._member = self._join(self._key, 1 + len(notified))
            self._current = _Broadcast(newest.round, notified, self._member)
            self._offer_all()
        elif self._timer is None:
            decide = partial(self._decide, timed_out=True)
            patience = min(_PATIENCE, _SHARE * newest.seconds)
            self._timer = asyncio.get_running_loop().call_later(patience, decide)

    def _offer_all(self) -> None:
        self._stop_timer()
        for connection in list(self._connections.values()):
            if connection.ready:
                connection.offer_next()

    def _break(self, reason: str) -> None:
        """Give up the broadcast that goes on, and send to each worker alone."""
        self._interrupt()
        if self._member is None:
            return
        self._broken = True
        self._leave()
        if not self._group.stopped:
            logger.warning("weights are sent to each worker alone until reconnect(): %s", reason)

    def _interrupt(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.interrupt()

    def _leave(self) -> None:
        """Leave the process group, once a broadcast in it has ended."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
