"""The body of ``async with scheme.receiving()``, which is cancelled if the sender is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["ReceivingBody"]


class ReceivingBody:
    """Cancels the caller's body by a timeout that expires only if the sender is lost."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def cancelled_if_lost(self, *, already: bool) -> AsyncIterator[None]:
        """Run the body. It ends early, without an error, if :meth:`cancel` is called.

        Args:
            already: the sender is lost before the body begins.
        """
        try:
            async with asyncio.timeout(None) as self._timeout:
                if already:
                    self.cancel()
                yield
        except TimeoutError:  # of the body itself, or because the sender is lost
            if self._timeout is None or not self._timeout.expired():
                raise
        finally:
            self._timeout = None

    def cancel(self) -> None:
        """The sender is lost: cancel the body, if there is one."""
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
