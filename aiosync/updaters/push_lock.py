"""Pushes of one updater, which may come from several threads and event loops, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeAlias

Turn: TypeAlias = "Future[None]"
"""Of one push. Done when the push may begin."""

_held: ContextVar[frozenset[Turn]] = ContextVar("_held", default=frozenset())
"""The turns of the pushes that the running code is a part of."""


class PushLock:
    """A first-in, first-out lock. A copy, or a pickled one, is another lock, which is free."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holder: Turn | None = None
        self._waiting: deque[Turn] = deque()

    def __reduce__(self) -> tuple[type[PushLock], tuple[()]]:
        return PushLock, ()

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Give a turn. The body waits for it, then pushes. A push inside a push is a part of that."""
        turn: Turn = Future()
        with self._mutex:
            nested = self._holder in _held.get()
            if not nested:
                self._waiting.append(turn)
                self._give()
        if nested:
            turn.set_result(None)
            yield turn
            return
        token = _held.set(_held.get() | {turn})
        try:
            yield turn
        finally:
            with self._mutex:
                turn.cancel()
                if self._holder is turn:
                    self._holder = None
                self._give()
            with suppress(ValueError):  # an abandoned coroutine is closed in another context than its own
                _held.reset(token)

    def _give(self) -> None:
        while self._holder is None and self._waiting:
            turn = self._waiting.popleft()
            if turn.set_running_or_notify_cancel():  # its push still waits
                self._holder = turn
                turn.set_result(None)
