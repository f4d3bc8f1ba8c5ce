"""The event loop that an endpoint lives on."""

from __future__ import annotations

import asyncio

from aiosync.errors import WrongEventLoopError

__all__ = ["HomeLoop"]


class HomeLoop:
    """Remembers the loop that an endpoint was connected on.

    Args:
        what: the endpoint, for the error message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """The endpoint is connected on the running loop; raises as :meth:`check` if it lives on another."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.check()

    def check(self) -> None:
        """Check that the endpoint is used where it lives.

        Raises:
            WrongEventLoopError: another loop runs here.
        """
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return
        state = "is closed" if self._loop.is_closed() else "is not the one that runs here"
        raise WrongEventLoopError(
            f"{self._what} was connected on an event loop that {state}: call connect(), everything after it "
            "and aclose() within one asyncio.run(), or use the blocking classes of aiosync.sync, which have "
            "a loop of their own"
        )

    def check_alive(self) -> None:
        """The same, but let pass an endpoint whose loop is closed: it can only be abandoned."""
        if not self.closed:
            self.check()

    @property
    def closed(self) -> bool:
        """Whether that loop has been closed, so that nothing that lives on it can end in order."""
        return self._loop is not None and self._loop.is_closed()
