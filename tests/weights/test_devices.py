"""Pinned memory, as far as it can be tested without a GPU: a stand-in for CUDA's runtime."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from aiosync.weights import devices
from aiosync.weights.segment import Segment
from tests.kit.clock import PATIENCE

MIB = 1 << 20
DEVICE = torch.device("cuda:0")


class Runtime:
    """Notes what is registered. Refuses with ``error``."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text(encoding="utf-8"), "unmapped before"
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    gc.collect()  # memory that tests before have pinned
    monkeypatch.setattr(devices, "_cudart", lambda: found)
    monkeypatch.setattr(devices, "using", lambda device: nullcontext())
    return found


def make_private() -> Segment:
    return Segment.private(8 * MIB)


def make_shared() -> Segment:
    return Segment.shared(8 * MIB)


def make_attached() -> Segment:
    owner = Segment.shared(8 * MIB)
    return Segment.attach(owner.handle_for(0))


@pytest.mark.parametrize("make", [make_private, make_shared, make_attached])
def test_memory_is_pinned_once_until_nothing_views_it(runtime: Runtime, make: Any) -> None:
    segment = make()
    address, view = segment.buffer.data_ptr(), segment.buffer[MIB : 2 * MIB]
    for _ in range(3):
        devices.pin_memory_of(segment.buffer, DEVICE)
    assert runtime.calls == [("register", address)]
    segment.close()
    del segment
    gc.collect()
    assert runtime.calls == [("register", address)], "a tensor views it"
    view.fill_(1)
    del view
    gc.collect()
    assert runtime.calls == [("register", address), ("unregister", address)]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(runtime: Runtime) -> None:
    runtime.error = 2
    segment = Segment.shared(8 * MIB)
    address = segment.buffer.data_ptr()
    for _ in range(3):
        devices.pin_memory_of(segment.buffer, DEVICE)
    segment.buffer.fill_(1)
    del segment
    gc.collect()
    assert runtime.calls == [("register", address)]


def test_small_and_private_copies_are_not_pinned(runtime: Runtime) -> None:
    owner = Segment.shared(8 * MIB)
    privately = Segment.attach(owner.handle_for(0), private=True)
    for buffer in (privately.buffer, Segment.shared(4096).buffer, torch.empty(8 * MIB, dtype=torch.uint8)):
        devices.pin_memory_of(buffer, DEVICE)
    assert runtime.calls == []


def test_a_forked_child_does_not_touch_what_its_parent_has_pinned(runtime: Runtime) -> None:
    segment = Segment.shared(8 * MIB)
    devices.pin_memory_of(segment.buffer, DEVICE)
    before = len(runtime.calls)
    pid = os.fork()
    if pid == 0:
        del segment
        gc.collect()
        os._exit(len(runtime.calls) - before)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_capture_is_alone(runtime: Runtime) -> None:
    """It waits for threads that use a device, and they wait for it; the thread that captures may use one."""
    order: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def use() -> None:
        with devices.sharing():
            inside.set()
            assert go_on.wait(PATIENCE)
            order.append("used")

    def capture() -> None:
        with devices.undisturbed(), devices.sharing():
            order.append("captured")

    threads = [threading.Thread(target=use)]
    threads[0].start()
    assert inside.wait(PATIENCE)
    threads.append(threading.Thread(target=capture))
    threads[1].start()
    threads[1].join(0.05)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["used", "captured"]


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    with devices.sharing():
        pid = os.fork()
        if pid == 0:
            with devices.undisturbed():
                os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
