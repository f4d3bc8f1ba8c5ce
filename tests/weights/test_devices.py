"""Pinned memory, as far as it can be tested without a GPU: a stand-in for CUDA's runtime."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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


def make_small() -> Segment:
    return Segment.shared(4096)


@pytest.mark.parametrize("make", [make_private, make_shared, make_attached, make_small])
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


def test_private_copies_are_not_pinned(runtime: Runtime) -> None:
    owner = Segment.shared(8 * MIB)
    privately = Segment.attach(owner.handle_for(0), private=True)
    for buffer in (privately.buffer, torch.empty(8 * MIB, dtype=torch.uint8)):
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


class Stream:
    """A stream of CUDA that is idle, busy, or captures a graph: then it may not be asked."""

    device = DEVICE

    def __init__(self, state: str = "idle") -> None:
        self.state = state

    def query(self) -> bool:
        assert self.state != "captures"
        return self.state == "idle"

    def synchronize(self) -> None:
        assert self.state != "captures"
        self.state = "idle"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """All streams of :data:`DEVICE`; the first is the default one."""
    found = [Stream() for _ in range(4)]

    def ask(handle: ctypes.c_void_p, status: Any) -> int:
        status._obj.value = found[(handle.value or 0) - 1].state == "captures"
        return 0

    handles = [(stream, ctypes.c_void_p(n) if n > 1 else None) for n, stream in enumerate(found, 1)]
    monkeypatch.setattr(devices, "_streams_of", lambda device: handles)
    monkeypatch.setattr(devices, "_ask_for_capture", lambda: ask)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return found


def test_all_of_torchs_streams_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 of each priority, and returns them in turn."""
    default, pools = Mock(cuda_stream=0), {p: [Mock(cuda_stream=1) for _ in range(32)] for p in range(-3, 1)}
    turns = {priority: cycle(pool) for priority, pool in pools.items()}

    class Streams:
        priority_range = staticmethod(lambda: (0, -3))

        def __new__(cls, device: torch.device, priority: int) -> Any:
            return next(turns[priority])

    monkeypatch.setattr(torch.cuda, "Stream", Streams)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    for priority in pools:
        next(turns[priority])  # a user's
    found = devices._streams_of.__wrapped__(DEVICE)
    assert found[0] == (default, None)
    assert {id(stream) for stream, _ in found[1:]} == {id(s) for pool in pools.values() for s in pool}
    assert all(handle is not None for _, handle in found[1:])


@pytest.mark.parametrize("busy", [0, 1, 3])
def test_a_device_is_idle_when_all_its_streams_are(streams: list[Stream], busy: int) -> None:
    assert devices.are_idle([DEVICE])
    streams[busy].state = "busy"
    assert not devices.are_idle([DEVICE])
    devices.wait_for_devices([DEVICE])
    assert devices.are_idle([DEVICE])


def test_a_stream_that_captures_is_not_asked(streams: list[Stream]) -> None:
    streams[2].state = "captures"
    assert devices.are_idle([DEVICE])
    devices.wait_for_devices([DEVICE])
    streams[3].state = "busy"
    assert not devices.are_idle([DEVICE])


@pytest.fixture
def own(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream of this package's copies."""
    found = Stream()
    monkeypatch.setattr(devices, "_own_streams", {DEVICE: found})
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return found


@pytest.mark.parametrize("settled", [False, True])
def test_copies_wait_for_a_device_that_is_not_settled(
    streams: list[Stream], own: Stream, settled: bool
) -> None:
    streams[1].state = "busy"
    with devices.copying_on([DEVICE], settled=settled):
        assert streams[1].state == ("busy" if settled else "idle")
        own.state = "busy"
    assert own.state == "idle"


def test_queued_copies_are_waited_for_by_the_caller_or_if_an_error_ends_them(
    streams: list[Stream], own: Stream
) -> None:
    memory = torch.ones(8)
    kept = weakref.ref(memory)
    with devices.queueing_on([DEVICE]) as copies:
        assert copies is not None
        copies.add([torch.zeros(8)], [memory], non_blocking=True)
        own.state = "busy"
    del memory
    assert kept() is not None
    assert not copies.are_done()
    copies.wait()
    assert copies.are_done()
    assert kept() is None
    with pytest.raises(KeyError), devices.queueing_on([DEVICE]):
        own.state = "busy"
        raise KeyError
    assert own.state == "idle"


def test_an_error_of_cuda_is_not_a_capture(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks again, and raises the error."""
    monkeypatch.setattr(devices, "_ask_for_capture", lambda: lambda handle, status: 1)
    monkeypatch.setattr(devices, "_captures", lambda stream: stream.state == "captures")
    streams[2].state, streams[3].state = "captures", "busy"
    assert not devices.are_idle([DEVICE])
    devices.wait_for_devices([DEVICE])
    assert devices.are_idle([DEVICE])


def test_nothing_is_asked_while_a_thread_captures(streams: list[Stream]) -> None:
    begun, done = threading.Event(), threading.Event()

    def capture() -> None:
        with devices.undisturbed():
            begun.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(PATIENCE)
    for stream in streams:
        stream.state = "captures"
    assert not devices.are_idle([DEVICE])  # and does not wait for the other thread
    with devices.queueing_on([DEVICE]) as copies:
        assert copies is None
    done.set()
    thread.join(PATIENCE)
    for stream in streams:
        stream.state = "idle"
    assert devices.are_idle([DEVICE])


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    with devices.sharing():
        pid = os.fork()
        if pid == 0:
            with devices.undisturbed():
                os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
