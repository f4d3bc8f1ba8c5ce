"""How the blocking twins of the updaters run: in the caller's thread; what has to wait, on the portal."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiosync.errors import BlockingCallError
from aiosync.sync._portal import portal
from aiosync.updaters.base import bounded

__all__ = ["InlineHooks", "run_inline"]

T = TypeVar("T")


def run_inline(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of an updater here and now; it waits for nothing but through ``_settle``.

    Raises:
        BlockingCallError: it does, in what a subclass has added.
    """
    try:
        steps.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    steps.close()
    raise BlockingCallError(
        "_push_weights() of a blocking updater awaited something itself: make it a plain function, or "
        "use the class of the same name in aiosync.updaters"
    )


class InlineHooks:
    """Calls hooks in the caller's thread; what they return to be awaited is awaited on the portal."""

    async def _settle(self, result: Any) -> Any:
        return portal().call(bounded, result) if inspect.isawaitable(result) else result
