"""Calls that closing the endpoint ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiosync.errors import AiosyncError, NotConnectedError

__all__ = ["OpenCalls"]


class OpenCalls:
    """The calls of one endpoint that ``aclose``, from another task, ends before it closes anything.

    Without this a ``connect`` that is under way would go on with an endpoint that is closed: open further
    connections, and wait for answers that do not come.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._scopes: set[asyncio.Timeout] = set()
        self._none_left = asyncio.Event()

    @asynccontextmanager
    async def call(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Run the body for ``seconds`` at most, and until :meth:`stop`.

        Raises:
            NotConnectedError: the endpoint was closed.
            TimeoutError: the seconds passed.
        """
        scope = asyncio.timeout(0 if self._stopped else seconds)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except (TimeoutError, AiosyncError):
            if not self._stopped:
                raise
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._none_left.set()
        if self._stopped:
            raise NotConnectedError("this endpoint was closed while it connected")

    async def stop(self) -> None:
        """Cancel the bodies, wait until they have ended, and let no other begin."""
        self._stopped = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():  # else its body is ending already
                scope.reschedule(now)
        if self._scopes:
            self._none_left.clear()
            await self._none_left.wait()
