"""What talks to sockets is tested on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

ON_BOTH = {
    "test_distributed.py",
    "test_relay.py",
    "test_tcp.py",
    "test_tcp_races.py",
    "test_tcp_security.py",
    "test_unix_memory.py",
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio, and uvloop where that matters."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in ON_BOTH:
        loops["uvloop"] = uvloop.new_event_loop
    return loops
