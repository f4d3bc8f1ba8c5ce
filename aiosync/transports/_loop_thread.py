"""Event loops in threads of their own, and what passes between them and the caller's loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

from aiosync._processors import shorten_time_slices
from aiosync.transports._offload import start_thread

_CALLS_AT_ONCE = 64  # calls for other threads between which the loop does nothing else
_SENT_AT_ONCE = 4  # sends of one turn that do not wait for the turn's end


class Mailbox:
    """Calls functions on the running loop for ``thread``, in order. One wake-up serves many calls.

    The thread wakes the loop when its own turn has ended. If it woke the loop for the first of many calls,
    the loop would take the interpreter from the thread at once, for one call.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self.loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        # Whether the loop is about to run the calls.
        self._woken = False

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)`` on the loop, from any thread; does nothing if the loop is closed."""
        self._calls.append((function, args))
        # The loop resets this before it looks for calls, so the call above is never left behind.
        if self._woken:
            return
        self._woken = True
        if self._thread.is_current:
            self._thread.loop.call_soon(self.wake)
        else:
            self.wake()

    def wake(self) -> None:
        """Have the loop run the calls now."""
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            self._woken = False
            self._calls.clear()

    def _run(self) -> None:
        try:
            self._woken, calls = False, self._calls
            for _ in range(min(len(calls), _CALLS_AT_ONCE)):
                function, args = calls.popleft()
                function(*args)
        finally:
            # Also after an error of a call, and after Ctrl-C: the loop may be run again.
            if self._calls:
                self._woken = True
                self.loop.call_soon(self._run)


class TurnOfSends:
    """What one turn of the running loop sends over the connections of ``thread``.

    The caller does the first few sends at once, which is fastest for few workers. The thread does the others
    in a row when the turn has ended. So the loop is not kept from its other work, and the two threads do not
    pass the interpreter to and fro for each send.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._later: list[Callable[[], None]] = []

    def add(self, send: Callable[[], None]) -> None:
        """Call ``send()`` now, or soon in the thread. Call this on the loop."""
        if self._count == 0:
            self._loop.call_soon(self._end)
        self._count += 1
        if self._count <= _SENT_AT_ONCE:
            send()
        else:
            self._later.append(send)

    def hand_over(self) -> None:
        """Have the thread make the calls so far, although the turn goes on. It may last long: a trainer may
        compute on its loop after a send that does not wait."""
        if self._later:
            later, self._later = self._later, []
            self._thread.call(_call_all, later)

    def _end(self) -> None:
        self._count = 0
        self.hand_over()


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


class LoopThread:
    """An event loop in its own thread. Its connections move bytes while the caller's loop is busy.

    The endpoint that owns the thread closes it. ``loop`` may be used only in the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._thread = start_thread(self._run, name)
        self._closed = False
        self._shared: tuple[Mailbox, TurnOfSends] | None = None

    def shared(self) -> tuple[Mailbox, TurnOfSends]:
        """Return what all connections of the running loop share, towards that loop and towards the thread."""
        if self._shared is None or self._shared[0].loop is not asyncio.get_running_loop():
            self._shared = Mailbox(self), TurnOfSends(self)
        return self._shared

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        shorten_time_slices()
        self.loop.run_forever()
        if self._shared is not None:
            self._shared[0].wake()  # the last turn may have posted calls

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Call ``function(*args)`` in the thread, after earlier calls; returns false if it has ended."""
        if self._closed:
            return False
        self.loop.call_soon_threadsafe(function, *args)
        return True

    def close(self) -> None:
        """Run the calls queued so far, which do not block, and wait for the thread's end; idempotent."""
        if not self._closed:
            self._closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
