"""Tests of relays run on both event loops."""

from __future__ import annotations

import pytest

from tests.kit.loops import LOOPS, LoopFactories


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """asyncio and uvloop."""
    return LOOPS
