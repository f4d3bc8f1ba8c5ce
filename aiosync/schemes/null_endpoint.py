"""The endpoint of a scheme that moves no weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint
from aiosync.reports import SendReport

__all__ = ["NullEndpoint"]


class NullEndpoint(Endpoint):
    """A sender and a receiver in one: every call succeeds at once. A send counts a version.

    Args:
        version: the number that counting begins with.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._closed = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    async def send(
        self, weights: Any, worker_ids: Any, *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        """Count one version."""
        self._version += 1
        return await self.wait_ack(worker_ids, deadline)

    async def wait_ack(self, worker_ids: Any, deadline: Deadline) -> SendReport:
        """Return a report without workers."""
        return SendReport(self._version, 0, {}, {"total": 0.0})

    async def receive(self, deadline: Deadline) -> None:
        """Return None at once: no update ever comes."""
        return

    def receiving(self) -> AbstractAsyncContextManager[None]:
        """Run nothing beside the body."""
        return nullcontext()

    @asynccontextmanager
    async def pinned(self, deadline: Deadline) -> AsyncIterator[int]:
        """Yield the version, which does not change on a receiver."""
        yield self._version

    async def rebind(self, model: Any, listener: Any, *, may_view: bool) -> None:
        """Accept another model."""
        return

    async def wait_closed(self) -> None:
        """Wait until this endpoint is closed."""
        await self._closed.wait()

    async def aclose(self) -> None:
        self._closed.set()
