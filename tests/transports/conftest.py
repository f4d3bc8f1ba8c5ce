"""Tests of sockets run on both event loops."""

from __future__ import annotations

from typing import Any

import pytest

from aiosync.transfer.broadcast import BroadcastGroup
from tests.kit.loops import ASYNCIO, LOOPS, LoopFactories

ON_BOTH = {
    "test_distributed.py",
    "test_mp.py",
    "test_tcp.py",
    "test_tcp_races.py",
    "test_tcp_security.py",
    "test_unix_socket.py",
}


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """asyncio; and uvloop for the files in :data:`ON_BOTH`."""
    return LOOPS if item.path.name in ON_BOTH else ASYNCIO


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that went to all at once."""
    sent: list[int] = []
    begin = BroadcastGroup.start

    def note(self: BroadcastGroup, published: Any) -> None:
        if published.version not in sent:
            sent.append(published.version)
        begin(self, published)

    monkeypatch.setattr(BroadcastGroup, "start", note)
    return sent
