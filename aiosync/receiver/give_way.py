"""When a thread that has read a model lets another thread run."""

from __future__ import annotations

import threading

from aiosync._processors import yield_processor
from aiosync.receiver.commit_gate import CommitGate
from aiosync.receiver.commit_job import LOCK
from aiosync.transfer.yield_request import HeededRequest


class _Thread(threading.local):
    # Whether it has committed and let no other thread run since.
    owes: bool = False


_thread = _Thread()


def give_way(request: HeededRequest, *, committed: bool) -> None:
    """Let another thread run: one that acknowledges what was ``committed``, or one that a send waits for.

    A thread that computes calls this after each reading of a model. If it is inside of another reading, which
    a commit may wait for, it lets no other thread run before that has ended.
    """
    _thread.owes |= committed
    if not (_thread.owes or request.is_due()) or _reads_on():
        return
    if _thread.owes:
        _thread.owes = False
        yield_processor()
    else:
        request.heed()


def _reads_on() -> bool:
    """Whether the calling thread reads any model."""
    with LOCK:
        return any(gate.has_own() for gate in CommitGate.blocking)
