"""A first-in, first-out lock for coroutines, with a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiosync._deadline import Deadline


class FairLock:
    """A first-in, first-out lock.

    :meth:`release` hands the lock to the call that has waited longest. The lock is not free in between, so a
    later call cannot overtake an earlier one.
    """

    def __init__(self) -> None:
        # Whether a call holds the lock.
        self.locked = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def hold(self, deadline: Deadline | None = None) -> AsyncIterator[None]:
        """Hold the lock for the length of the body. Raises as :meth:`acquire`."""
        if not self.acquire_nowait():
            await self.acquire(deadline)
        try:
            yield
        finally:
            self.release()

    def acquire_nowait(self) -> bool:
        """Acquire the lock if it is free. Return whether it was acquired."""
        if self.locked:
            return False
        self.locked = True
        return True

    async def acquire(self, deadline: Deadline | None) -> None:
        """Wait for the lock and acquire it. Call this after :meth:`acquire_nowait` has returned False.

        Args:
            deadline: when to give up; None: wait without a limit, for a holder that is about to end.

        Raises:
            SyncTimeoutError: other calls held the lock until the deadline.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(deadline.remaining() if deadline is not None else None):
                await waiter
        except BaseException as exc:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the lock was handed over in the same turn in which this call was cancelled
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            if deadline is None or not isinstance(exc, TimeoutError):
                raise
            raise deadline.error("stage", hint="an earlier send was still copying") from None

    def release(self) -> None:
        """Hand the lock to the call that has waited longest, or free it if no call waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # a done one was cancelled, and its call has not run since
                waiter.set_result(None)
                return
        self.locked = False
