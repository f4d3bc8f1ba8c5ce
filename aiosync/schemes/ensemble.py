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

from aiosync.schemes.group import Published, WeightGroup
from aiosync.transports.process_group import Ranks

__all__ = ["Ensemble", "Member"]

logger = logging.getLogger("aiosync")

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


class Ensemble:
    """The sender's side.

    Args:
        group: whose workers.
        join: makes rank 0's part of a process group, of a key and a size.
        send: sends a version by a process group, and calls back on the event loop.
    """

    def __init__(
        self,
        group: WeightGroup,
        join: Callable[[str, int], Ranks],
        send: Callable[[Ranks, Published, Callable[[Future[None]], None]], None],
    ) -> None:
        self._group = group
        self._join = join
        self._send = send
        self._members: dict[int, Member] = {}
        self._expected = set(group.workers)
        self._ranks: Ranks | None = None
        self._key = ""
        self._broken = False
        self._chosen = -1
        self._alone = -1
        self._joined: list[Callable[[], None]] = []
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, member: Member) -> None:
        """A worker is connected."""
        if self._members.get(member.worker) is not member:
            self._members[member.worker] = member
            self._expected.add(member.worker)
            self._break("")  # the process group is of those who were here before

    def leave(self, member: Member) -> None:
        """It is not any more."""
        if self._members.get(member.worker) is member:
            del self._members[member.worker]
            self._break(f"worker {member.worker} (rank {member.worker + 1}) is gone")

    def renew(self) -> None:
        """Broadcast again, in a process group of those who are here now."""
        self._broken = False
        self._expected = set(self._members)

    def close(self) -> None:
        """Let go of the process group."""
        self._stop_timer()
        self._broken = True
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    # -- one version ---------------------------------------------------------------------------------

    def may_begin(self, published: Published) -> bool:
        """Whether a worker that has come for a version may be given it now."""
        if self._broken or published.joint is not None or len(self._expected) < 2:
            return True
        if published.round in (self._chosen, self._alone):
            return True
        if not self._soon:  # others may be told of it in this very moment
            self._soon = True
            asyncio.get_running_loop().call_soon(self._decide, published)
        return False

    def broadcasts(self, published: Published) -> bool:
        """Whether this version goes to all at once."""
        return published.round == self._chosen

    def payload(self, worker: int) -> dict[str, object]:
        """What a worker is told of the process group."""
        order = sorted(self._members)
        return {"group": self._key, "rank": 1 + order.index(worker), "size": 1 + len(order)}

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
        """One more worker has been told; the last one begins it."""
        self._joined.append(on_sent)
        if len(self._joined) == len(self._members) and self._ranks is not None:
            told, self._joined = self._joined, []
            ranks = self._ranks

            def ended(future: Future[None]) -> None:
                error = future.exception()
                if error is not None and self._ranks is ranks:
                    self._break(str(error))
                elif error is None:
                    for callback in told:
                        callback()

            self._send(ranks, published, ended)

    def _decide(self, published: Published) -> None:
        self._soon = False
        members = [self._members.get(worker) for worker in self._expected]
        here = [member for member in members if member is not None and member.due is published]
        if self._broken or len(here) < len(members):
            self._go(here, alone=published.round)
        elif all(member.ready for member in here):
            if self._ranks is None:
                self._key = secrets.token_hex(8)
                self._ranks = self._join(self._key, 1 + len(here))
            self._go(here, chosen=published.round)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_MOMENT, self._go, here, -1, published.round)

    def _go(self, members: list[Member], chosen: int = -1, alone: int = -1) -> None:
        self._stop_timer()
        self._chosen, self._alone, self._joined = chosen, alone, []
        for member in members:
            member.serve()

    def _break(self, why: str) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        ranks.close()
        self._joined = []
        self._broken = self._broken or bool(why)
        if why and not self._group.stopped:
            logger.warning("weights go to each worker by itself until reconnect(): %s", why)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
