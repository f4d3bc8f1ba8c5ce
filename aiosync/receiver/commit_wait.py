"""A receiver's commit that waits: for readers of its model, or for the other parts of its joint update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar, TypeAlias
from weakref import WeakSet

from aiosync.receiver.commit_gate import CommitGate, CommitJob
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

    # Those that may block. They have the event loop of their process to themselves only if there is one.
    _blocking: ClassVar[WeakSet[CommitWait]] = WeakSet()

    def __init__(self, gate: CommitGate) -> None:
        self._gate = gate
        # The commit that waits.
        self.job: Job | None = None
        # The readers that were inside when the first commit after the last one was withdrawn, and still are;
        # None: none was withdrawn.
        self._long_inside: list[object] | None = None
        # Since when a commit has been waiting that could have blocked; None: there is none.
        self._since: float | None = None
        # Seconds that the last such commit waited until it began; 0: it did not wait.
        self.waited = 0.0

    def may_block(self, *, allowed: bool) -> None:
        """Whether :meth:`block` may block the event loop: no code but aiosync's uses it."""
        if allowed:
            self._blocking.add(self)
        else:
            self._blocking.discard(self)

    def block(self, commit: Callable[[], None]) -> bool:
        """Run ``commit`` at the end of the forward passes that run now in other threads, if that is soon.

        Blocks the event loop meanwhile. Returns whether it has run; if not, wait for it with :meth:`wait`.
        Raises what it raises.
        """
        if self not in self._blocking:
            return False
        if self._since is None:
            self._since = time.perf_counter()
        # Not if the commit before has waited for longer: then this one probably does, too.
        alone, soon = len(self._blocking) == 1, self.waited <= _SOON
        return alone and soon and self._gate.commit_soon(commit, _SOON)

    async def wait(self, job: Job, on_wait: Callable[[], None]) -> None:
        """Wait until ``job.done`` is resolved or cancelled. ``on_wait()`` is called first.

        Raises:
            CancelledError: ``job`` was withdrawn, unless it had run before.
        """
        self.job = job
        on_wait()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def wake(_: object) -> None:  # in the thread that has committed
            if not loop.is_closed():
                loop.call_soon_threadsafe(end)

        job.done.add_done_callback(wake)
        try:
            await ended
        except asyncio.CancelledError:
            if isinstance(job, CommitJob):
                job.withdraw()
            else:
                leave(job)
            raise
        finally:
            self.job = None

    def committed(self, begun: float) -> None:
        """A commit has run, which began at this time of ``time.perf_counter``. Called in any thread."""
        self._long_inside = None
        since, self._since = self._since, None
        self.waited = 0.0 if since is None else begun - since

    def overtake(self) -> None:
        """Withdraw the commit that waits: a newer version is there.

        A withdrawn commit lets readers in that waited behind it. If that was done again and again, updates
        that come fast and readers that overlap would keep every commit out. So it is done only as long as a
        reader is inside that was there at the first time: without it, too, that one would hold the commit up.
        """
        job = self.job
        if job is None:
            return
        readers = self._gate.readers() if isinstance(job, CommitJob) else readers_before(job)
        if readers is not None and self._long_inside is not None:
            readers = [reader for reader in readers if reader in self._long_inside]
            if not readers:
                return
        self._long_inside = readers
        self.withdraw()

    def withdraw(self) -> None:
        """Withdraw the commit that waits, if one does and has not run."""
        if isinstance(self.job, CommitJob):
            self.job.withdraw()
        elif self.job is not None:
            drop_out(self.job)
