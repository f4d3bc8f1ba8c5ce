"""For all tests: the server that workers are forked from, and the leak check."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import logging
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
import uvloop
from hypothesis import settings
from torch._C._distributed_c10d import TCPStore

from aiosync.sync._portal import portal
from aiosync.transfer import yield_request
from aiosync.transfer.yield_request import YieldRequest
from tests.kit.leaks import Snapshot, mark_what_is_ours
from tests.kit.processes import warm_up
from tests.kit.rpc import World
from tests.kit.schedule import arrange

# torch looks up the name of whoever connects to a store. Where nobody answers that, it is not to take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Ray starts its workers with niceness 15: beside other programs on the same processors they would take
# minutes to import torch, and the calls of the tests would time out.
os.environ.setdefault("RAY_worker_niceness", "0")

# Other programs on the machine must not make an example too slow.
settings.register_profile("aiosync", deadline=None)
settings.load_profile("aiosync")

CHECKED = (
    "tests.collectors",
    "tests.conformance",
    "tests.protocol",
    "tests.schemes",
    "tests.sync",
    "tests.transports",
)
"""Packages whose every test is checked for leaks."""

UNCHECKED = "tests.transports.test_nccl"
"""NCCL keeps sockets until the process ends."""

_before: pytest.StashKey[Snapshot] = pytest.StashKey()
_warm: pytest.StashKey[bool] = pytest.StashKey()


async def _nothing() -> None:
    await asyncio.sleep(0)


async def _listen_once() -> None:
    """The portal's loop keeps a descriptor in reserve from the first time that it listens."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    server.close()
    await server.wait_closed()


def _warm_up_once(config: pytest.Config) -> None:
    """What is made once per process is made before anything is counted."""
    if not config.stash.get(_warm, False):
        config.stash[_warm] = True
        mark_what_is_ours()
        warm_up()
        portal().call(_listen_once)
        asyncio.run(_nothing())
        uvloop.run(_nothing())
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the first keeps a pipe
        World().close()  # torch RPC keeps what it talks to itself by
        if torch.cuda.is_available():
            torch.zeros(
                1, device="cuda"
            ).untyped_storage()._share_cuda_()  # CUDA keeps what it opens for that
        # Collecting is quick from here on: what was imported is not looked through each time.
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before pytest-xdist reads the marks."""
    arrange(items, config.rootpath)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that pytest-xdist keeps tests of one unit together. Otherwise nothing fails, and each process
    starts what is expensive."""
    if getattr(session.config.option, "loadgroup", False):
        apart = [item.nodeid for item in session.items if "@" not in item.nodeid]
        if apart:
            raise pytest.UsageError(f"pytest-xdist ignores the groups of tests with this pytest: {apart[0]}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Count before any fixture is made."""
    if item.get_closest_marker("soak") is not None:
        # Frames of threads that go on while they are written down may crash the process.
        faulthandler.cancel_dump_traceback_later()
    name = item.nodeid.replace("/", ".")
    if name.startswith((*CHECKED, "tests.compat")):
        _warm_up_once(item.config)
    if name.startswith(CHECKED) and not name.startswith(UNCHECKED):
        gc.collect()
        item.stash[_before] = Snapshot.take()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Count again when every fixture is gone, the event loop too."""
    yield
    before = item.stash.get(_before, None)
    if before is not None:
        left = before.left_since()
        assert not left, f"left behind: {left}"


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Every task that the test's loop ran has ended when the test has."""
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    if left:
        # What is about to end has a moment to do so.
        await asyncio.wait(left, timeout=0.1)
    left = {task for task in left if not task.done()}
    assert not left, f"tasks left behind: {left}"


@pytest.fixture
def no_request_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """When the test has ended, no sender asks its workers to yield, and all requests are closed."""
    made: list[YieldRequest] = []
    make = YieldRequest.__init__

    def making(request: YieldRequest) -> None:
        make(request)
        made.append(request)

    monkeypatch.setattr(YieldRequest, "__init__", making)
    yield
    assert all(request._sends == 0 and request not in yield_request._open for request in made)


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Litestar and `aiosync relay` configure the root logger. The next test has the one of before."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def _checked(request: pytest.FixtureRequest) -> None:
    function = getattr(request.node, "function", None)
    if request.node.nodeid.replace("/", ".").startswith(CHECKED):
        request.getfixturevalue("no_request_left")
        if inspect.iscoroutinefunction(function):
            request.getfixturevalue("no_task_left")
