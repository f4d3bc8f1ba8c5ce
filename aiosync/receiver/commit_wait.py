"""A receiver's commit that waits: for readers of its model, or for the other parts of its joint update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from aiosync.receiver.commit_gate import CommitGate
from aiosync.receiver.commit_job import LOCK, CommitJob
from aiosync.receiver.joint_commit import JointPart, drop_out, leave, readers_before

Job: TypeAlias = CommitJob | JointPart
"""What commits: one update, or one part of a joint update."""

_SOON = 0.001
"""Seconds that the event loop's thread itself waits for a forward pass to end. To go on with the event loop
and to be woken by it takes longer than most passes of a small policy."""


class CommitWait:
    """At most one commit at a time waits here. Used on the event loop, except :meth:`committed`.

    States: idle → waiting → idle. A wait ends when the commit has run, when :meth:`overtake` withdraws it, or
    when its caller is cancelled, which withdraws it too. :meth:`block` waits in no state: it does not await.
    """

    def __init__(self, gate: CommitGate) -> None:
        self._gate = gate
        # The commit that waits.
        self.job: Job | None = None
        # The readers that were inside when the first commit after the last one was withdrawn, and still are;
        # None: none was withdrawn.
        self._long_inside: list[object] | None = None
        # Whether the last update was committed soon: at once, or after forward passes that were short.
        self._soon = True

    def allow_blocking(self, allowed: bool) -> None:
        """Whether :meth:`block` may block the event loop: it is aiosync's own."""
        with LOCK:
            if allowed:
                CommitGate.blocking.add(self._gate)
            else:
                CommitGate.blocking.discard(self._gate)

    def block(self, commit: Callable[[], None]) -> None:
        """Run ``commit`` at the end of the forward passes that run now in other threads, if that is soon.

        Blocks the event loop meanwhile, if the gate may do that and no other one may. If it has not run then,
        wait for it with :meth:`wait`. Raises what it raises.
        """
        with LOCK:
            alone = list(CommitGate.blocking) == [self._gate]
        if alone:
            soon, self._soon = self._soon, False  # an update that is overtaken was not committed soon
            if soon:
                self._gate.commit_soon(commit, _SOON)

    async def wait(self, job: Job, on_wait: Callable[[], None]) -> None:
        """Wait until ``job.done`` is resolved or cancelled. ``on_wait()`` is called first.

        Raises:
            CancelledError: ``job`` was withdrawn, unless it had run before.
        """
        self.job = job
        on_wait()
        try:
            await job.done.wait()
        except asyncio.CancelledError:
            self.take_back()
            raise
        finally:
            self.job = None

    def committed(self, waited: float) -> None:
        """A commit has run, which was held up for so many seconds. Called in any thread."""
        self._long_inside = None
        self._soon = waited <= _SOON

    def overtake(self) -> None:
        """Withdraw the commit that waits: a newer version is there.

        A withdrawn commit lets readers in that waited behind it. If that was done again and again, updates
        that come fast and readers that overlap would keep every commit out. So it is done only as long as a
        reader is inside that was there at the first time: without it, too, that one would hold the commit up.
        """
        job = self.job
        if job is None:
            return
        readers = job.readers() if isinstance(job, CommitJob) else readers_before(job)
        if readers is not None and self._long_inside is not None:
            readers = [reader for reader in readers if reader in self._long_inside]
            if not readers:
                return
        self._long_inside = readers
        self.withdraw()

    def take_back(self) -> None:
        """Withdraw the commit that waits, for its update to be staged and committed anew."""
        if isinstance(self.job, CommitJob):
            self.job.taken_back |= self.job.withdraw()
        elif self.job is not None:
            leave(self.job)

    def withdraw(self) -> None:
        """Withdraw the commit that waits, if one does and has not run. Its update will not be committed."""
        if isinstance(self.job, CommitJob):
            self.job.withdraw()
        elif self.job is not None:
            drop_out(self.job)
