"""The pipes between a collector and one worker, and the messages in them."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import cloudpickle
from tensordict import TensorDictBase

from aiosync.collectors.env import Nested, Specs
from aiosync.errors import UnpicklableError
from aiosync.transports._offload import handover


class Payload:
    """A value in a message, pickled by itself: the message also arrives if its value cannot be unpickled.

    Without a process boundary the value is passed by reference.
    """

    def __init__(self, value: Any, *, kind: str | None = None, data: bytes | None = None) -> None:
        self._value = value
        self._kind = type(value).__name__ if kind is None else kind
        self._data = data  # the pickled value; None: it has not been pickled yet
        self._received = data is not None  # only the data are here

    def pickled(self) -> bytes:
        """Return the pickled value. Raises what pickling raises."""
        if self._data is None:
            self._data = cloudpickle.dumps(self._value)
        return self._data

    def __reduce__(self) -> Any:
        return _payload, (self._kind, self.pickled())

    def load(self, what: str) -> Any:
        """Return the value. ``what``: its name in an error message. UnpicklableError: it cannot be unpickled
        in this process."""
        if not self._received:
            return self._value
        assert self._data is not None
        try:
            return pickle.loads(self._data)
        except Exception as exc:
            raise UnpicklableError(
                f"{what}, a {self._kind}, cannot be unpickled in this process: {type(exc).__name__}: {exc}. "
                "Expected a value that any process can import and unpickle: pass plain values instead"
            ) from exc


def _payload(kind: str, data: bytes) -> Payload:
    return Payload(None, kind=kind, data=data)


# -- messages to the worker ----------------------------------------------------------------------------


class Collect(NamedTuple):
    """Request for one batch."""

    number: int  # repeated in the Batch that answers this request
    frames: int
    at_random: bool = False  # take random actions instead of the policy's
    returned: tuple[int, ...] = ()  # numbers of buffers that the worker may reuse


class EndEarly(NamedTuple):
    """Request to deliver the batches in progress with the frames that they have."""


class Call(NamedTuple):
    """Call one of the worker's methods."""

    number: int  # repeated in the Answer
    method: str
    arguments: Payload  # a tuple


# -- messages from the worker --------------------------------------------------------------------------


class Ready(NamedTuple):
    """The worker has its environment, its policy and its first weights."""

    shape: tuple[int, ...]  # batch shape of a frame: the environments that step together
    nested: Nested  # the batch dimensions that nested entries have beside these
    whole: bool  # whether a replay buffer gets batches instead of single frames


class NewBuffer(NamedTuple):
    """The worker has allocated shared memory for its batches."""

    buffer: int  # its number
    handle: dict[str, Any]  # how to map it; see aiosync.weights.segment.Segment
    specs: Specs  # the fields of a frame
    frames: int  # how many frames fit
    replaced: tuple[int, ...]  # numbers of buffers that the worker has closed


class Continued(NamedTuple):
    """How the trajectories of a batch are connected with those of the worker's other batches."""

    lengths: dict[int, int]  # number of a trajectory -> how many frames it had before this batch
    cut: list[int]  # trajectories that a reset has ended: there are no more frames of them


class Batch(NamedTuple):
    """A batch is complete."""

    number: int  # of the Collect that this batch answers
    steps: int  # per environment
    buffer: int  # the number of the buffer that has the frames
    order: list[int] | None = None  # places in the buffer in order of time; None: 0, 1, ...
    data: TensorDictBase | None = None  # the frames, if the buffer is not shared with the collector
    continued: Continued = Continued({}, [])


class ErrorReport(NamedTuple):
    """An exception raised in the worker."""

    error: bytes | None  # pickled; None: it cannot be pickled
    kind: str  # the name of its type
    message: str
    trace: str  # its traceback as text

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Return the report of an exception."""
        try:
            data = cloudpickle.dumps(error)
            pickle.loads(data)  # some exceptions can be pickled but not unpickled
        except Exception:  # noqa: BLE001 - an exception's pickle methods may raise anything
            data = None
        return cls(data, type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def exception(self, worker: int) -> BaseException:
        """Return the exception, or a RuntimeError with its message if it cannot be unpickled. It has its
        traceback as the cause, and a note that names the worker."""
        error: BaseException = RuntimeError(f"{self.kind}: {self.message}")
        if self.error is not None:
            with suppress(Exception):  # perhaps only the worker can import its class
                error = pickle.loads(self.error)
        error.__cause__ = RemoteTraceback(self.trace)
        error.add_note(f"(raised by collector worker {worker})")
        return error


class RemoteTraceback(Exception):
    """The worker's traceback, as the cause of the worker's exception that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Answer(NamedTuple):
    """What a call returned or raised."""

    number: int  # of the Call that this answers
    value: Payload | None = None
    error: ErrorReport | None = None  # None: it returned


