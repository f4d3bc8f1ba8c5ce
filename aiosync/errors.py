"""Every error that aiosync raises on purpose, as one tree.

::

    AiosyncError
    ├── InvalidArgumentError (ValueError)        an argument, or a mix of arguments, that cannot work
    │   ├── UnknownWorkerError                   a worker id that this scheme does not serve
    │   ├── WeightSourceError (TypeError)        what was given as weights has none
    │   └── InsecureTransportError               an address that others can reach, and no authentication
    ├── UnsupportedTensorError (TypeError)       a weight that has no dense bytes to send
    ├── LayoutMismatchError (KeyError)           names, shapes or dtypes differ between two sides
    ├── ArenaAllocationError (MemoryError)       the memory for the weights could not be taken
    ├── NotInitializedError (RuntimeError)       init_on_sender / init_on_receiver is missing
    ├── NotConnectedError (RuntimeError)         connect is missing, or the endpoint is closed
    │   ├── ForkedEndpointError                  a live endpoint met in a forked child
    │   └── WrongEventLoopError                  a live endpoint used from another event loop
    ├── AlreadyConnectedError (RuntimeError)     connect, or an init, where there is a live endpoint
    ├── BlockingCallError (RuntimeError)         a blocking twin called from the loop that serves it
    ├── GatherError (RuntimeError)               the ranks of a sharded trainer are not together
    ├── SyncTimeoutError (TimeoutError)          a deadline passed; names worker, phase and version
    ├── WorkerError (RuntimeError)               something went wrong at the other end
    │   ├── WorkerLostError                      its process or its channel is gone
    │   ├── RemoteApplyError                     it refused the update; carries its traceback
    │   └── JointUpdateError                     it gave up an update because a sibling model's failed
    └── ProtocolError (RuntimeError)             bytes on a channel that are not our protocol
        ├── FrameError                           a frame that is truncated, corrupted or too large
        └── HandshakeError                       the peer was refused, or refused us
            ├── SenderFullError                  for the time being: the sender has no room for the worker
            └── RelayRingError                   a relay would receive what it has sent itself

Each carries in attributes what its message says in words. An error raised by a ``send`` that reached
some workers has the :class:`~aiosync.SendReport` of that send as its ``report``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

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
    "Phase",
    "ProtocolError",
    "RelayRingError",
    "RemoteApplyError",
    "SenderFullError",
    "SyncTimeoutError",
    "UnknownWorkerError",
    "UnsupportedTensorError",
    "WeightSourceError",
    "WorkerError",
    "WorkerLostError",
    "WrongEventLoopError",
]

Phase: TypeAlias = Literal["connect", "stage", "commit", "ack", "pin", "receive", "close"]


class AiosyncError(Exception):
    """Root of the tree.

    Attributes:
        report: what a failed ``send`` did reach, or None where no send was under way.
    """

    report: SendReport | None = None


class InvalidArgumentError(AiosyncError, ValueError):
    """An argument, or a mix of arguments, that cannot work."""


class WeightSourceError(InvalidArgumentError, TypeError):
    """What was given as weights is of a kind that has none."""


class UnknownWorkerError(InvalidArgumentError):
    """A worker id that this scheme does not serve.

    Attributes:
        worker: the id that was given.
        known: the ids that would have been accepted.
    """

    def __init__(self, worker: object, known: Iterable[object]) -> None:
        self.worker = worker
        self.known = tuple(sorted(known, key=lambda w: (w, "") if isinstance(w, int) else (-1, str(w))))
        super().__init__(f"unknown worker {worker!r}: this scheme serves workers {list(self.known)}")


class InsecureTransportError(InvalidArgumentError):
    """A sender was to listen where others can connect, without anything to tell workers from strangers."""


class UnsupportedTensorError(AiosyncError, TypeError):
    """A weight that has no dense bytes to send (sparse, quantised, not a tensor).

    Attributes:
        name: the dotted name of the entry.
        reason: what it is, and what to do instead.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"weight {name!r} cannot be sent: {reason}")


