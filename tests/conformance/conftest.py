"""The conformance suite runs every test on both event loops, over every scheme."""

from __future__ import annotations

import pytest

from aiosync.transports.torch_distributed import process_group
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.loops import LOOPS, LoopFactories


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """asyncio and uvloop."""
    return LOOPS


@pytest.fixture(params=SCHEMES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SchemeCase:
    """Every scheme, with sender and workers wherever they can be."""
    return _prepared(request.param, monkeypatch)


@pytest.fixture(params=[c for c in SCHEMES if c.processes], ids=lambda case: case.name)
def process_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SchemeCase:
    """Every scheme whose workers can be processes of their own."""
    return _prepared(request.param, monkeypatch)


def _prepared(case: SchemeCase, monkeypatch: pytest.MonkeyPatch) -> SchemeCase:
    if case.name == "distributed-broadcast":
        # gloo holds a thread that waits for a dead rank, and no test may leave a thread behind.
        monkeypatch.setattr(process_group, "STALLED", 3.0)
    return case


_IN_THE_SOAK = (
    "unix-tls",
    "process-pipes",
    "uvloop-tcp-tls",
    "asyncio-unix",
    "uvloop-memory",
    "uvloop-rpc",
    "asyncio-distributed",
    "asyncio-process",
)
"""TLS is tested over TCP, Unix sockets without it, and pipes are what queues have inside. What queues,
process groups, RPC and a process by itself do with a loop is the same."""


_OF_BROADCASTS = ("test_g01_deadlines", "test_g07_one_bad_worker", "test_g12_late_and_returning")
"""Where a broadcast differs from a transfer to each worker: one worker may hold up the others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What others have in parts takes its minutes in the soak."""
    for item in items:
        if item.path.parent.name != "conformance":
            continue
        elsewhere = "distributed-broadcast" in item.name and item.path.stem not in _OF_BROADCASTS
        if elsewhere or any(name in item.name for name in _IN_THE_SOAK):
            item.add_marker(pytest.mark.soak)
