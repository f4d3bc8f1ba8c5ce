"""Joint updates on the receiving side: several models of one process commit together, or none does.

Each model has its own connection, and its part arrives when it arrives. The parts of one joint update
meet here, in a table of the process. The last to be staged submits one commit for all, which needs the
gates of all models at once and runs their commits one inside the other: whichever raises takes back
those around it. A part that fails before takes the others with it.

The commit gates' lock protects the table: the thread that runs a commit holds that lock already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

from aiosync.errors import JointUpdateError
from aiosync.protocol.frames import Joint
from aiosync.receiver.commit_gate import LOCK, CommitGate, CommitJob, submit

__all__ = ["JointKey", "JointPart", "give_up", "join", "leave"]

JointKey: TypeAlias = tuple[str, int]
"""A joint update's id, and the worker: several workers may live in one process."""

Committing = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class JointPart:
    """One model's part.

    Attributes:
        done: resolves when all parts have been committed; raises if none was.
    """

    gate: CommitGate
    committing: Committing
    done: Future[None] = field(default_factory=Future)


@dataclass(eq=False)
class _Meeting:
    size: int
    parts: list[JointPart] = field(default_factory=list)
    job: CommitJob | None = None


_meetings: dict[JointKey, _Meeting] = {}
# A part may be given up before it is staged; that has to be known when it comes to join.
_given_up: deque[JointKey] = deque(maxlen=1024)


def join(joint: Joint, worker: int, gate: CommitGate, committing: Committing) -> JointPart:
    """Add a staged part; the last one makes the commit happen as soon as the gates are free.

    Raises:
        JointUpdateError: it has been given up already.
    """
    part = JointPart(gate, committing)
    key = (joint.id, worker)
    with LOCK:
        if key in _given_up:
            raise JointUpdateError("this joint update was called off before it could be committed")
        meeting = _meetings.setdefault(key, _Meeting(joint.size))
        meeting.parts.append(part)
        if len(meeting.parts) < meeting.size:
            return part
        gates = list(dict.fromkeys(p.gate for p in meeting.parts))
        meeting.job = submit(gates, lambda: _commit(meeting.parts))
        meeting.job.done.add_done_callback(lambda job: _concluded(key, job))
    return part


def leave(joint: Joint, worker: int, part: JointPart) -> None:
    """Take a part back that will be joined again; nothing happens if it has been committed."""
    with LOCK:
        meeting = _meetings.get((joint.id, worker))
        if meeting is None or (meeting.job is not None and not meeting.job.withdraw()):
            return
        meeting.job = None
        meeting.parts.remove(part)


def drop_out(part: JointPart) -> None:
    """This part's model goes on without the joint update, unless it has been committed: its ``done`` is
    cancelled, and the other parts fail."""
    with LOCK:
        for (joint_id, worker), meeting in _meetings.items():
            if part in meeting.parts:
                if meeting.job is not None and not meeting.job.withdraw():
                    return
                part.done.cancel()
                give_up(joint_id, worker, "one of its models has gone on to a newer version")
                return


def give_up(joint_id: str, worker: int, reason: str) -> None:
    """Fail every part that has not been committed; nothing happens if all have."""
    key = (joint_id, worker)
    with LOCK:
        meeting = _meetings.get(key)
        if meeting is None:
            _given_up.append(key)
            return
        if meeting.job is not None and not meeting.job.withdraw():
            return
        del _meetings[key]
        _given_up.append(key)
        for part in meeting.parts:
            if not part.done.done():
                part.done.set_exception(JointUpdateError(reason))


def _commit(parts: list[JointPart]) -> None:
    with ExitStack() as undo:
        for part in parts:
            undo.enter_context(part.committing())


def _concluded(key: JointKey, job: Future[None]) -> None:
    if job.cancelled():
        return  # given up; the caller that gave it up has cancelled the parts
    with LOCK:
        meeting = _meetings.pop(key, None)
    error = job.exception()
    for part in meeting.parts if meeting else ():
        if error is None:
            part.done.set_result(None)
        else:
            part.done.set_exception(error)
