"""The base class of the generated collectors' twins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from aiosync.collectors import MultiCollector
from aiosync.sync._portal import portal


class BlockingCollector:
    """Iterates, and is a context manager, by calls on the portal's loop."""

    _async: MultiCollector

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch; see the asyncio class's ``__anext__``."""
        try:
            return portal().call(self._async.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def _blocking_connect(self, timeout: float | None = None) -> None:
        portal().call(self._async.connect, timeout)
        portal().adopt(self, self._async.aclose)  # ends the workers at exit if close() is not called

    def __enter__(self) -> Self:
        self._blocking_connect()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """End the workers; idempotent. ``timeout``: seconds that they have to end by themselves."""
        portal().release(self)
        portal().call(self._async.aclose, timeout)

    shutdown = async_shutdown = close

    @contextmanager
    def _blocking_pause(self, timeout: float | None = None) -> Iterator[None]:
        pausing = self._async.pause(timeout)
        portal().call(pausing.__aenter__)
        try:
            yield
        finally:
            portal().call(pausing.__aexit__, None, None, None)
