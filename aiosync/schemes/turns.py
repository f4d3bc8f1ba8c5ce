"""Turns at something that one call has at a time."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from aiosync._deadline import Deadline

__all__ = ["Turns"]


class Turns:
    """A lock that is waited for until a deadline."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0

    def turn(self, deadline: Deadline | None = None) -> AbstractAsyncContextManager[None]:
        """One's own. None: whoever has it is about to end.

        Raises:
            SyncTimeoutError: others had it until the deadline.
        """
        return _Turn(self, deadline)


class _Turn(AbstractAsyncContextManager[None]):
    """Not a generator: a small model's send is mostly such things."""

    def __init__(self, turns: Turns, deadline: Deadline | None) -> None:
        self._turns = turns
        self._deadline = deadline

    async def __aenter__(self) -> None:
        turns, deadline = self._turns, self._deadline
        # Between a release and the next one's waking it is nobody's, but whoever comes then waits too.
        if not turns.waiting and not turns.lock.locked():
            await turns.lock.acquire()
            return
        turns.waiting += 1
        try:
            async with asyncio.timeout(deadline.remaining() if deadline is not None else None):
                await turns.lock.acquire()
        except TimeoutError:
            assert deadline is not None
            raise deadline.error("stage", hint="an earlier send was still copying") from None
        finally:
            turns.waiting -= 1

    async def __aexit__(self, *raised: object) -> None:
        self._turns.lock.release()
