"""One broadcast for all workers of a group, where all of them are to have the same version.

A broadcast needs everybody at the same time, so a worker that has come for a version waits for the others:

1. GATHERING: some have come. As soon as all have, each is told that the version comes as a broadcast.
2. SENDING: all have been told. It is over when the group's thread says so.
3. BROKEN: somebody died, or the broadcast failed. Everybody gets everything by itself until :meth:`renew`.

Where somebody is not there, was not addressed, or does not come within a moment, the version goes to each
worker by itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from aiosync.protocol.stream import BLOCK
from aiosync.schemes.group import Published, WeightGroup
from aiosync.transports._offload import call_when_done
from aiosync.transports.process_group import Ranks

__all__ = ["Ensemble", "Member", "send_by", "tag_of"]

logger = logging.getLogger("aiosync")

_TAGS = 1 << 30

_MOMENT = 0.5
"""Seconds that workers who have come wait for those who have not."""


class Member(Protocol):
    """A worker that takes part."""

    worker: int
    due: Published | None

    @property
    def ready(self) -> bool:
        """Whether it has come for what is due."""

    def serve(self) -> None:
        """Give it what it waits for."""


def send_by(
    ranks: Ranks, group: WeightGroup, published: Published, ended: Callable[[BaseException | None], None]
) -> None:
    """Send a version by a process group; ``ended`` is called on the event loop.

    The version holds its slot in a name of its own: torch.distributed cannot be told to stop, and reads it
    until the workers have it or the process group has broken, whatever has become of them.
    """
    slot, copying = published.slot, published.copying
    holder = ("sending", object())
    slot.holders.add(holder)
    group.unstoppable.add(holder)

    def ready(nbytes: int) -> None:
        if copying is not None:
            copying.ready((nbytes - 1) // BLOCK)

    def over(future: Future[None]) -> None:
        group.unstoppable.discard(holder)
        group.release(holder)
        ended(future.exception())

    buffer = slot.segment.buffer[: group.arena.layout.nbytes]
    future = ranks.send(buffer, tag_of(published.round), ready)
    call_when_done(future, over)


class Ensemble:
    """The sender's side.

    Args:
        group: whose workers.
        join: makes rank 0's part of a process group, of a key and a size.
    """

    def __init__(self, group: WeightGroup, join: Callable[[str, int], Ranks]) -> None:
        self._group = group
        self._join = join
        self._members: dict[int, Member] = {}
        self._expected = set(group.workers)
        self._ranks: Ranks | None = None
        self._key = ""
        self._broken = False
        self._chosen = -1  # the round of which workers are being told
        self._sent = -1  # the one that was broadcast last
        self._alone = -1  # up to this one, each gets it by itself
        self._told: list[Callable[[], None]] = []
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, member: Member) -> None:
        """A worker is connected."""
        self._members[member.worker] = member
        self._expected.add(member.worker)
        self._drop()  # the process group is of those who were here before

    def excuse(self, worker: int) -> None:
        """This one needs nothing to be sent."""
        self._expected.discard(worker)
        self._look_again()

    def leave(self, member: Member) -> None:
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

    def may_begin(self, published: Published) -> bool:
        """Whether a worker that has come for a version may be given it now."""
        if published.round == self._sent:
            self._break("a worker came again for what had been broadcast")
        alone = self._broken or published.joint is not None or len(self._expected) < 2
        if alone or published.round == self._chosen or published.round <= self._alone:
            return True
        self._look_again()
        return False

    def _look_again(self) -> None:
        """Decide soon: others may be told of it in this very moment."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._decide)

    def broadcasts(self, published: Published) -> bool:
        """Whether this version goes to all at once."""
        return published.round == self._chosen

    def payload(self, worker: int) -> dict[str, object]:
        """What a worker is told of the process group."""
        order = sorted(self._members)
        return {"group": self._key, "rank": 1 + order.index(worker), "size": 1 + len(order)}

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
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
        here = [member for member in members if member is not None and member.due is newest]
        if self._broken or len(here) < len(members):
            self._go(alone=newest.round)
        elif all(member.ready for member in here):
            if self._ranks is None:
                self._key = secrets.token_hex(8)
                self._ranks = self._join(self._key, 1 + len(here))
            self._go(chosen=newest.round)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MOMENT, self._waited)

    def _newest(self) -> Published | None:
        """The newest version that somebody has come for."""
        due = [member.due for member in self._members.values() if member.ready and member.due is not None]
        return max(due, key=lambda published: published.round, default=None)

    def _waited(self) -> None:
        newest = self._newest()
        self._go(alone=newest.round if newest is not None else -1)

    def _go(self, *, chosen: int = -1, alone: int = -1) -> None:
        self._stop_timer()
        self._chosen, self._alone, self._told = chosen, max(alone, self._alone), []
        for member in list(self._members.values()):
            if member.ready:
                member.serve()

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
