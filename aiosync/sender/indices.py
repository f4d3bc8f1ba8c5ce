"""Which worker gets which index."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiosync.errors import InvalidArgumentError
from aiosync.protocol.frames import Hello
from aiosync.protocol.sender_session import SenderSession
from aiosync.sender.tickets import Tickets
from aiosync.sender.worker_group import WorkerGroup

__all__ = ["WorkerIndices"]


class WorkerIndices:
    """The indices that a sender gives out.

    Args:
        elastic: whether a worker may have any index.

    Attributes:
        groups: the groups that workers are taken into.
        tickets: proves that an index is a worker's own.
    """

    def __init__(self, *, elastic: bool) -> None:
        self.groups: Sequence[WorkerGroup] = ()
        self.tickets = Tickets()
        self._elastic = elastic
        # Workers that a caller is adding, and the group that each will be in.
        self._expected: dict[int, WorkerGroup] = {}

    def known(self) -> set[int]:
        """The indices that this sender gives out, also those of workers that were dropped."""
        return {worker for group in self.groups for worker in group.workers} | self._expected.keys()

    def group_of(self, worker: int) -> WorkerGroup | None:
        """The group for a worker with this index; None if the index is not given out."""
        group = next((g for g in self.groups if self._elastic or worker in g.workers), None)
        return group or self._expected.get(worker)

    def index_for(self, hello: Hello, session: SenderSession) -> int:
        """The index of a worker: the one that it asks for, or one that is free; -1 if none is free."""
        if hello.worker >= 0:
            return hello.worker
        taken = self.tickets.taken()
        known = set(range(len(taken) + 1)) if self._elastic else self.known()
        before = hello.before
        mine = before >= 0 and self.tickets.may_take(before, session.claims)
        if mine and (self._elastic or before in known):
            return before
        return min(known - taken, default=hello.worker)

    def expect(self, worker: int | None, connected: Collection[int], *, may_be_new: bool) -> int:
        """Give out an index for a further worker, or again for a worker that was lost or dropped.

        Args:
            worker: the index; None: the next one.
            connected: the workers that are connected.
            may_be_new: whether the index may be a new one.

        Returns:
            The index. Call :meth:`expect_no_more` once the worker is there, or will not come.

        Raises:
            InvalidArgumentError: that worker is connected, or a new one would have no weights.
        """
        known = self.known()
        number = max(known, default=-1) + 1 if worker is None else worker
        if number in connected or number in self._expected:
            raise InvalidArgumentError(f"worker {number} is connected, or about to be: give another index")
        if number not in known:
            if len(self.groups) > 1 or not may_be_new:
                raise InvalidArgumentError(
                    f"worker {number} would have no weights of its own: only workers that init_on_sender() "
                    f"was given can come again: {sorted(known)}"
                )
            self._expected[number] = self.groups[0]
        return number

    def expect_no_more(self, worker: int) -> None:
        """The worker is there, or will not come."""
        self._expected.pop(worker, None)
