"""Joint updates on the receiving side: several models of one process commit together, or none does.

Each model has its own connection, so the parts of one joint update are staged at different times. A table of
the process collects them. The last part to be staged submits one commit for all. It needs the gates of all
models at once and runs their commits one inside the other: if one raises, the commits around it are undone.
If a part fails before, all parts fail.

The commit gates' lock protects the table: the thread that runs a commit has that lock already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

from aiosync.errors import JointUpdateError
from aiosync.protocol.frames import Joint
from aiosync.receiver.commit_gate import CommitGate, submit
from aiosync.receiver.commit_job import LOCK, CommitJob, Outcome

JointKey: TypeAlias = tuple[str, int]
"""A joint update's id, and the worker: several workers may live in one process."""


@dataclass(eq=False, repr=False)
class JointPart:
    """One model's part of a joint update."""

    key: JointKey
    gate: CommitGate
    committing: Callable[[], AbstractContextManager[None]]
    # Resolves when all parts have been committed; raises if none was.
    done: Outcome = field(default_factory=Outcome)
    # Whether it was removed to be staged anew.
    taken_back: bool = False


@dataclass(eq=False, repr=False)
class _Joint:
    """The staged parts of one joint update. The commit is submitted once all have been staged."""

    size: int
    parts: list[JointPart] = field(default_factory=list)
    job: CommitJob | None = None

    def withdraw(self) -> bool:
        """Take the commit back, so that it can be submitted again; false if it has run already."""
        if self.job is not None and not self.job.withdraw():
            return False
        self.job = None
        return True


_joints: dict[JointKey, _Joint] = {}
# The joint updates that were given up last: a part may be staged after that.
_given_up: deque[JointKey] = deque(maxlen=1024)


def join(
    joint: Joint, worker: int, gate: CommitGate, committing: Callable[[], AbstractContextManager[None]]
) -> JointPart:
    """Add a staged part. The last part submits the commit, which runs as soon as the gates are free.

    Raises:
        JointUpdateError: the joint update was given up.
    """
    part = JointPart((joint.id, worker), gate, committing)
    with LOCK:
        check_joint(joint, worker)
        found = _joints.setdefault(part.key, _Joint(joint.size))
        found.parts.append(part)
        if len(found.parts) == found.size:
            gates = list(dict.fromkeys(p.gate for p in found.parts))
            found.job = submit(gates, lambda: _commit(found.parts), lambda done: _concluded(part.key, done))
    return part


def check_joint(joint: Joint | None, worker: int) -> None:
    """Raise JointUpdateError if the joint update, if there is one, was given up."""
    if joint is not None and (joint.id, worker) in _given_up:
        raise JointUpdateError("this joint update was cancelled before it could be committed")


def leave(part: JointPart) -> None:
    """Remove a part that will be staged anew and join again, unless it has been committed.

    Its ``done`` is cancelled.
    """
    with LOCK:
        found = _joints.get(part.key)
        if found is not None and part in found.parts and found.withdraw():
            found.parts.remove(part)
            part.taken_back = True
            part.done.cancel()
            part.done.wake()


def drop_out(part: JointPart) -> None:
    """Remove a part whose model skips the joint update, unless it has been committed.

    Its ``done`` is cancelled, and the other parts fail.
    """
    with LOCK:
        found = _joints.get(part.key)
        if found is not None and part in found.parts and found.withdraw():
            part.done.cancel()
            part.done.wake()
            give_up(*part.key, "one of its models has skipped to a newer version")


def readers_before(part: JointPart) -> list[object] | None:
    """The tickets of the readers that the commit waits for; None: it waits for other parts."""
    with LOCK:
        found = _joints.get(part.key)
        if found is None or found.job is None:
            return None
        return found.job.readers()


def give_up(joint_id: str, worker: int, reason: str) -> None:
    """Fail all parts, also those that are staged later. Nothing happens if all have been committed."""
    key = (joint_id, worker)
    with LOCK:
        found = _joints.get(key)
        if found is not None and not found.withdraw():
            return
        _joints.pop(key, None)
        _given_up.append(key)
        for part in found.parts if found else ():
            if not part.done.done():
                part.done.set_exception(JointUpdateError(reason))
                part.done.wake()


def _commit(parts: list[JointPart]) -> None:
    with ExitStack() as undo:
        for part in parts:
            undo.enter_context(part.committing())


def _concluded(key: JointKey, commit: Outcome) -> None:
    found = _joints.get(key)
    if found is None or commit.cancelled():
        return  # it was withdrawn
    for part in found.parts:
        error = commit.exception()
        if error is None:
            part.done.set_result()
        else:
            part.done.set_exception(error)
        part.done.wake()
    del _joints[key]
