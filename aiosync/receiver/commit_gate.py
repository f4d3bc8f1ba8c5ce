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
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar

from aiosync._deadline import Deadline
from aiosync._processors import yield_processor

if TYPE_CHECKING:
    from aiosync.receiver.updates import Applier

# The bare lock is entered without running Python code, so that an interrupt (Ctrl-C) cannot come between
# taking it and the body that gives it back.
LOCK = threading.RLock()
_changed = threading.Condition(LOCK)
# The innermost pinned body that this task is in, or was started in.
_body: ContextVar[PinnedBody | None] = ContextVar("aiosync_body", default=None)


class PinnedBody:
    """The body of one ``pinned()``, and the bodies around it that have not ended."""

    def __init__(self, around: PinnedBody | None) -> None:
        self.ended = False
        self._around = around
        for body in self:  # a chain of tasks, each started by the one before, keeps none that has ended
            body._around = _not_ended(body._around)

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


class CommitJob:
    """One commit that waits for its gates."""

    def __init__(self, gates: Sequence[CommitGate], commit: Callable[[], None]) -> None:
        self.gates = tuple(gates)
        # Resolves when the commit has run, with the exception that it raised; cancelled if it was withdrawn.
        self.done: Future[None] = Future()
        self._commit = commit

    def withdraw(self) -> bool:
        """Cancel the commit. Return False if it has run already."""
        with LOCK:
            if self.done.done():
                return False
            self._leave()
            self.done.cancel()
            return True

    def _ready(self) -> bool:
        return not any(gate.inside for gate in self.gates)

    def _run(self) -> None:
        self._leave()
        interrupts: list[BaseException] = []
        while not self.done.done():
            try:
                self._commit()
            except Exception as exc:  # noqa: BLE001 - the future carries it to the caller of submit()
                self.done.set_exception(exc)
            except BaseException as exc:  # noqa: BLE001 - raised below
                # The interrupt was for this thread and not for the commit, which was undone and runs again.
                interrupts.append(exc)
            else:
                self.done.set_result(None)
        if interrupts:
            raise interrupts[0]

    def _leave(self) -> None:
        for gate in self.gates:
            gate.waiting.remove(self)
        _changed.notify_all()


class CommitGate:
    """Keeps the readers of one model, and the commits that wait for them.

    A reader enters with a ticket, any object of its own; leaving with it twice does no harm. A ticket passes
    a waiting commit if the same ``reader`` holds that commit up: the same thread, or a body around this one.
    """

    # How often this process and those before it were forked. Each forward pass compares it. A system call for
    # the process's id would take longer, and would slow down what follows in the pass.
    forks: ClassVar[int] = 0

    def __init__(self) -> None:
        # Ticket -> its reader; and the commits that wait for them. Where both are empty, a commit may run at
        # once, in the body of :data:`LOCK`. Only this module changes them.
        self.inside: dict[object, object] = {}
        self.waiting: list[CommitJob] = []
        # How many readers have entered so far, without those that were inside already.
        self.entered = 0

    def try_enter(self, ticket: object, reader: object, *, force: bool = False) -> bool:
        """Become a reader, unless a commit waits that ``reader`` is not already holding up.

        ``force``: become one even then.
        """
        with LOCK:
            if self.waiting and not force:
                held_up = [gate for job in self.waiting for gate in job.gates]
                if not self._holds(reader, held_up):
                    return False
            if not self.inside or not self._holds(reader, [self]):
                self.entered += 1
            self.inside[ticket] = reader
            return True

    def leave(self, ticket: object) -> bool:
        """Stop being a reader; runs the commit that waited for this. Return whether there was one."""
        with LOCK:
            if self.inside.pop(ticket, None) is None or not self.waiting:
                return False
            committed = False
            for job in list(self.waiting):
                if job._ready():
                    job._run()
                    committed = True
            return committed

    def leave_blocking(self, ticket: object) -> None:
        """As :meth:`leave`, in a thread that computes: another one waits to acknowledge the commit."""
        if self.leave(ticket):
            yield_processor()

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
                    await asyncio.wait([asyncio.wrap_future(job.done)])
            except TimeoutError:
                raise deadline.error("pin", hint="a commit waits for other readers to leave") from None

    @asynccontextmanager
    async def pinned(self, deadline: Deadline, applier: Applier) -> AsyncIterator[int]:
        """Block commits for the length of the body. Yield the number of the version in service.

        Raises:
            SyncTimeoutError: a commit waited for other readers until the deadline.
        """
        body = PinnedBody(_body.get())
        await self.enter(body, body, deadline)
        reset = _body.set(body)
        try:
            yield applier.in_service
        finally:
            body.ended = True
            self.leave(body)
            with suppress(ValueError):  # an abandoned generator is closed in another context than its own
                _body.reset(reset)

    def enter_blocking(self, ticket: object, reader: object, seconds: float, *, force: bool = False) -> bool:
        """Become a reader in a thread, after ``seconds`` of waiting at most. Return whether it has entered.

        Args:
            force: enter after that time even if a commit still waits.
        """
        with LOCK:
            entered = _changed.wait_for(lambda: self.try_enter(ticket, reader), timeout=seconds)
            return entered or (force and self.try_enter(ticket, reader, force=True))

    @staticmethod
    def _holds(reader: object, gates: Sequence[CommitGate]) -> bool:
        """Whether a reader, or a body around it, is inside one of the gates."""
        inside = [each for gate in gates for each in gate.inside.values()]
        return any(each in inside for each in (reader if isinstance(reader, PinnedBody) else [reader]))


def submit(gates: Sequence[CommitGate], commit: Callable[[], None]) -> CommitJob:
    """Run ``commit`` as soon as no gate has a reader: now, in this thread, if that is so already."""
    job = CommitJob(gates, commit)
    with LOCK:
        for gate in gates:
            gate.waiting.append(job)
        if job._ready():
            job._run()
    return job


def _forked() -> None:
    CommitGate.forks += 1
    LOCK.release()


os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_forked)
