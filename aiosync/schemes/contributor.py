"""The ranks of a sharded trainer, besides the one that sends: they only lend their shards.

Whoever sends does the same thing on every rank, at the same place of its program. A call that is given up
on one of the others leaves its thread in a collective call of torch.distributed until the rest have come,
or that has given up too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import GatherError
from aiosync.schemes.report import SendReport
from aiosync.transports._offload import DetachedThread, aside
from aiosync.weights.layout import Layout
from aiosync.weights.sharded import Team, is_sharded

__all__ = ["Contributor", "gatherings", "leading"]


def gatherings(sources: Mapping[int, Mapping[str, Tensor]]) -> int:
    """How often sending this gathers."""
    return sum(any(map(is_sharded, tensors.values())) for tensors in sources.values())


class Contributor:
    """In place of a sender.

    Args:
        team: the ranks.

    Attributes:
        version: the version that this rank has lent its shards for last; -1 before the first.
    """

    def __init__(self, team: Team) -> None:
        self.version = -1
        self._team = team
        self._thread = DetachedThread("aiosync-shards")

    async def contribute(self, sources: Mapping[int, Mapping[str, Tensor]], deadline: Deadline) -> SendReport:
        """Lend what is being sent.

        Raises:
            GatherError: rank 0 has called it off, or a rank is gone.
            SyncTimeoutError: the others did not come in time.
        """
        for tensors in sources.values():
            wanted = [tensor for _, tensor in Layout.of(tensors).fit(tensors) if is_sharded(tensor)]
            if not wanted:
                continue
            lending = asyncio.wrap_future(self._thread.submit(partial(self._team.contribute, wanted)))
            lending.add_done_callback(_seen)
            done, _ = await asyncio.wait([lending], timeout=deadline.remaining())
            if not done:
                raise deadline.error("stage", hint="not every rank of the trainer came to send")
            lending.result()
        self.version += 1
        return self.report()

    def report(self) -> SendReport:
        """What there is to say of the last time."""
        return SendReport(self.version, 0, {}, {}, ())

    def close(self) -> None:
        """Lend nothing more."""
        self._thread.close()


@dataclass
class Leading:
    """A send of the rank that leads.

    Attributes:
        gatherings: how often it will gather.
    """

    gatherings: int = 1


@asynccontextmanager
async def leading(team: Team | None) -> AsyncIterator[Leading]:
    """Around a send: if it fails before all was gathered, the other ranks are told."""
    before = team.begun if team is not None else 0
    send = Leading()
    try:
        yield send
    except BaseException as exc:
        if team is not None and team.begun - before < send.gatherings:
            reason = str(exc) or type(exc).__name__
            aside(lambda: _call_off(team, reason), "aiosync-shards")
        raise


def _call_off(team: Team, reason: str) -> None:
    with suppress(GatherError):  # they are gone
        team.call_off(reason)


def _seen(lending: asyncio.Future[None]) -> None:
    """Whoever has given up does not ask what came of it."""
    if not lending.cancelled():
        lending.exception()
