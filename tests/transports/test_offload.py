"""Threads: detached ones do their queued work, also if the process ends first. Copies use all processors."""

import asyncio
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiosync import _processors
from aiosync.transports import _offload
from aiosync.transports._offload import DetachedThread, Offloader
from aiosync.weights.copying import copy_with_torch
from tests.kit.clock import PATIENCE, eventually, within
from tests.test_processors import ROOT, needs_openmp


def _leave(path: Path) -> None:
    """End with a word that is still to be said."""
    thread = DetachedThread("aiosync-test")
    thread.submit(lambda: time.sleep(0.3))
    thread.submit(lambda: path.write_text("said"))
    thread.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_says_its_last_word(method: str, tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_leave, args=(tmp_path / "word",))
    process.start()
    process.join(30)
    code = process.exitcode
    process.close()
    assert code == 0
    assert (tmp_path / "word").read_text() == "said"


def test_a_script_says_its_last_word(tmp_path: Path) -> None:
    code = (
        "import pathlib; from tests.transports.test_offload import _leave;"
        f"_leave(pathlib.Path({str(tmp_path / 'word')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
    assert (tmp_path / "word").read_text() == "said"


def _pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    large = [torch.rand(5 << 20) for _ in range(4)]  # several pieces
    rest = [torch.rand(3), torch.rand(64, 64).t(), torch.rand(1 << 16, dtype=torch.float64)]
    return [(torch.zeros(each.shape), each) for each in large + rest]


async def _copies(offloader: Offloader) -> None:
    pairs = _pairs()
    assert await within(offloader.copy(pairs))
    assert all(torch.equal(d, s.to(d.dtype)) for d, s in pairs)


@pytest.mark.skipif(
    not 2 <= len(_processors.allowed_processors()) <= _offload._LANES, reason="Linux, a few processors"
)
async def test_each_lane_of_a_copy_has_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = _processors.allowed_processors()
    monkeypatch.setattr(torch, "get_num_threads", lambda: len(allowed))
    seen: dict[int, list[int]] = {}

    def note() -> bool:
        seen[threading.get_native_id()] = _processors.allowed_processors()
        while len(seen) < len(allowed) + 1:  # one more copies what has no lanes
            time.sleep(0.001)
        return False

    offloader = Offloader("aiosync-test")
    try:
        for there in (allowed, allowed, allowed[:1]):  # the last: the program may use one of them only
            monkeypatch.setattr(_offload, "allowed_processors", lambda there=there: there)
            pairs = _pairs()
            seen.clear()
            assert await offloader.copy(pairs, note)
            assert all(torch.equal(d, s.to(d.dtype)) for d, s in pairs)
            bound = [each for each in seen.values() if len(each) == 1]
            assert sorted(bound) == ([[number] for number in allowed] if there is allowed else [])
        assert _processors.allowed_processors() == allowed  # of this thread
    finally:
        offloader.close()


@pytest.mark.skipif(
    not 2 <= len(_processors.allowed_processors()) <= _offload._LANES, reason="Linux, a few processors"
)
async def test_a_lane_whose_processor_is_busy_does_not_hold_up_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", _processors.processors)
    offloader, free = Offloader("aiosync-test"), threading.Event()
    try:
        assert await offloader.copy(_pairs())
        for threads in list(offloader._bound.values())[1:]:
            threads.submit(free.wait)
        await _copies(offloader)
    finally:
        free.set()
        offloader.close()


async def test_no_lane_is_cancelled_before_all_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch copies is ready before the first lane begins."""
    monkeypatch.setattr(torch, "get_num_threads", _processors.processors)
    offloader, free = Offloader("aiosync-test"), threading.Event()

    def copy(*args: Any, **options: Any) -> bool:
        try:
            return copy_with_torch(*args, **options)
        finally:
            threading.Timer(0.1, free.set).start()

    monkeypatch.setattr("aiosync.transports._offload.copy_with_torch", copy)
    try:
        assert await offloader.copy(_pairs())
        free.clear()
        for threads in offloader._bound.values():
            threads.submit(free.wait)
        await _copies(offloader)
    finally:
        free.set()
        offloader.close()


class Queued:
    """A copy that a device has not done until :attr:`done`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.waited = False
        self.waits = 0

    def are_done(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.waits += 1
        assert self.done.wait(PATIENCE)
        self.waited = True


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Queued:
    """What each copy is."""
    found = Queued()
    monkeypatch.setattr(_offload, "queue_copy", lambda pairs: found)
    return found


@pytest.fixture
def offloader() -> Iterator[Offloader]:
    found = Offloader("aiosync-test")
    yield found
    found.close()


async def test_a_copy_that_a_device_has_done_needs_no_thread(offloader: Offloader, queued: Queued) -> None:
    queued.done.set()
    assert await offloader.copy([])
    assert not await offloader.copy([], lambda: True)
    assert not queued.waits
    assert offloader._executor is None


async def test_a_thread_waits_for_a_device(offloader: Offloader, queued: Queued) -> None:
    copying = asyncio.create_task(offloader.copy([]))
    await eventually(lambda: queued.waits > 0, "the wait")  # the event loop runs
    assert not copying.done()
    queued.done.set()
    assert await within(copying)


async def test_a_cancelled_copy_ends_when_the_device_has_done_it(
    offloader: Offloader, queued: Queued
) -> None:
    copying = asyncio.create_task(offloader.copy([]))
    await eventually(lambda: queued.waits > 0, "the wait")
    for _ in range(3):
        copying.cancel()
        await asyncio.sleep(0.01)
        assert not copying.done()
    queued.done.set()
    with pytest.raises(asyncio.CancelledError):
        await within(copying)
    assert queued.waits == 1  # not a second time, on the event loop


async def test_a_copy_that_no_thread_can_wait_for_is_waited_for(
    offloader: Offloader, queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*args: object) -> None:
        threading.Timer(0.05, queued.done.set).start()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(offloader, "run", cannot)
    with pytest.raises(RuntimeError, match="new thread"):
        await offloader.copy([])
    assert queued.waited
    assert queued.done.is_set()


_CONVERT = """
import asyncio, torch
from aiosync import _processors
from aiosync.transports._offload import Offloader
from tests.test_processors import native_threads
torch.set_num_threads(_processors.processors())
torch.ones(1 << 20).add_(1)
async def only(count):
    while native_threads() != count:  # the kernel still has an ended one for a moment
        await asyncio.sleep(0.001)
async def main():
    before, offloader = native_threads(), Offloader("aiosync-test")
    for _ in range(3):
        await offloader.copy([(torch.zeros(1 << 20), torch.ones(1 << 20, dtype=torch.float64))])
        await only(before)
    await offloader.run(lambda _: torch.ones(1 << 20).add_(1))
    await only(before)
    offloader.close()
asyncio.run(main())
"""


@needs_openmp
def test_threads_of_the_package_keep_no_openmp_threads() -> None:
    subprocess.run([sys.executable, "-c", _CONVERT], check=True, timeout=PATIENCE, cwd=ROOT)