class LayoutMismatchError(AiosyncError, KeyError):
    """The weights of one side do not fit the other side's.

    Attributes:
        missing: names expected and not given.
        unexpected: names given and not expected.
        differing: name -> (expected, got), each as text such as ``float32[4, 2]``.
        worker: the worker that found it, or None where the sender found it itself.
        omitted: how many more entries there are that the worker did not list.
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
        where = (
            "the weights do not fit the layout"
            if self.worker is None
            else (f"worker {self.worker}: the weights do not fit its model")
        )
        parts = [
            f"{label}: {_shortened(names)}"
            for label, names in (("missing", self.missing), ("unexpected", self.unexpected))
            if names
        ]
        if self.differing:
            rows = [f"{n} expected {want}, got {got}" for n, (want, got) in self.differing.items()]
            parts.append(f"differing: {_shortened(rows)}")
        if self.omitted:
            parts.append(f"and {self.omitted} further entries, which the worker did not list")
        return f"{where}; " + "; ".join(parts)

    # KeyError shows its argument's repr, which turns a sentence into a quoted string.
    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_layout_mismatch,
            (self.missing, self.unexpected, self.differing, self.worker, self.omitted),
        )


def _rebuild_layout_mismatch(
    missing: Sequence[str],
    unexpected: Sequence[str],
    differing: Mapping[str, tuple[str, str]],
    worker: int | None,
    omitted: int,
) -> LayoutMismatchError:
    return LayoutMismatchError(
        missing=missing, unexpected=unexpected, differing=differing, worker=worker, omitted=omitted
    )


def _shortened(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class ArenaAllocationError(AiosyncError, MemoryError):
    """The memory for the weights could not be taken.

    Attributes:
        nbytes: how many bytes were asked for.
    """

    def __init__(self, nbytes: int, reason: str) -> None:
        self.nbytes = nbytes
        super().__init__(f"could not take {nbytes} bytes for the weights: {reason}")


class NotInitializedError(AiosyncError, RuntimeError):
    """``init_on_sender`` or ``init_on_receiver`` has not been called."""


class NotConnectedError(AiosyncError, RuntimeError):
    """``connect`` has not been called, or the endpoint has been closed."""


class ForkedEndpointError(NotConnectedError):
    """A live endpoint was used in a forked child; it belongs to the process that connected it."""


class WrongEventLoopError(NotConnectedError):
    """A live endpoint was used from another event loop than the one that ``connect`` ran on."""


class AlreadyConnectedError(AiosyncError, RuntimeError):
    """The scheme has a live endpoint already, which the call would have replaced."""


class BlockingCallError(AiosyncError, RuntimeError):
    """A blocking twin was called from the event loop that would have to serve the call."""


class SyncTimeoutError(AiosyncError, TimeoutError):
    """A deadline passed.

    Attributes:
        phase: what was being waited for: connect, stage, commit, ack, pin, receive or close.
        workers: the workers that did not answer in time, as a sorted tuple.
        version: the version that was on its way, or None where none was.
        seconds: the deadline that passed.
        hint: what may be behind it, or "".
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
        """The first worker that did not answer, or None."""
        return self.workers[0] if self.workers else None


class WorkerError(AiosyncError, RuntimeError):
    """Something went wrong at the other end."""


class WorkerLostError(WorkerError):
    """A worker's process or channel is gone (or, on a receiver, the sender's).

    Attributes:
        workers: the workers that are gone, as a sorted tuple; empty where the sender is.
        reason: how it was noticed.
    """

    def __init__(self, workers: Iterable[int], reason: str) -> None:
        self.workers = tuple(sorted(workers))
        self.reason = reason
        who = _named(self.workers) if self.workers else "the sender"
        super().__init__(f"{who} lost: {reason}")

    @property
    def worker(self) -> int | None:
        """The first worker that is gone, or None."""
        return self.workers[0] if self.workers else None


class RemoteApplyError(WorkerError):
    """A worker could not apply an update; it keeps the version it had, whole.

    Attributes:
        worker: the worker that refused.
        version: the version it refused; -1 where it was not a version that was asked of it.
        remote_type: the exception's type there, by its qualified name.
        remote_message: the exception's text there.
        remote_traceback: the traceback's text there.
    """

    def __init__(
        self,
        worker: int,
        version: int,
        remote_type: str,
        remote_message: str,
        remote_traceback: str,
    ) -> None:
        self.worker = worker
        self.version = version
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        what = "could not do what it was asked" if version < 0 else f"could not apply version {version}"
        super().__init__(
            f"worker {worker} {what}: {remote_type}: {remote_message}"
            + (f"\n--- traceback at worker {worker} ---\n{remote_traceback}" if remote_traceback else "")
        )


class JointUpdateError(WorkerError):
    """A model's part of a joint update was given up because another model's part failed."""


class GatherError(AiosyncError, RuntimeError):
    """The ranks of a sharded trainer could not bring the weights together."""


class ProtocolError(AiosyncError, RuntimeError):
    """Bytes on a channel that are not our protocol."""


class FrameError(ProtocolError):
    """A frame that is truncated, corrupted, of an unknown kind or too large."""


class HandshakeError(ProtocolError):
    """The peer was refused, or refused us, when the connection was made."""


class SenderFullError(HandshakeError):
    """The sender has no room for this worker now. ``connect`` and a lost worker try again until their
    deadline."""


class RelayRingError(HandshakeError):
    """A relay was about to follow a sender that, over other relays, follows the relay itself."""


def _named(workers: Sequence[int]) -> str:
    listed = ", ".join(str(w) for w in workers)
    return f"worker {listed}" if len(workers) == 1 else f"workers {listed}"
