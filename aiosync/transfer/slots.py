"""Versions in the sender's slots."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from aiosync.protocol.frames import Joint, Update
from aiosync.weights.arena import Slot
from aiosync.weights.block_copy import Filling

__all__ = ["JointRound", "SlotVersion"]


class JointRound:
    """What the parts of one joint update share on the sender.

    Every version published in it refers to this for as long as the version can be fetched, also after the
    call has returned: a worker that fetches one part late still commits it with the others.

    Args:
        mark: goes to the workers with each part.
        abort: takes a worker, and aborts the parts that it has been offered.
    """

    def __init__(self, mark: Joint, abort: Callable[[int], None]) -> None:
        self.mark = mark
        self._abort = abort
        self._called_off: set[int] = set()

    def call_off(self, worker: int) -> None:
        """This worker does not get all parts: the parts that it has, or will be offered, are aborted."""
        self._called_off.add(worker)
        self._abort(worker)

    def is_called_off(self, worker: int) -> bool:
        """Whether this worker is to abort its parts."""
        return worker in self._called_off


class SlotVersion(msgspec.Struct, eq=False):
    """One version in its slot.

    Attributes:
        joint: what it is a part of.
        copying: set if it may not have been copied to its end yet.
        offered: the frame that a worker was last offered it with.
    """

    slot: Slot
    round: int
    version: int
    joint: JointRound | None = None
    copying: Filling | None = None
    offered: Update | None = None
