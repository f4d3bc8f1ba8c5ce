"""A worker's refusal: from its exception to the wire, and from there to the sender's error."""

from __future__ import annotations

import traceback

from aiosync.errors import (
    AiosyncError,
    JointUpdateError,
    LayoutMismatchError,
    RemoteApplyError,
    WorkerError,
)
from aiosync.protocol.frames import Nack

__all__ = ["BelowError", "nack_of", "remote_error"]


def nack_of(version: int, error: Exception) -> Nack:
    """What to tell the sender about ``error``; the session fills in the round."""
    kind = type(error)
    nack = Nack(
        round=-1,
        version=version,
        kind=_kind_of(error),
        error_type=kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}",
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
    if not isinstance(error, LayoutMismatchError):
        return nack
    return Nack(
        round=-1,
        version=version,
        kind="layout",
        error_type=nack.error_type,
        message=nack.message,
        missing=list(error.missing),
        unexpected=list(error.unexpected),
        differing=error.differing,
    )


class BelowError(WorkerError):
    """A relay has the update, and some of its own workers have not."""


def _kind_of(error: Exception) -> str:
    if isinstance(error, JointUpdateError):
        return "joint"
    return "below" if isinstance(error, BelowError) else "apply"


def remote_error(worker: int, nack: Nack) -> AiosyncError:
    """The error that a worker's refusal stands for here."""
    if nack.kind == "layout":
        return LayoutMismatchError(
            missing=nack.missing,
            unexpected=nack.unexpected,
            differing=nack.differing,
            worker=worker,
        )
    if nack.kind == "joint":
        return JointUpdateError(f"worker {worker} gave up version {nack.version}: {nack.message}")
    return RemoteApplyError(worker, nack.version, nack.error_type, nack.message, nack.traceback)
