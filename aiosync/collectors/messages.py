"""What a collector and its workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tensordict import TensorDict

from aiosync.collectors.fields import Specs

__all__ = [
    "Answer",
    "Batch",
    "Call",
    "Collect",
    "EndEarly",
    "ErrorReport",
    "FromWorker",
    "InlineBatch",
    "NewBuffer",
    "Ready",
    "ToWorker",
]


@dataclass(frozen=True, slots=True)
class Collect:
    """Leave to collect one batch.

    Attributes:
        number: which one.
        frames: how many.
        at_random: act at random.
        returned: slots that are free again.
    """

    number: int
    frames: int
    at_random: bool = False
    returned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndEarly:
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
    """A worker has its environment, its policy and its weights.

    Attributes:
        width: how many frames each of its environments gives at a time.
    """

    width: int


@dataclass(frozen=True, slots=True)
class NewBuffer:
    """A piece of shared memory that batches will lie in.

    Attributes:
        handle: see :class:`~aiosync.weights.segment.Segment`.
        specs: what is in it, frame after frame.
        frames: how many.
        shape: of a frame: the environments that step together.
        replaced: slots of which no more will be heard.
    """

    buffer: int
    handle: dict[str, Any]
    specs: Specs
    frames: int
    shape: tuple[int, ...]
    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A slot has been filled.

    Attributes:
        number: see :class:`Collect`.
        steps: how many there are of each environment.
        order: of these; None: as they are.
    """

    number: int
    buffer: int
    steps: int
    order: list[int] | None


@dataclass(frozen=True, slots=True)
class InlineBatch:
    """A batch in person.

    Attributes:
        number: see :class:`Collect`.
        steps: how many there are of each environment.
        data: these.
    """

    number: int
    steps: int
    data: TensorDict


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned, or raised."""

    number: int
    value: Any = None
    error: ErrorReport | None = None


@dataclass(frozen=True, slots=True)
class ErrorReport:
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


ToWorker: TypeAlias = Collect | EndEarly | Call
FromWorker: TypeAlias = Ready | NewBuffer | Batch | InlineBatch | Answer | ErrorReport
