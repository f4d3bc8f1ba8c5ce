"""The blocking twins of the updaters run in the caller's thread; what they await runs on the portal."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiosync.errors import BlockingCallError
from aiosync.sync._portal import portal
from aiosync.updaters.base import bounded

T = TypeVar("T")


def run_inline(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of an updater in this thread. Only ``_settle`` may wait, else BlockingCallError."""
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
    """Calls hooks in the caller's thread. An awaitable that a hook returns is awaited on the portal."""

    async def _settle(self, result: Any) -> Any:
        return portal().call(bounded, result) if inspect.isawaitable(result) else result
