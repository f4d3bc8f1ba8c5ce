"""One broadcast for all workers of a group, where all of them are to have the same version.

A broadcast needs everybody at the same time, so a worker that has come for a version waits for the others:

1. GATHERING: some workers have fetched. As soon as all have, each gets an Update that announces a broadcast.
2. SENDING: the broadcast runs in the group's thread, and ends there.
3. BROKEN: a worker died, or the broadcast failed. Each worker gets its own copy until :meth:`renew`.

Where a worker is away, was not addressed, or does not fetch within :data:`_MOMENT`, each worker gets its own
copy of the version.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiosync.protocol.payloads import ProcessGroupPayload
from aiosync.protocol.stream import BLOCK
from aiosync.transfer.base import TransferConnection
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = ["BroadcastGroup", "send_by", "tag_of"]

logger = logging.getLogger("aiosync")

_TAGS = 1 << 30

_MOMENT = 0.5
"""Seconds that workers who have come wait for those who have not."""


def send_by(
    ranks: ProcessGroupMember,
    group: WorkerGroup,
    published: SlotVersion,
    ended: Callable[[BaseException | None], None],
) -> None:
    """Send a version by a process group; ``ended`` is called on the event loop.

    The slot has a lease of its own: torch.distributed cannot be interrupted, and reads the slot until the
    workers have the version or the process group has broken, also if their connections end before.
    """
    slot, copying = published.slot, published.copying

    def ready(nbytes: int) -> None:
        if copying is not None:
            copying.ready((nbytes - 1) // BLOCK)

    buffer = slot.segment.buffer[: group.pool.layout.nbytes]
    future = ranks.send(buffer, tag_of(published.round), ready)
    group.pool.keep_until(future, slot, lambda future: ended(future.exception()))


class BroadcastGroup:
    """The sender's side.

    Args:
        group: whose workers.
        join: makes rank 0's part of a process group, of a key and a size.
    """

    def __init__(self, group: WorkerGroup, join: Callable[[str, int], ProcessGroupMember]) -> None:
        self._group = group
        self._join = join
        self._members: dict[int, TransferConnection] = {}
        self._expected = set(group.workers)
        self._ranks: ProcessGroupMember | None = None
        self._key = ""
        self._broken = False
        self._chosen = -1  # the round of which workers are being told
        self._sent = -1  # the one that was broadcast last
        self._alone = -1  # up to this one, each gets it by itself
        self._told: list[Callable[[], None]] = []
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, member: TransferConnection) -> None:
        """A worker is connected."""
        self._members[member.worker] = member
        self._expected.add(member.worker)
        self._drop()  # the process group is of those who were here before

    def excuse(self, worker: int) -> None:
        """This one needs nothing to be sent."""
        self._expected.discard(worker)
        self._look_again()

    def detach(self, member: TransferConnection) -> None:
        """It is not any more."""
        if self._members.get(member.worker) is member:
            del self._members[member.worker]
            self._stop_timer()
            self._break(f"worker {member.worker} (rank {member.worker + 1}) is gone")
            self._look_again()

    def renew(self) -> None:
        """Broadcast again, in a process group of those who are here now."""
        self._broken = False
        self._expected = set(self._members)

    # -- one version ---------------------------------------------------------------------------------

    def can_start(self, published: SlotVersion) -> bool:
        """Whether a worker that has come for a version may be given it now."""
        if published.round == self._sent:
            self._break("a worker came again for what had been broadcast")
        alone = self._broken or published.joint is not None or len(self._expected) < 2
        if alone or published.round == self._chosen or published.round <= self._alone:
            return True
        self._look_again()
        return False

    def _look_again(self) -> None:
        """Decide in the next turn of the event loop: more workers may be notified in this one."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._decide)

    def broadcasts(self, published: SlotVersion) -> bool:
        """Whether this version goes to all at once."""
        return published.round == self._chosen

    def payload(self, worker: int) -> ProcessGroupPayload:
        """What a worker's Update says of the process group."""
        order = sorted(self._members)
        return ProcessGroupPayload(self._key, rank=1 + order.index(worker), size=1 + len(order))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        """One more worker has been told; the last one begins it."""
        self._told.append(on_sent)
        ranks = self._ranks
        if ranks is None or len(self._told) < len(self._members):
            return
        told, self._told = self._told, []
        self._chosen, self._sent = -1, published.round  # who comes for it from now on comes alone

        def ended(error: BaseException | None) -> None:
            if error is None:
                for callback in told:
                    callback()
            elif self._ranks is ranks:
                self._break(str(error))

        send_by(ranks, self._group, published, ended)

    def _decide(self) -> None:
        """Look who has come for what."""
        self._soon = False
        newest = self._newest()
        if newest is None:
            return
        members = [self._members.get(worker) for worker in self._expected]
        here = [member for member in members if member is not None and member.notified is newest]
        if self._broken or len(here) < len(members):
            self._go(alone=newest.round)
        elif all(member.ready for member in here):
            if self._ranks is None:
                self._key = secrets.token_hex(8)
                self._ranks = self._join(self._key, 1 + len(here))
            self._go(chosen=newest.round)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MOMENT, self._waited)

    def _newest(self) -> SlotVersion | None:
        """The newest version that a worker has fetched."""
        members = self._members.values()
        notified = [m.notified for m in members if m.ready and m.notified is not None]
        return max(notified, key=lambda published: published.round, default=None)

    def _waited(self) -> None:
        newest = self._newest()
        self._go(alone=newest.round if newest is not None else -1)

    def _go(self, *, chosen: int = -1, alone: int = -1) -> None:
        self._stop_timer()
        self._chosen, self._alone, self._told = chosen, max(alone, self._alone), []
        for member in list(self._members.values()):
            if member.ready:
                member.offer_next()

    def _break(self, why: str) -> None:
        if self._ranks is None:
            return
        self._broken = True
        self._drop()
        if not self._group.stopped:
            logger.warning("weights go to each worker by itself until reconnect(): %s", why)

    def _drop(self) -> None:
        ranks, self._ranks = self._ranks, None
        self._chosen, self._told = -1, []
        if ranks is not None:
            ranks.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def tag_of(round_: int) -> int:
    """The tag of a version's messages."""
    return 1 + round_ % _TAGS
