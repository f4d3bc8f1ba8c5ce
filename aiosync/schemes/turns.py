"""Turns at something that one call has at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager

from aiosync._deadline import Deadline

__all__ = ["Turns"]


class Turns:
    """A lock that is waited for until a deadline. It goes from hand to hand: between one's turn and the
    next one's it is never free, so nobody who comes later gets in between.

    Attributes:
        taken: whether it is anybody's.
    """

    def __init__(self) -> None:
        self.taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def turn(self, deadline: Deadline | None = None) -> AbstractAsyncContextManager[None]:
        """One's own. None: whoever has it is about to end.

        Raises:
            SyncTimeoutError: others had it until the deadline.
        """
        return _Turn(self, deadline)

    def take(self) -> bool:
        """Make it the caller's, who is to :meth:`pass_on`, if it is free; returns whether it was."""
        if self.taken:
            return False
        self.taken = True
        return True

    async def wait(self, deadline: Deadline | None) -> None:
        """Wait for it; it is the caller's then.

        Raises:
            SyncTimeoutError: others had it until the deadline.
        """
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            async with asyncio.timeout(deadline.remaining() if deadline is not None else None):
                await mine
        except BaseException as exc:
            if mine.done() and not mine.cancelled():
                self.pass_on()  # it came just when it was not wanted any more
            elif mine in self._waiting:
                self._waiting.remove(mine)
            if deadline is None or not isinstance(exc, TimeoutError):
                raise
            raise deadline.error("stage", hint="an earlier send was still copying") from None

    def pass_on(self) -> None:
        """Give it to who has waited longest; if nobody has, it is free."""
        while self._waiting:
            next_one = self._waiting.popleft()
            if not next_one.done():  # else it was cancelled, and has not come to hear of it yet
                next_one.set_result(None)
                return
        self.taken = False


class _Turn(AbstractAsyncContextManager[None]):
    """Not a generator: a small model's send is mostly such things."""

    __slots__ = ("_deadline", "_turns")

    def __init__(self, turns: Turns, deadline: Deadline | None) -> None:
        self._turns = turns
        self._deadline = deadline

    async def __aenter__(self) -> None:
        if not self._turns.take():
            await self._turns.wait(self._deadline)

    async def __aexit__(self, *raised: object) -> None:
        self._turns.pass_on()
