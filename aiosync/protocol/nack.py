"""Convert a worker's exception to a Nack, and a Nack to the sender's error."""

from __future__ import annotations

import itertools
import traceback

import msgspec

from aiosync.errors import (
    AiosyncError,
    JointUpdateError,
    LayoutMismatchError,
    RemoteApplyError,
    WorkerError,
)
from aiosync.protocol.frames import MAX_NAMES, MAX_TEXT, Nack, NackKind
from aiosync.protocol.framing import clean, cut

_MESSAGE = 8 * 1024
"""Most characters of a message that are sent, or kept."""

_TRACEBACK = 32 * 1024
"""Most characters of a traceback that are sent, or kept."""


def nack_of(version: int, error: Exception) -> Nack:
    """Return the Nack for ``error``, with texts cut to fit into a frame. The session sets the round."""
    own = type(error)
    name = own.__qualname__ if own.__module__ == "builtins" else f"{own.__module__}.{own.__qualname__}"
    kind: NackKind = "apply"
    if isinstance(error, JointUpdateError):
        kind = "joint"
    elif isinstance(error, DownstreamError):
        kind = "below"
    nack = Nack(
        round=-1,
        version=version,
        kind=kind,
        error_type=cut(name, MAX_TEXT),
        message=cut(str(error), _MESSAGE),
        traceback=cut("".join(traceback.format_exception(error)), _TRACEBACK, keep_end=True),
    )
    if not isinstance(error, LayoutMismatchError):
        return nack
    missing, unexpected, differing = error.missing, error.unexpected, error.differing
    listed = itertools.islice(differing.items(), MAX_NAMES)
    return msgspec.structs.replace(
        nack,
        kind="layout",
        missing=[_short(name) for name in missing[:MAX_NAMES]],
        unexpected=[_short(name) for name in unexpected[:MAX_NAMES]],
        differing={_short(name): (_short(want), _short(got)) for name, (want, got) in listed},
        omitted=sum(max(0, len(some) - MAX_NAMES) for some in (missing, unexpected, differing)),
    )


def _short(text: str) -> str:
    return cut(text, MAX_TEXT)


class DownstreamError(WorkerError):
    """A relay has an update that some of its own workers do not have."""


def printable(nack: Nack) -> Nack:
    """Return a worker's Nack with texts that are safe to print."""

    def short(text: str) -> str:
        return clean(text, MAX_TEXT)

    return msgspec.structs.replace(
        nack,
        error_type=short(nack.error_type),
        message=clean(nack.message, _MESSAGE, lines=True),
        traceback=clean(nack.traceback, _TRACEBACK, lines=True, keep_end=True),
        missing=[short(name) for name in nack.missing],
        unexpected=[short(name) for name in nack.unexpected],
        differing={short(n): (short(a), short(b)) for n, (a, b) in nack.differing.items()},
    )


def remote_error(worker: int, nack: Nack) -> AiosyncError:
    """Return the sender's error for a worker's Nack."""
    if nack.kind == "layout":
        return LayoutMismatchError(
            missing=nack.missing,
            unexpected=nack.unexpected,
            differing=nack.differing,
            worker=worker,
            omitted=nack.omitted,
        )
    if nack.kind == "joint":
        return JointUpdateError(f"worker {worker} gave up version {nack.version}: {nack.message}")
    return RemoteApplyError(worker, nack.version, nack.error_type, nack.message, nack.traceback)
