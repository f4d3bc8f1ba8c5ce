"""What sessions report: the events that :mod:`aiosync.protocol.session` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True)
class Greeted:
    """A worker proved that it knows the token; answer with ``welcome`` or ``refuse``."""

    hello: f.Hello


@dataclass(frozen=True, slots=True)
class Fetched:
    """The worker is ready; answer with ``offer``. It still has the bytes of version ``have`` (-1: none), and
    ``maps``: can read the sender's memory."""

    have: int = -1
    maps: bool = False


@dataclass(frozen=True, slots=True)
class StageDone:
    """The worker waits for its moment to commit; ``copied``: it needs the sender's memory no more."""

    round: int
    copied: bool


@dataclass(frozen=True, slots=True)
class Applied:
    """The worker runs on ``version``."""

    round: int
    version: int
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The worker refused an update."""

    nack: f.Nack


@dataclass(frozen=True, slots=True)
class Left:
    """The peer ended the session in order."""

    reason: str
    dropped: bool = False
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Recalled:
    """The update under way was taken back; another has to be fetched."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The sender proved that it knows the token; its process id is ``pid`` (0: not on this machine)."""

    pid: int


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The sender has taken this worker in; updates follow."""

    welcome: f.Welcome


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """An update to stage and commit."""

    update: f.Update


@dataclass(frozen=True, slots=True)
class Aborted:
    """A joint update is off."""

    joint: str


SenderEvent: TypeAlias = Greeted | Fetched | StageDone | Applied | Rejected | Left
ReceiverEvent: TypeAlias = Verified | Welcomed | UpdateArrived | Recalled | Aborted | Left