# -- pipes ---------------------------------------------------------------------------------------------


class CommandPipeClosed(Exception):
    """The other end of the pipe is closed. Not an OSError or EOFError: environments may raise those
    themselves."""


class CommandPipe(ABC):
    """One end of a command pipe: messages, in order, until one end closes. Sending never blocks: unread
    messages are buffered at this end. When the other end is closed, :meth:`receive` raises CommandPipeClosed.
    """

    @abstractmethod
    def send(self, message: object) -> None:
        """Send a message. It is lost if the other end is closed."""

    async def drain(self) -> None:
        """Wait until this end buffers less than its limit. OSError: the other end is closed."""

    async def flush(self) -> None:
        """Wait until all messages are sent, or cannot be."""

    async def report(self, error: Exception) -> None:
        """Send an ErrorReport and wait until it is sent, or cannot be."""
        self.send(ErrorReport.of(error))
        await self.flush()

    @abstractmethod
    async def receive(self) -> Any:
        """Wait for the next message."""

    @abstractmethod
    def close(self) -> None:
        """Close this end; idempotent. Buffered messages are sent as far as the pipe takes them at once."""


_END = object()
"""Sent behind the last message of a LocalCommandPipe."""


@dataclass(eq=False, repr=False)
class LocalCommandPipe(CommandPipe):
    """A pipe between two tasks of one event loop. Messages are passed by reference."""

    _incoming: asyncio.Queue[Any]
    _outgoing: asyncio.Queue[Any]
    _closed: bool = False

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return both ends."""
        one: asyncio.Queue[Any] = asyncio.Queue()
        other: asyncio.Queue[Any] = asyncio.Queue()
        return cls(one, other), cls(other, one)

    def send(self, message: object) -> None:
        if not self._closed:
            self._outgoing.put_nowait(message)

    async def receive(self) -> Any:
        message = await self._incoming.get()
        if message is _END:
            self._incoming.put_nowait(_END)  # the next call finds it too
            raise CommandPipeClosed("the other end is closed")
        return message

    async def receive_all(self) -> list[Any]:
        """Wait for the next message, and return it with all others that have arrived."""
        found = [await self.receive()]
        with suppress(CommandPipeClosed):  # raised again by the next call
            while not self._incoming.empty():
                found.append(await self.receive())
        return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outgoing.put_nowait(_END)
            self._incoming.put_nowait(_END)


def future_of(pending: Any) -> asyncio.Future[Any]:
    """Return the future of a call of a Ray actor."""
    answer: asyncio.Future[Any]
    answer, settle = handover()
    pending.future().add_done_callback(lambda done: settle(done.result))
    return answer


@dataclass(eq=False, repr=False)
class RayCommandPipe(CommandPipe):
    """A pipe to a Ray actor, which has the methods ``deliver`` and ``messages``."""

    _handle: Any
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _received: list[Any] = field(default_factory=list)  # newest first
    _pending: asyncio.Future[Any] | None = None
    _closed: bool = False

    def send(self, message: object) -> None:
        if not self._closed:
            self._handle.deliver.remote(next(self._numbers), cloudpickle.dumps(message))

    async def receive(self) -> Any:
        if not self._received:
            if self._pending is None:  # else a cancelled receive() has made the call
                self._pending = future_of(self._handle.messages.remote())
            await asyncio.wait([self._pending])
            pending, self._pending = self._pending, None
            try:
                self._received = list(reversed(pending.result()))
            except Exception as exc:
                raise CommandPipeClosed("the actor has ended") from exc
        if not self._received:
            raise CommandPipeClosed("the actor has closed the pipe")
        return self._received.pop()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.deliver.remote(next(self._numbers), None)
