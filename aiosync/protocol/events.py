"""The events that the sessions return."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aiosync.protocol import frames as f


class Greeted(msgspec.Struct, frozen=True):
    """A worker proved that it knows the token. The sender answers with ``welcome`` or ``refuse``."""

    hello: f.Hello


class Fetched(msgspec.Struct, frozen=True):
    """The worker is ready for an update. The sender answers with ``offer``.

    Attributes:
        have: the version whose bytes the worker still has; -1: none.
        maps: whether the worker can read the sender's memory.
    """

    have: int = -1
    maps: bool = False


class StageDone(msgspec.Struct, frozen=True):
    """The worker waits to commit. ``copied``: it no longer reads the sender's memory."""

    round: int
    copied: bool


class Applied(msgspec.Struct, frozen=True):
    """The worker runs on ``version``."""

    round: int
    version: int
    seconds: dict[str, float]


class Rejected(msgspec.Struct, frozen=True):
    """The worker refused an update."""

    nack: f.Nack


class Left(msgspec.Struct, frozen=True):
    """The peer sent a Bye. The fields are those of :class:`~aiosync.protocol.frames.Bye`."""

    reason: str
    dropped: bool = False
    replaced: bool = False


class Recalled(msgspec.Struct, frozen=True):
    """The sender cancelled the update that it was sending. The worker has to fetch again."""


class Verified(msgspec.Struct, frozen=True):
    """The sender proved that it knows the token. ``pid``: its process id; 0: on another machine."""

    pid: int


class Welcomed(msgspec.Struct, frozen=True):
    """The sender serves this worker from now on."""

    welcome: f.Welcome


class UpdateArrived(msgspec.Struct, frozen=True):
    """An update to stage and commit."""

    update: f.Update


class Aborted(msgspec.Struct, frozen=True):
    """A joint update is cancelled."""

    joint: str


SenderEvent: TypeAlias = Greeted | Fetched | StageDone | Applied | Rejected | Left
ReceiverEvent: TypeAlias = Verified | Welcomed | UpdateArrived | Recalled | Aborted | Left
