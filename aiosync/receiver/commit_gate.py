"""The commit gate: a commit runs only while no reader uses the model.

Readers come through ``pinned()`` or through a forward pass of a guarded model (the blocking twins, where
another thread applies). The reader that brings the number of readers to zero runs the waiting commit in
its own thread: the event loop's thread at the end of a ``pinned()`` block, the worker's thread at the end
of a forward pass. While a commit waits new readers wait too, so that it cannot starve. A reader that holds
the commit up itself passes, since it would wait for itself: a forward pass inside a pinned block, or the
second of two models that commit jointly. That is a thread, or a ``pinned()`` body inside another one. A task
that was started in a body is inside that body until the body ends.

One lock serves all gates of the process, because a joint commit needs several gates at once. It is held
for bookkeeping and for the commit itself, which re-points parameters and takes microseconds; and while
the process forks, so that no child gets a model half way through a commit.

Forward passes enter and leave without the lock, which would cost them more than the rest of their guard. A
pass first enters and then looks for commits; a commit is first announced and then looks for readers. So at
least one of the two finds the other, and a pass that finds a commit goes on in the body of the lock.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from aiosync._deadline import Deadline
from aiosync.receiver.commit_job import CHANGED, LOCK, CommitJob, Outcome
from aiosync.transfer.yield_request import NO_REQUEST, HeededRequest

if TYPE_CHECKING:
    from aiosync.receiver.updates import Applier

# Whether all threads see changes of lists in the same order: the interpreter has its lock.
_ORDERED: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
# The innermost pinned body that this task is in, or was started in.
_body: ContextVar[PinnedBody | None] = ContextVar("aiosync_body", default=None)
_LOOK = 0.005
"""Seconds between two looks at whether readers have left."""


class PinnedBody:
    """The body of one ``pinned()``, and the bodies around it that have not ended.

    Entering it makes it the innermost one of its task, or of its thread.
    """

    def __init__(self) -> None:
        self.ended = False
        self._around = _body.get()
        for body in self:  # a chain of tasks, each started by the one before, keeps none that has ended
            body._around = _not_ended(body._around)

    def __enter__(self) -> None:
        self._reset = _body.set(self)

    def __exit__(self, *exc: object) -> None:
        self.ended = True
        with suppress(ValueError):  # an abandoned generator is closed in another context than its own
            _body.reset(self._reset)
        del self._reset  # which has the bodies around this one, and their tasks' contexts

    def __iter__(self) -> Iterator[PinnedBody]:
        """Yield the body, and those around it."""
        body: PinnedBody | None = self
        while body is not None:
            yield body
            body = body._around


def _not_ended(body: PinnedBody | None) -> PinnedBody | None:
    """Return the body, or else the innermost one around it that has not ended."""
    while body is not None and body.ended:
        body = body._around
    return body


class ForwardPasses:
    """The forward passes of one module that run now, in any thread. Several gates may watch them.

    To begin, a pass appends a ticket of its own to ``inside``, and then looks at ``attention``. To end, it
    removes the ticket and then looks at ``attention`` again. All other changes are made in :data:`LOCK`.
    """

    def __init__(self, code: CodeType) -> None:
        self.inside: list[object] = []
        # Not empty: there are commits that wait or run, or the next pass has something else to do.
        self.attention: list[object] = [] if _ORDERED else [self]
        self.gates: list[CommitGate] = []
        # What a sender asks of a thread whose pass has ended, and its byte. See choose_yield_request().
        self.yield_request = NO_REQUEST
        self.asked = [NO_REQUEST.byte]
        # Of the function that runs a pass. Its variable ``ticket`` is the ticket.
        self._code = code

    def wait_to_begin(self, ticket: object, gates: Sequence[CommitGate], seconds: float) -> None:
        """Wait until no commit keeps the pass out of the gates, ``seconds`` at most. Then it is inside."""
        reader = threading.get_ident()
        with LOCK:
            # Commits may have found the pass, and wait for it.
            self.inside.remove(ticket)
            self.run_ready()
            CHANGED.wait_for(lambda: not any(gate.keeps_out(reader) for gate in gates), timeout=seconds)
            self.inside.append(ticket)

    def choose_yield_request(self) -> None:
        """Heed the sender of a gate that watches. In :data:`LOCK`."""
        found = [gate.yield_request for gate in self.gates if gate._passes.get(self, ()) is None]
        self.yield_request = next((each for each in found if each is not NO_REQUEST), NO_REQUEST)
        self.asked[0] = self.yield_request.byte

    def run_ready(self) -> bool:
        """Run the commits that wait for no reader any more. Return whether there was one."""
        return any([gate.run_ready() for gate in tuple(self.gates)])

    def has_own(self) -> bool:
        """Whether the calling thread is in one of them."""
        frame: FrameType | None = sys._getframe() if self.inside else None
        while frame is not None:
            if frame.f_code is self._code and frame.f_locals.get("ticket") in self.inside:
                return True
            frame = frame.f_back
        return False


class CommitGate:
    """Keeps the readers of one model, and the commits that wait for them.

    A reader enters with a ticket, any object of its own; leaving with it twice does no harm. A ticket passes
    a waiting commit if the same ``reader`` holds that commit up: the same thread, or a body around this one.
    """

    # How often this process and those before it were forked.
    forks: ClassVar[int] = 0
    # Those whose commits may block an event loop, which is aiosync's own. If there are several they may share
    # it, and their waits would add up.
    blocking: ClassVar[WeakSet[CommitGate]] = WeakSet()

    def __init__(self) -> None:
        # Ticket -> its reader, without the forward passes; and the commits that wait for readers. Only this
        # module changes them.
        self.inside: dict[object, object] = {}
        self.waiting: list[CommitJob] = []
        # The passes that are readers -> the tickets of those that are; None: of all. And what is in their
        # ``attention`` because of this gate: the commits that wait or run.
        self._passes: dict[ForwardPasses, list[object] | None] = {}
        self._announced: list[object] = []
        self.yield_request = NO_REQUEST

    def heed(self, request: HeededRequest) -> None:
        """Yield the processor when this sender asks for it, after each reading of the model in a thread.

        Not after ``async with pinned()``: a yield may block the event loop for several time slices.
        """
        if request is not self.yield_request:
            with LOCK:
                self.yield_request = request
                for passes in self._passes:
                    passes.choose_yield_request()

    def watch(self, passes: ForwardPasses) -> None:
        """Make all forward passes that begin from now on readers."""
        with LOCK:
            if passes not in self._passes:
                passes.gates.append(self)
                passes.attention.extend(self._announced)
            self._passes[passes] = None
            passes.choose_yield_request()

    def unwatch(self, passes: ForwardPasses) -> None:
        """Make forward passes readers no longer, except those that run now."""
        with LOCK:
            if passes in self._passes:
                self._passes[passes] = list(passes.inside)
                passes.choose_yield_request()
                self.run_ready()

    def readers(self) -> list[object]:
        """The tickets of all readers."""
        with LOCK:
            found = list(self.inside)
            for passes, only in self._passes.items():
                inside = list(passes.inside)
                found += inside if only is None else [ticket for ticket in inside if ticket in only]
            return found

    def has_own(self) -> bool:
        """Whether the calling thread is a reader: in a pinned body, or in a forward pass."""
        with LOCK:
            reads = threading.get_ident() in self.inside.values()
            return reads or any(passes.has_own() for passes in self._passes)

    def _forget_unwatched(self) -> None:
        for passes, only in list(self._passes.items()):
            if only is not None and not any(ticket in only for ticket in list(passes.inside)):
                del self._passes[passes]
                passes.gates.remove(self)
                for commit in self._announced:
                    passes.attention.remove(commit)

    def try_enter(self, ticket: object, reader: object) -> bool:
        """Become a reader, unless a commit waits that ``reader`` is not already holding up."""
        with LOCK:
            if self.keeps_out(reader):
                return False
            self.inside[ticket] = reader
            return True

    def leave(self, ticket: object) -> bool:
        """Stop being a reader; runs the commit that waited for this. Return whether there was one."""
        with LOCK:
            self.inside.pop(ticket, None)
            return self.run_ready()

    def run_ready(self) -> bool:
        """Run the commits that wait for no reader any more. Return whether there was one."""
        committed = False
        with LOCK:
            # A pass that ends now may not look here any more. So what it would have run is run below.
            self._forget_unwatched()
            for job in list(self.waiting):
                committed |= job.run_if_ready()
        return committed

    def commit_at_once(self, commit: Callable[[], None]) -> bool:
        """Run ``commit`` if there is no reader, and no other commit. Return whether that was done."""
        with LOCK:
            if self.waiting or self.inside:
                return False
            if not self._passes:  # this is a part of each small update
                commit()
                return True
            self.announce(commit)
            try:
                if self.readers():
                    return False
                commit()
                return True
            finally:
                self.conclude(commit)

    def commit_soon(self, commit: Callable[[], None], seconds: float) -> bool:
        """Run ``commit`` when the forward passes that run now have ended, in the thread of the last one.

        Blocks until it has run, or for ``seconds`` if it has not begun then. Returns whether it has run;
        raises what it raises.
        """
        if self.inside:  # pinned(): that may take long, or be a task of this thread
            return False
        job = submit([self], commit)
        try:
            with LOCK:
                CHANGED.wait_for(job.done.done, seconds)
            if job.withdraw():
                return False
            job.done.result()
            return True
        finally:
            del job  # of an exception's frame it would keep the exception, and that the update

    def announce(self, commit: object) -> None:
        """Let no forward pass begin or end outside of :data:`LOCK` until :meth:`conclude`."""
        self._announced.append(commit)
        for passes in self._passes:
            passes.attention.append(commit)

    def conclude(self, commit: object) -> None:
        """End what :meth:`announce` began; idempotent."""
        if commit in self._announced:
            for passes in self._passes:
                if commit in passes.attention:  # unless an interrupt ended the first call
                    passes.attention.remove(commit)
            self._announced.remove(commit)

    async def enter(self, ticket: object, reader: object, deadline: Deadline) -> None:
        """Become a reader on the event loop.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        while not self.try_enter(ticket, reader):
            with LOCK:
                job = self.waiting[-1] if self.waiting else None
            if job is None:
                continue
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await job.done.wait()
            except TimeoutError:
                raise deadline.error("pin", hint="a commit waits for other readers to leave") from None

    async def drain(self, deadline: Deadline) -> bool:
        """Wait until the readers that are inside now have left, but for the bodies that the caller is in.

        Returns False if one is still inside at the deadline.
        """
        own = [*(_body.get() or ())]
        left = [ticket for ticket in self.readers() if ticket not in own]
        # Looked at again and again, because most readers leave without the lock, and say nothing.
        while left and deadline.remaining():
            await asyncio.sleep(_LOOK)
            left = [ticket for ticket in self.readers() if ticket in left]
        return not left

    @asynccontextmanager
    async def pinned(self, deadline: Deadline, applier: Applier) -> AsyncIterator[int]:
        """Block commits for the length of the body. Yield the number of the version in service.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        body = PinnedBody()
        await self.enter(body, body, deadline)
        try:
            with body:
                yield applier.in_service
        finally:
            self.leave(body)

    def enter_blocking(self, ticket: object, reader: object, seconds: float) -> bool:
        """Become a reader in a thread, after waiting for ``seconds`` at most. Return whether it is one."""
        with LOCK:
            self.run_ready()  # an interrupt may have kept the reader before from it
            return CHANGED.wait_for(lambda: self.try_enter(ticket, reader), timeout=seconds)

    def keeps_out(self, reader: object) -> bool:
        """Whether a commit waits that ``reader`` is not itself holding up."""
        # One that runs calls user code in this thread, which may read the model.
        waiting = [job for job in self.waiting if not job.running and not job.done.done()]
        if not waiting:
            return False
        gates = {gate for job in waiting for gate in job.gates}
        inside = [each for gate in gates for each in gate.inside.values()]
        if isinstance(reader, PinnedBody):
            return not any(body in inside for body in reader)
        return reader not in inside and not any(each.has_own() for gate in gates for each in gate._passes)


def submit(
    gates: Sequence[CommitGate], commit: Callable[[], None], then: Callable[[Outcome], None] | None = None
) -> CommitJob:
    """Run ``commit`` as soon as no gate has a reader: now, in this thread, if that is so already."""
    job = CommitJob(gates, commit, then)
    with LOCK:
        for gate in gates:
            gate.waiting.append(job)
            gate.announce(job)
        job.run_if_ready()
    return job


def _forked() -> None:
    CommitGate.forks += 1
    CommitGate.blocking.clear()
    LOCK.release()


os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_forked)
