"""Broadcasts: one transfer for all workers of a group, if all of them are to have the same version.

All workers must join a broadcast at the same time, so a worker that has sent a Fetch waits for the others:

1. WAITING: some workers have sent a Fetch. Once all have, the Update frame of each announces a broadcast.
2. SENDING: the broadcast runs in the process group's thread.
3. BROKEN: a worker was lost, or a broadcast failed. Each worker is sent to alone until :meth:`renew`.

If a worker is disconnected, is not addressed, or sends no Fetch within :data:`_PATIENCE`, each worker is sent
this version alone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from aiosync.protocol.stream import BLOCK
from aiosync.transfer.base import TransferConnection
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

logger = logging.getLogger("aiosync")

Ended = Callable[[BaseException | None], None]
"""Called on the event loop when a transfer has ended, with its error."""

_PATIENCE = 0.5
"""Seconds that workers which have sent a Fetch wait for the others."""


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
        # Rounds: of the broadcast that is announced; of the last one that was sent; and the last round up to
        # which each worker is sent to alone.
        self._announced = self._sent = self._alone = -1
        # The callbacks of the workers that have got the announcement.
        self._on_sent: list[Callable[[], None]] = []
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, connection: TransferConnection) -> None:
        """A worker has connected."""
        self._connections[connection.worker] = connection
        self._expected.add(connection.worker)
        self._drop()  # the worker is not in this process group

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

    def can_start(self, published: SlotVersion) -> bool:
        """Whether a worker that has sent a Fetch can be offered the version now."""
        if published.round == self._sent:
            self._break("a worker requested a version again after its broadcast")
        alone = self._broken or published.joint is not None or len(self._expected) < 2
        if alone or published.round == self._announced or published.round <= self._alone:
            return True
        self._schedule()
        return False

    def broadcasts(self, published: SlotVersion) -> bool:
        """Whether this version is announced as a broadcast."""
        return published.round == self._announced

    def payload(self, worker: int) -> ProcessGroupPayload:
        """The payload of a worker's Update frame, for a broadcast."""
        order = sorted(self._connections)
        return ProcessGroupPayload(self._key, rank=1 + order.index(worker), size=1 + len(order))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        """A worker has got the announcement. The broadcast starts when all have."""
        self._on_sent.append(on_sent)
        member = self._member
        if member is None or len(self._on_sent) < len(self._connections):
            return
        callbacks, self._on_sent = self._on_sent, []
        self._announced, self._sent = -1, published.round  # a later Fetch of this version is served alone

        def ended(error: BaseException | None) -> None:
            if error is None:
                for callback in callbacks:
                    callback()
            elif self._member is member:
                self._break(str(error))

        send_by(member, self._group, published, ended)

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
            self._offer_all(alone=newest.round)
        elif all(connection.ready for connection in notified):
            if self._member is None:
                self._key = secrets.token_hex(8)
                self._member = self._join(self._key, 1 + len(notified))
            self._offer_all(announced=newest.round)
        elif self._timer is None:
            decide = partial(self._decide, timed_out=True)
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE, decide)

    def _offer_all(self, *, announced: int = -1, alone: int = -1) -> None:
        self._stop_timer()
        self._announced, self._alone, self._on_sent = announced, max(alone, self._alone), []
        for connection in list(self._connections.values()):
            if connection.ready:
                connection.offer_next()

    def _break(self, reason: str) -> None:
        if self._member is None:
            return
        self._broken = True
        self._drop()
        if not self._group.stopped:
            logger.warning("weights are sent to each worker alone until reconnect(): %s", reason)

    def _drop(self) -> None:
        """Leave the process group."""
        member, self._member = self._member, None
        self._announced, self._on_sent = -1, []
        if member is not None:
            member.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
