"""The errors that aiosync raises, as one tree.

::

    AiosyncError
    ├── InvalidArgumentError (ValueError)        an argument, or a combination of arguments, is invalid
    │   ├── OptionConflictError (RuntimeError, TypeError)  options that do not fit together
    │   ├── UnpicklableError (RuntimeError, TypeError)     a value for or from a worker cannot be pickled
    │   ├── UnknownModelError (KeyError, RuntimeError)     no scheme sends this model
    │   ├── UnknownWorkerError                   the scheme does not serve this worker id
    │   ├── WeightSourceError (TypeError)        the given object has no weights
    │   └── InsecureTransportError               others can reach the address; nothing authenticates workers
    ├── UnsupportedTensorError (TypeError)       a weight has no dense bytes to send
    ├── LayoutMismatchError (KeyError)           names, shapes or dtypes of the two sides differ
    ├── ArenaAllocationError (MemoryError)       memory for the weights could not be allocated
    ├── NotInitializedError (RuntimeError)       init_on_sender / init_on_receiver was not called
    ├── NotConnectedError (RuntimeError)         connect was not called, or the endpoint is closed
    │   ├── ForkedEndpointError                  a connected endpoint was used in a forked child
    │   └── WrongEventLoopError                  a connected endpoint was used from another event loop
    ├── AlreadyConnectedError (RuntimeError)     the scheme has a connected endpoint already
    ├── BlockingCallError (RuntimeError)         a blocking twin was called from the loop that serves it
    ├── GatherError (RuntimeError)               the ranks of a sharded trainer could not gather the weights
    ├── SyncTimeoutError (TimeoutError)          a deadline passed; names worker, phase and version
    ├── WorkerError (RuntimeError)               an error at the other end
    │   ├── WorkerLostError                      its process or its connection is gone
    │   ├── RemoteApplyError                     it refused the update; has its traceback
    │   └── JointUpdateError                     it dropped an update: another model's part failed
    └── ProtocolError (RuntimeError)             the peer broke the protocol
        ├── FrameError                           a frame is truncated, corrupted or too large
        └── HandshakeError                       one side refused the other
            ├── SenderFullError                  the sender has no room for the worker at present
            └── RelayRingError                   a relay would receive its own updates

Each error has the values in its message as attributes. An error of a ``send`` that reached some workers has
the :class:`~aiosync.SendReport` of that send as its ``report``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from aiosync._listing import listed

if TYPE_CHECKING:
    from aiosync.reports import SendReport

__all__ = [
    "AiosyncError",
    "AlreadyConnectedError",
    "ArenaAllocationError",
    "BlockingCallError",
    "ForkedEndpointError",
    "FrameError",
    "GatherError",
    "HandshakeError",
    "InsecureTransportError",
    "InvalidArgumentError",
    "JointUpdateError",
    "LayoutMismatchError",
    "NotConnectedError",
    "NotInitializedError",
    "OptionConflictError",
    "Phase",
    "ProtocolError",
    "RelayRingError",
    "RemoteApplyError",
    "SenderFullError",
    "SyncTimeoutError",
    "UnknownModelError",
    "UnknownWorkerError",
    "UnpicklableError",
    "UnsupportedTensorError",
    "WeightSourceError",
    "WorkerError",
    "WorkerLostError",
    "WrongEventLoopError",
]

Phase: TypeAlias = Literal["connect", "stage", "commit", "ack", "pin", "receive", "close"]


class AiosyncError(Exception):
    """The base class of all errors of aiosync.

    Attributes:
        report: the report of the ``send`` that failed; None: the error is not of a ``send``.
    """

    report: SendReport | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # The subclasses' __init__ takes other arguments than the message.
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(cls: type[AiosyncError], args: tuple[object, ...], state: dict[str, object]) -> AiosyncError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgumentError(AiosyncError, ValueError):
    """An argument, or a combination of arguments, is invalid."""


class WeightSourceError(InvalidArgumentError, TypeError):
    """The object given as weights has no weights."""


class OptionConflictError(InvalidArgumentError, RuntimeError, TypeError):
    """Options of a collector do not fit together."""


class UnpicklableError(InvalidArgumentError, RuntimeError, TypeError):
    """What a collector sends to a worker, or a worker answers, cannot be pickled or unpickled."""


class UnknownModelError(InvalidArgumentError, KeyError, RuntimeError):
    """A collector has no scheme that sends this model.

    Attributes:
        unknown: the given model ids that no scheme sends.
        known: the model ids of the collector's schemes.
    """

    def __init__(self, unknown: Sequence[str], known: Sequence[str], hint: str = "") -> None:
        self.unknown = tuple(unknown)
        self.known = tuple(known)
        expected = f"some of {', '.join(known)}" if known else "none: it has no schemes"
        tail = f"; {hint}" if hint else ""
        super().__init__(
            f"{', '.join(unknown)}: this collector has no scheme for such a model; expected {expected}{tail}"
        )

    # KeyError shows the repr of its argument, which would quote the sentence.
    def __str__(self) -> str:
        return str(self.args[0])


class UnknownWorkerError(InvalidArgumentError):
    """The scheme does not serve this worker id.

    Attributes:
        worker: the given id.
        known: the ids that the scheme serves.
    """

    def __init__(self, worker: object, known: Iterable[object]) -> None:
        self.worker = worker
        self.known = tuple(sorted(known, key=lambda w: (w, "") if isinstance(w, int) else (-1, str(w))))
        super().__init__(f"unknown worker {worker!r}: this scheme serves workers [{listed(self.known)}]")


class InsecureTransportError(InvalidArgumentError):
    """A sender would listen where others can connect, and nothing authenticates its workers."""


class UnsupportedTensorError(AiosyncError, TypeError):
    """A weight has no dense bytes to send: it is sparse, quantised, or not a tensor, for example.

    Attributes:
        name: the dotted name of the entry.
        reason: what the entry is, and what to do instead.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"weight {name!r} cannot be sent: {reason}")


