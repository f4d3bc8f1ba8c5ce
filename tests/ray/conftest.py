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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each scheme on one loop, and the second only where it takes no actors; the rest in the soak: what they
    do with a loop is the same, and so is what they do with actors."""
    for item in items:
        if item.path.stem == "test_conformance" and isinstance(item, pytest.Function):
            modules = "ray-modules" in item.name
            elsewhere = ("uvloop" if modules else "asyncio") not in item.name
            if elsewhere or (modules and "process_case" in item.fixturenames):
                item.add_marker(pytest.mark.soak)
