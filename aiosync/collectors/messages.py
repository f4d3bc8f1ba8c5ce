"""What a collector and its workers say to each other, over the pipe that a worker is born with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from aiosync.collectors.fields import Specs

__all__ = [
    "Answer",
    "Batch",
    "Call",
    "Collect",
    "Cut",
    "Failed",
    "FromWorker",
    "NewSlot",
    "Ready",
    "ToWorker",
]


@dataclass(frozen=True, slots=True)
class Collect:
    """Leave to fill one slot.

    Attributes:
        frames: how many.
        at_random: act at random.
        returned: a slot that is free again; -1: none.
    """

    frames: int
    at_random: bool = False
    returned: int = -1


@dataclass(frozen=True, slots=True)
class Cut:
    """What is being collected is to be delivered as far as it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call one of the worker's methods.

    Attributes:
        number: which call.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has its environment, its policy and its weights."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A piece of shared memory that batches will lie in.

    Attributes:
        handle: see :class:`~aiosync.weights.segment.Segment`.
        specs: what is in it, frame after frame.
        frames: how many.
        shape: of a frame: the environments that step together.
    """

    slot: int
    handle: dict[str, Any]
    specs: Specs
    frames: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """A slot has been filled.

    Attributes:
        steps: how many frames there are.
        order: of these; None: as they are.
    """

    slot: int
    steps: int
    order: list[int] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned, or raised."""

    number: int
    value: Any = None
    error: Failed | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Something raised.

    Attributes:
        error: the exception, pickled; None if it cannot be.
        kind: its type's name.
        message: what it says.
        trace: its traceback.
    """

    error: bytes | None
    kind: str
    message: str
    trace: str


ToWorker: TypeAlias = Collect | Cut | Call
FromWorker: TypeAlias = Ready | NewSlot | Batch | Answer | Failed