DIGEST = " of digest "
"""In a text of ``LayoutMismatchError.differing``, precedes the digest of an entry that is not sent."""

_OTHER_BASE = (
    "entries with a digest are not sent (peft='adapter'), and the two base models differ in them: load the "
    "same base on both sides, in the same dtype or with cast=, or send all entries with peft='as_is'"
)
_OTHER_PEFT = (
    "if one of the two models has adapters (PEFT), the sender's option peft= says how they are sent: "
    "'merged', the default, to models without adapters; 'as_is' or 'adapter' to models with the same adapters"
)
_OF_PEFT = frozenset(
    ("base_model", "base_layer", "original_module", "modules_to_save", "prompt_encoder", "lora_A", "lora_B")
)
"""Parts of the names in models with adapters."""


class LayoutMismatchError(AiosyncError, KeyError):
    """The weights of one side do not fit the other side's.

    Attributes:
        missing: names that were expected and not given.
        unexpected: names that were given and not expected.
        differing: name -> (expected, got), each as text such as ``float32[4, 2]``.
        worker: the worker that reported the mismatch; None: this process found it.
        omitted: how many more entries the worker found and did not list.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        differing: Mapping[str, tuple[str, str]] | None = None,
        worker: int | None = None,
        omitted: int = 0,
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.differing = dict(differing or {})
        self.worker = worker
        self.omitted = omitted
        super().__init__(self._describe())

    def _describe(self) -> str:
        who = "" if self.worker is None else f"worker {self.worker}: "
        parts = [f"{who}the weights do not fit {'its model' if who else 'the layout'}"]
        if self.missing:
            parts.append(f"missing: {_shortened(self.missing)}")
        if self.unexpected:
            parts.append(f"unexpected: {_shortened(self.unexpected)}")
        if self.differing:
            rows = [f"{n} expected {want}, got {got}" for n, (want, got) in self.differing.items()]
            parts.append(f"differing: {_shortened(rows)}")
        if self.omitted:
            parts.append(f"and {self.omitted} further entries, which the worker did not list")
        if any(DIGEST in got for _, got in self.differing.values()):
            parts.append(_OTHER_BASE)
        elif any(not _OF_PEFT.isdisjoint(name.split(".")) for name in (*self.missing, *self.unexpected)):
            parts.append(_OTHER_PEFT)
        return "; ".join(parts)

    # KeyError shows the repr of its argument, which would quote the sentence.
    def __str__(self) -> str:
        return str(self.args[0])


def _shortened(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class ArenaAllocationError(MemoryError, AiosyncError):  # MemoryError first: unpickling calls its __new__
    """Memory for the weights could not be allocated.

    Attributes:
        nbytes: the requested size in bytes.
    """

    def __init__(self, nbytes: int, reason: str) -> None:
        self.nbytes = nbytes
        super().__init__(f"could not allocate {nbytes} bytes for the weights: {reason}")


class NotInitializedError(AiosyncError, RuntimeError):
    """``init_on_sender`` or ``init_on_receiver`` has not been called."""


class NotConnectedError(AiosyncError, RuntimeError):
    """``connect`` has not been called, or the endpoint has been closed."""


class ForkedEndpointError(NotConnectedError):
    """A connected endpoint was used in a forked child. It belongs to the process that connected it."""


class WrongEventLoopError(NotConnectedError):
    """A connected endpoint was used from another event loop than that of its ``connect``."""


class AlreadyConnectedError(AiosyncError, RuntimeError):
    """The scheme has a connected endpoint already, which the call would replace."""


class BlockingCallError(AiosyncError, RuntimeError):
    """A blocking twin was called from the event loop that has to serve the call."""


class SyncTimeoutError(AiosyncError, TimeoutError):
    """A deadline passed.

    Attributes:
        phase: the phase that did not finish: connect, stage, commit, ack, pin, receive or close.
        workers: the workers that did not answer in time, as a sorted tuple.
        version: the version that was being sent; None: none.
        seconds: the time limit in seconds.
        hint: a possible cause; empty: none.
    """

    def __init__(
        self,
        phase: Phase,
        *,
        seconds: float,
        workers: Iterable[int] = (),
        version: int | None = None,
        hint: str = "",
    ) -> None:
        self.phase = phase
        self.workers = tuple(sorted(workers))
        self.version = version
        self.seconds = seconds
        self.hint = hint
        who = f" by {_named(self.workers)}" if self.workers else ""
        what = f" of version {version}" if version is not None else ""
        tail = f"; {hint}" if hint else ""
        super().__init__(f"{phase}{what} not finished{who} within {seconds:g} s{tail}")

    @property
    def worker(self) -> int | None:
        """The first worker that did not answer; None: no worker is named."""
        return self.workers[0] if self.workers else None


class WorkerError(AiosyncError, RuntimeError):
    """An error at the other end of a connection."""


class WorkerLostError(WorkerError):
    """A worker's process or connection is gone; on a receiver, the sender's.

    Attributes:
        workers: the workers that are gone, as a sorted tuple; empty: the sender is gone.
        reason: how the loss was detected.
    """

    def __init__(self, workers: Iterable[int], reason: str) -> None:
        self.workers = tuple(sorted(workers))
        self.reason = reason
        who = _named(self.workers) if self.workers else "the sender"
        super().__init__(f"{who} lost: {reason}")

    @property
    def worker(self) -> int | None:
        """The first worker that is gone; None: the sender is gone."""
        return self.workers[0] if self.workers else None


@dataclass(eq=False, repr=False)
class RemoteApplyError(WorkerError):
    """A worker could not apply an update. It keeps its previous version unchanged.

    Attributes:
        worker: the worker's index.
        version: the refused version; -1: the failed call was not an update.
        remote_type: qualified name of the exception's type at the worker.
        remote_message: the exception's message at the worker.
        remote_traceback: the traceback at the worker, as text.
    """

    worker: int
    version: int
    remote_type: str
    remote_message: str
    remote_traceback: str

    def __post_init__(self) -> None:
        version = self.version
        what = "could not do what it was asked" if version < 0 else f"could not apply version {version}"
        trace = self.remote_traceback
        super().__init__(
            f"worker {self.worker} {what}: {self.remote_type}: {self.remote_message}"
            + (f"\n--- traceback at worker {self.worker} ---\n{trace}" if trace else "")
        )


class JointUpdateError(WorkerError):
    """A model's part of a joint update was dropped because another model's part failed."""


class GatherError(AiosyncError, RuntimeError):
    """The ranks of a sharded trainer could not gather the weights."""


class ProtocolError(AiosyncError, RuntimeError):
    """The peer broke the protocol."""


class FrameError(ProtocolError):
    """A frame is truncated, corrupted, of an unknown kind or too large."""


class HandshakeError(ProtocolError):
    """One side refused the other when the connection was made."""


class SenderFullError(HandshakeError):
    """The sender has no room for this worker at present. Workers retry until their deadline."""


class RelayRingError(HandshakeError):
    """A relay would follow a sender that receives, over other relays, from the relay itself."""


def _named(workers: Sequence[int]) -> str:
    return f"worker {listed(workers)}" if len(workers) == 1 else f"workers {listed(workers)}"
