"""When a thread that has read a model lets another thread run."""

from __future__ import annotations

from aiosync._processors import yield_processor
from aiosync.receiver.commit_gate import LOCK, CommitGate
from aiosync.transfer.yield_request import HeededRequest


def give_way(request: HeededRequest, *, committed: bool) -> None:
    """Let another thread run: one that acknowledges what was ``committed``, or one that a send waits for.

    A thread that computes calls this after each reading of a model. Nothing happens if it is inside of
    another reading, which a commit may wait for.
    """
    if (committed or request.is_due()) and not _reads_on():
        if committed:
            yield_processor()
        else:
            request.heed()


def _reads_on() -> bool:
    """Whether the calling thread reads any model."""
    with LOCK:
        return any(gate.has_own() for gate in CommitGate.blocking)
