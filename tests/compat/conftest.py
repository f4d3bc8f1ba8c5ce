"""torchrl warns of much that is not ours to change."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchrl.collectors
        import torchrl.modules.inference_server  # noqa: F401
    except ImportError:  # its tests are skipped then
        pass


@pytest.fixture(autouse=True)
def _cheap_processes() -> Iterator[None]:
    """torchrl's processes are forked from a server that has imported everything, not spawned."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Its warnings are no errors here."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


collect_ignore = ["suite"]  # written in torchrl's names alone: test_suite.py runs it
