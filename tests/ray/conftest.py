"""The conformance suite runs on both event loops here too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.conformance.conftest import LOOPS


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio and uvloop; what Ray itself does is the same on both."""
    both = item.path.stem == "test_conformance"
    return LOOPS if both else {"asyncio": LOOPS["asyncio"]}
