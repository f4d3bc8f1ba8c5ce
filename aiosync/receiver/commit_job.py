"""One commit that waits until no reader uses the models, and its outcome.

States of a commit: WAITING → RUNNING → ENDED, or WAITING → ENDED if it is withdrawn. All changes are made in
:data:`LOCK`. An interrupt (Ctrl-C) may come between any two of them. It leaves the commit in ``waiting`` of
its gates, whose next reader continues; or the method that was interrupted goes on and raises it afterwards.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiosync.transports._offload import post

if TYPE_CHECKING:
    from aiosync.receiver.commit_gate import CommitGate

# The bare lock is entered without running Python code, so that an interrupt (Ctrl-C) cannot come between
# taking it and the body that gives it back.
LOCK = threading.RLock()
CHANGED = threading.Condition(LOCK)
"""Notified when a commit has ended."""

_MOST_INTERRUPTS = 4
"""After so many interrupts a commit that has run is left to the gates' next reader."""


class _Ended(NamedTuple):
    error: Exception | None = None
    cancelled: bool = False


class Outcome:
    """Resolved once: :meth:`set_result`, :meth:`set_exception` or :meth:`cancel`; then call :meth:`wake`.

    A :class:`concurrent.futures.Future` that is interrupted (by Ctrl-C) between its new state and its
    callbacks never calls them. Here a new state is one assignment, and :meth:`wake` may be called again.
    """

    def __init__(self) -> None:
        self._ended: _Ended | None = None
        self._wakers: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether it is resolved."""
        return self._ended is not None

    def cancelled(self) -> bool:
        """Whether the commit was withdrawn."""
        return self._ended is not None and self._ended.cancelled

    def exception(self) -> Exception | None:
        """What the commit raised; None: nothing so far."""
        return None if self._ended is None else self._ended.error

    def result(self) -> None:
        """Raise what the commit raised."""
        error = self.exception()
        if error is not None:
            raise error

    def set_result(self) -> None:
        """The commit has run."""
        self._ended = _Ended()

    def set_exception(self, error: Exception) -> None:
        """The commit has raised this, and changed nothing."""
        self._ended = _Ended(error)

    def cancel(self) -> None:
        """The commit was withdrawn, and will not run."""
        self._ended = _Ended(cancelled=True)

    def wake(self) -> None:
        """Wake the calls of :meth:`wait`. Any thread may call it, and more than once."""
        for waker in tuple(self._wakers):
            waker()

    async def wait(self) -> None:
        """Wait on the event loop until it is resolved."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def waker() -> None:
            post(loop, ended.set)

        # In this order: the thread that resolves it looks for wakers afterwards.
        self._wakers.append(waker)
        try:
            if self.done():
                await asyncio.sleep(0)  # a caller may wait in a loop for what another task does then
            else:
                await ended.wait()
        finally:
            self._wakers.remove(waker)


class CommitJob:
    """One commit that waits for its gates. ``then`` is called with its outcome, perhaps more than once."""

    def __init__(
        self,
        gates: Sequence[CommitGate],
        commit: Callable[[], None],
        then: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.gates = tuple(gates)
        self.done = Outcome()
        self.running = False
        # Whether it was withdrawn for its update to be staged anew.
        self.taken_back = False
        self._commit = commit
        self._then = then

    def withdraw(self) -> bool:
        """Cancel the commit. Return False if it has run already."""
        with LOCK:
            if self.done.done():
                return False
            self.done.cancel()
            self._leave()
            return True

    def readers(self) -> list[object]:
        """The tickets of the readers that the commit waits for."""
        return [ticket for gate in self.gates for ticket in gate.readers()]

    def run_if_ready(self) -> bool:
        """Run the commit if it waits for no reader any more. Return whether that was done. In :data:`LOCK`.

        An interrupt (Ctrl-C) that comes before the commit leaves it waiting, so that the next call runs it.
        One that comes later is for this thread and not for the commit, which then runs again.
        """
        if self.running or self not in self.gates[0].waiting or self.readers():
            return False
        interrupts: list[BaseException] = []
        try:
            while self in self.gates[0].waiting and len(interrupts) < _MOST_INTERRUPTS:
                try:
                    self.running = True
                    if not self.done.done():
                        self._run(last=len(interrupts) > 1)
                    self._leave()
                except BaseException as exc:  # noqa: BLE001 - raised below
                    interrupts.append(exc)
        finally:
            self.running = False
        if interrupts:
            raise interrupts[0]
        return True

    def _run(self, *, last: bool) -> None:
        """Run the commit. Raise an interrupt; in the ``last`` try it is none, but what the commit raises."""
        try:
            self._commit()
        except BaseException as exc:
            if isinstance(exc, Exception):
                self.done.set_exception(exc)
            elif last:
                error = RuntimeError(f"the commit raised {exc!r}")
                error.__cause__ = exc
                self.done.set_exception(error)
            else:
                raise
        else:
            self.done.set_result()

    def _leave(self) -> None:
        """Tell all that wait for the outcome. Idempotent, so that it may be called again if interrupted."""
        if self._then is not None:
            self._then(self.done)
        self.done.wake()
        CHANGED.notify_all()
        for gate in reversed(self.gates):
            gate.conclude(self)
            if self in gate.waiting:
                gate.waiting.remove(self)
