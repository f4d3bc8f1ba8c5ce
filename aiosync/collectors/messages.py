"""The messages between a collector and its workers."""

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
    """Request for one batch.

    Attributes:
        number: the number of this request.
        frames: how many frames the batch is to have.
        at_random: take random actions instead of the policy's.
        returned: numbers of buffers that the worker may reuse.
    """

    number: int
    frames: int
    at_random: bool = False
    returned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndEarly:
    """Request to deliver the batches in progress with the frames that they have."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call one of the worker's methods.

    Attributes:
        number: the number of this call, repeated in its :class:`Answer`.
        method: the method's name.
        arguments: its positional arguments; picklable.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has its environment, its policy and its first weights.

    Attributes:
        width: frames per step of each of its environments: 1, or the number of environments that step
            together.
    """

    width: int


@dataclass(frozen=True, slots=True)
class NewBuffer:
    """The worker has allocated shared memory for its batches.

    Attributes:
        buffer: its number.
        handle: how to map it; see :class:`~aiosync.weights.segment.Segment`.
        specs: the fields of a frame.
        frames: how many frames fit.
        shape: batch shape of a frame: the environments that step together.
        replaced: numbers of buffers that the worker has closed.
    """

    buffer: int
    handle: dict[str, Any]
    specs: Specs
    frames: int
    shape: tuple[int, ...]
    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch is complete in a buffer.

    Attributes:
        number: the :class:`Collect` that this batch answers.
        buffer: the buffer's number.
        steps: steps per environment.
        order: places in the buffer in order of time; None: ``0, 1, ...``.
    """

    number: int
    buffer: int
    steps: int
    order: list[int] | None


@dataclass(frozen=True, slots=True)
class InlineBatch:
    """A complete batch, pickled into the message.

    Attributes:
        number: the :class:`Collect` that this batch answers.
        steps: steps per environment.
        data: the frames.
    """

    number: int
    steps: int
    data: TensorDict


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned or raised.

    Attributes:
        number: the :class:`Call` that this answers.
        value: the return value.
        error: what the call raised; None: it returned.
    """

    number: int
    value: Any = None
    error: ErrorReport | None = None


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An exception raised in the worker.

    Attributes:
        error: the pickled exception; None if it cannot be pickled.
        kind: the name of its type.
        message: its text.
        trace: its traceback as text.
    """

    error: bytes | None
    kind: str
    message: str
    trace: str


ToWorker: TypeAlias = Collect | EndEarly | Call
FromWorker: TypeAlias = Ready | NewBuffer | Batch | InlineBatch | Answer | ErrorReport
