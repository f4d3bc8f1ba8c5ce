"""Which event loop the measured processes run on."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine
from typing import Any

__all__ = ["run_on"]


def run_on(main: Coroutine[Any, Any, None], uvloop: bool) -> None:
    """Run ``main`` to its end on a new event loop: uvloop's, or the standard library's."""
    factory = importlib.import_module("uvloop").new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
