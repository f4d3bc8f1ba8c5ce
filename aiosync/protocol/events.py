"""What sessions report: the events that :mod:`aiosync.protocol.session` returns."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aiosync.protocol import frames as f

__all__ = [
    "Aborted",
    "Applied",
    "Fetched",
    "Greeted",
    "Left",
    "Recalled",
    "ReceiverEvent",
    "Rejected",
    "SenderEvent",
    "StageDone",
    "UpdateArrived",
    "Verified",
    "Welcomed",
]


class Greeted(msgspec.Struct, frozen=True):
    """A worker proved that it knows the token; answer with ``welcome`` or ``refuse``."""

    hello: f.Hello


class Fetched(msgspec.Struct, frozen=True):
    """The worker is ready; answer with ``offer``. It still has the bytes of version ``have`` (-1: none), and
    ``maps``: can read the sender's memory."""

    have: int = -1
    maps: bool = False


class StageDone(msgspec.Struct, frozen=True):
    """The worker waits for its moment to commit; ``copied``: it needs the sender's memory no more."""

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
    """The peer ended the session in order."""

    reason: str
    dropped: bool = False
    replaced: bool = False


class Recalled(msgspec.Struct, frozen=True):
    """The update under way was taken back; another has to be fetched."""


class Verified(msgspec.Struct, frozen=True):
    """The sender proved that it knows the token; its process id is ``pid`` (0: not on this machine)."""

    pid: int


class Welcomed(msgspec.Struct, frozen=True):
    """The sender has taken this worker in; updates follow."""

    welcome: f.Welcome


class UpdateArrived(msgspec.Struct, frozen=True):
    """An update to stage and commit."""

    update: f.Update


class Aborted(msgspec.Struct, frozen=True):
    """A joint update is off."""

    joint: str


SenderEvent: TypeAlias = Greeted | Fetched | StageDone | Applied | Rejected | Left
ReceiverEvent: TypeAlias = Verified | Welcomed | UpdateArrived | Recalled | Aborted | Left
