"""What a sender says of itself in the Welcome frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aiosync.protocol.frames import Hello, Welcome
from aiosync.sender.worker_group import WorkerGroup

__all__ = ["Introduction"]

EAGER_LIMIT = 1 << 20
"""Bytes up to which a worker gets an update without a Notify before it. This saves a round trip. It costs a
slot if the worker hangs at that moment."""


class Introduction(NamedTuple):
    """What a Welcome frame says of the sender.

    Attributes:
        instance: an id of this sender, different from the next sender's at the same address.
        ticket: the secret with which the worker proves that the index is its own.
        via: the ids of the senders that an update passes on its way.
    """

    instance: str
    ticket: bytes
    via: Sequence[str]

    def welcome(self, worker: int, group: WorkerGroup, hello: Hello | None) -> Welcome:
        """The Welcome frame for a worker.

        Args:
            worker: its index.
            group: its group, which has a newest version.
            hello: its Hello frame.
        """
        layout, newest = group.pool.layout, group.newest
        assert newest is not None
        known = hello is not None and hello.signature == layout.identity
        return Welcome(
            layout=None if known else layout.to_wire(),
            signature=layout.identity,
            version=newest.version,
            worker=worker,
            instance=self.instance,
            device=str(newest.slot.segment.buffer.device),
            eager=layout.nbytes <= EAGER_LIMIT,
            ticket=self.ticket,
            via=list(self.via),
        )
