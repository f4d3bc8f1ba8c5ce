"""Tests of memory that is read through a socket's peer run on both event loops."""

from __future__ import annotations

import pytest

from tests.kit.loops import ASYNCIO, LOOPS, LoopFactories


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """asyncio; and uvloop for shared memory of one machine."""
    return LOOPS if item.path.name == "test_unix_memory.py" else ASYNCIO
