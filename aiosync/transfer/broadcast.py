"""Broadcasts: one transfer for all workers of a group, if all of them are to have the same version.

All workers must join a broadcast at the same time, so a worker that has sent a Fetch waits for the others:

1. WAITING: some workers have sent a Fetch.
2. ANNOUNCED: all have. The Update frame of each announces a broadcast.
3. BEGUN: each has got that frame. The broadcast runs in the process groups' threads until all have answered.
4. BROKEN: a worker was lost, or broadcasts failed. Each worker is sent to alone until :meth:`renew`.

If a worker is disconnected, is not addressed, or sends no Fetch within :data:`_PATIENCE`, each worker is sent
this version alone.

gloo does not tell a rank that waits for one that has died, and its messages cannot be interrupted. So the
sender, which notices that a worker is lost or that nothing moves, tells the other workers by an Interrupt
frame. They fetch the version again, and it comes to each alone. The threads that gloo holds end by its
timeout.
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

_LOOKS = 10
"""How often the progress is looked at in the time after which no progress is a stall."""

_FAILURES = 3
"""After so many failed broadcasts in a row each worker is sent to alone."""

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
    """One broadcast, from its announcement until each worker has answered, or until it is given up.

    When gloo has taken rank 0's part, other ranks may still be passing it on. So the slots stay leased until
    the workers have answered, and the progress is watched as long.
    """

    round: int
    seconds: float  # without progress until ``on_stall`` is called
    on_stall: Callable[[], None]
    member: ProcessGroupMember  # rank 0
    connections: list[TransferConnection]  # of its workers
    # Those that have not answered.
    waiting: set[TransferConnection] = field(init=False)
    announced: int = field(default=0, init=False)  # how many workers have got the announcement
    begun: bool = field(default=False, init=False)  # all have got it
    sent: bool = field(default=False, init=False)  # gloo has taken rank 0's part
    failed: bool = field(default=False, init=False)  # a worker did not get all bytes
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.waiting = set(self.connections)

    def begin(self) -> None:
        """All workers have got the announcement. Watch the progress from now on."""
        self.begun = True
        self._watch(None, 0.0)

    def _watch(self, before: object, since: float) -> None:
        """``before``: the progress that was seen last, for the first time at ``since``."""
        loop = asyncio.get_running_loop()
        lacking = sum(not connection.staged for connection in self.waiting)
        progress = self.member.steps, self.member.moved, lacking
        if progress != before:
            since = loop.time()
        if loop.time() - since >= self.seconds:
            self.on_stall()
        elif lacking:
            self._timer = loop.call_later(self.seconds / _LOOKS, self._watch, progress, since)

    def answered(self, connection: TransferConnection) -> None:
        """A worker has answered, or has given the version back."""
        self.waiting.discard(connection)
        if not self.waiting:
            self.unwatch()

    def lose(self, connection: TransferConnection) -> bool:
        """A worker was lost. Return whether the others wait for bytes that it may have had to pass on."""
        if connection not in self.connections:
            return False
        self.connections.remove(connection)
        self.answered(connection)
        return bool(self.waiting)

    def interrupt(self) -> None:
        """Let the workers that do not have all bytes fetch the version again; idempotent."""
        self.unwatch()
        # Only once: later the workers may be fetching the same version alone.
        waiting, self.waiting = self.waiting, set()
        for connection in waiting:
            connection.interrupt(self.round)

    def unwatch(self) -> None:
        """Do not watch the progress any more."""
        if self._timer is not None:
            self._timer.cancel()


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
        # How many broadcasts in a row have failed.
        self._failures = 0
        # The last broadcast.
        self._current: _Broadcast | None = None
        # The last round up to which each worker is sent to alone.
        self._alone = -1
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, connection: TransferConnection) -> None:
        """A worker has connected."""
        self._connections[connection.worker] = connection
        self._expected.add(connection.worker)
        if self._current is not None and not self._current.begun:
            self._interrupt(self._current)  # it will not begin: the worker is not in this process group
        self._leave()

    def exclude(self, worker: int) -> None:
        """A worker has connected that needs no bytes: do not wait for it."""
        self._expected.discard(worker)
        self._schedule()

    def detach(self, connection: TransferConnection) -> None:
        """A worker was lost, or this sender closes."""
        worker, current = connection.worker, self._current
        if self._connections.get(worker) is not connection:
            return
        del self._connections[worker]
        self._stop_timer()
        if self._group.stopped:  # the workers still get the version that is being sent
            if current is not None:
                current.unwatch()
            self._leave()
            return
        if current is not None and current.lose(connection):
            self._interrupt(current)
        if self._member is not None:
            self._break(f"worker {worker} (rank {worker + 1}) was lost")
        self._schedule()

    def renew(self) -> None:
        """Broadcast again, in a new process group of the workers that are connected now."""
        self._broken, self._failures = False, 0
        self._expected = set(self._connections)

    # -- one version ---------------------------------------------------------------------------------

    @property
    def moved(self) -> int:
        """Bytes that the last broadcast's process group has sent so far."""
        return 0 if self._current is None else self._current.member.moved

    def can_start(self, connection: TransferConnection, published: SlotVersion) -> bool:
        """Whether a worker that has sent a Fetch can be offered the version now."""
        current = self._current
        if current is not None and current.begun and current.round == published.round:
            if connection in current.connections:
                self._leave()  # the worker may have found the process group broken
                self._failed(current)
            return True  # alone
        alone = self._broken or published.joint is not None or len(self._expected) < 2
        if alone or self.broadcasts(published) or published.round <= self._alone:
            return True
        self._schedule()
        return False

    def broadcasts(self, published: SlotVersion) -> bool:
        """Whether this version is announced as a broadcast that has not begun."""
        current = self._current
        return current is not None and not current.begun and current.round == published.round

    def payload(self, worker: int) -> ProcessGroupPayload:
        """The payload of a worker's Update frame, for a broadcast."""
        order = sorted(self._connections)
        return ProcessGroupPayload(self._key, rank=1 + order.index(worker), size=1 + len(order))

    def start(self, published: SlotVersion) -> None:
        """A worker has got the announcement. The broadcast starts when all have."""
        current = self._current
        assert current is not None
        current.announced += 1
        if current.announced < len(current.connections):
            return
        current.begin()  # a later Fetch of this version is served alone

        def ended(error: BaseException | None) -> None:
            current.sent = error is None
            if error is not None:
                self._interrupt(current)
                if self._member is current.member:
                    self._break(str(error))

        send_by(current.member, self._group, published, ended)

    def answered(self, connection: TransferConnection) -> None:
        """A worker has answered for its last version, or has given it back."""
        current = self._current
        if current is not None and connection in current.waiting:
            current.answered(connection)
            if not current.waiting and not current.failed:
                self._failures = 0

    def _stalled(self, broadcast: _Broadcast) -> None:
        """Nothing moves: a rank is suspended, or workers that have the bytes are slow. Those ignore this."""
        self._interrupt(broadcast)
        self._alone = max(broadcast.round, self._alone)
        self._leave()  # the next broadcast uses a new process group
        if not broadcast.sent:
            self._failed(broadcast)

    def _failed(self, broadcast: _Broadcast) -> None:
        """A worker did not get all bytes, although no worker was lost."""
        self._failures += not broadcast.failed
        broadcast.failed = True
        if self._failures >= _FAILURES:
            self._break(f"{_FAILURES} broadcasts in a row failed")

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
            self._announce(newest, self._member, notified)
        elif self._timer is None:
            decide = partial(self._decide, timed_out=True)
            patience = min(_PATIENCE, _SHARE * newest.seconds)
            self._timer = asyncio.get_running_loop().call_later(patience, decide)

    def _announce(
        self, published: SlotVersion, member: ProcessGroupMember, connections: list[TransferConnection]
    ) -> None:
        seconds = min(STALLED, _SHARE * published.seconds)
        current = _Broadcast(published.round, seconds, lambda: self._stalled(current), member, connections)
        self._current = current
        self._offer_all()

    def _offer_all(self) -> None:
        self._stop_timer()
        for connection in list(self._connections.values()):
            if connection.ready:
                connection.offer_next()

    def _interrupt(self, broadcast: _Broadcast) -> None:
        broadcast.interrupt()
        if broadcast.begun:
            broadcast.member.interrupt()
        elif self._current is broadcast:
            self._current = None

    def _break(self, reason: str) -> None:
        """Send to each worker alone from now on."""
        self._leave()
        if not self._broken:
            self._broken = True
            logger.warning("weights are sent to each worker alone until reconnect(): %s", reason)

    def _leave(self) -> None:
        """Leave the process group, once a broadcast in it has ended."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
