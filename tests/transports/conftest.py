"""Tests of sockets run on both event loops."""

from __future__ import annotations

import pytest

from tests.kit.loops import ASYNCIO, LOOPS, LoopFactories

ON_BOTH = {
    "test_distributed.py",
    "test_tcp.py",
    "test_tcp_races.py",
    "test_tcp_security.py",
}


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """asyncio; and uvloop for the files in :data:`ON_BOTH`."""
    return LOOPS if item.path.name in ON_BOTH else ASYNCIO
