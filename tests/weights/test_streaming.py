"""A copy past the caches gives the same bytes as ``memmove``, and large copies are made by it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aiosync.weights import copying, streaming
from aiosync.weights.streaming import WORTH_STREAMING, Move
from tests.kit.clock import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

X86_LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
WITH_MKL = X86_LINUX and torch.backends.mkl.is_available()
needs_mkl = pytest.mark.skipif(not WITH_MKL, reason="this torch has no oneMKL")

ROW = streaming._ROW


def _move() -> Move:
    move = streaming._of_mkl()  # also on processors that do not gain by it
    assert move is not None
    return move


@needs_mkl
@pytest.mark.parametrize("nbytes", [0, 1, ROW - 1, ROW, 2 * ROW + 5, 5 * ROW - 3])
def test_any_length_and_any_alignment(nbytes: int) -> None:
    for from_, to in product([0, 1, 2, 4, 63], [0, 1, 3, 4, 60]):
        source = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8)
        destination = torch.full_like(source, 7)
        _move()(destination.data_ptr() + to, source.data_ptr() + from_, nbytes)
        assert torch.equal(destination[to : to + nbytes], source[from_ : from_ + nbytes])
        assert (destination[:to] == 7).all()
        assert (destination[to + nbytes :] == 7).all()


@needs_mkl
@pytest.mark.parametrize("flushed", [False, True])
def test_bytes_that_are_no_numbers(flushed: bool) -> None:
    try:
        torch.set_flush_denormal(flushed)
        for first in range(0, 1 << 32, 1 << 29):  # a number of each 257: all exponents and all last bytes
            source = torch.arange(first, first + (1 << 29), 257).to(torch.int32)
            destination = torch.zeros_like(source)
            _move()(destination.data_ptr(), source.data_ptr(), source.nbytes)
            assert torch.equal(destination, source)
    finally:
        torch.set_flush_denormal(False)


@needs_mkl
@pytest.mark.parametrize("shift", [-ROW, -5, 0, 5, ROW])
def test_memory_that_overlaps(shift: int) -> None:
    memory = torch.randint(0, 256, (8 * ROW,), dtype=torch.uint8)
    expected = memory.clone()
    begin, nbytes = 2 * ROW, 3 * ROW + 7
    expected[begin + shift : begin + shift + nbytes] = memory[begin : begin + nbytes].clone()
    _move()(memory.data_ptr() + begin + shift, memory.data_ptr() + begin, nbytes)
    assert torch.equal(memory, expected)


@needs_mkl
def test_a_copy_starts_no_threads_and_leaves_onemkl_its_own() -> None:
    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    move = _move()
    source = torch.ones(4 << 20)
    destination = torch.zeros_like(source)
    started: list[str] = []
    numbers: list[int] = []

    def copy() -> None:  # oneMKL has a number for each thread. torch sets it when it computes there first
        mkl.MKL_Set_Num_Threads_Local(3)
        before = set(os.listdir("/proc/self/task"))
        move(destination.data_ptr(), source.data_ptr(), source.nbytes)
        started.extend(set(os.listdir("/proc/self/task")) - before)
        numbers.append(mkl.MKL_Set_Num_Threads_Local(0))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert started == []
    assert numbers == [3]
    assert torch.equal(destination, source)


@pytest.mark.parametrize("changed", ["first byte", "last bytes", "signalling NaNs"])
def test_a_copy_that_changes_bytes_is_not_used(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes - 3 * (changed == "last bytes"))
        if changed == "first byte":
            ctypes.memset(destination, 1, 1)
        if changed == "signalling NaNs":
            words = (ctypes.c_uint32 * (nbytes // 4)).from_address(destination)
            for i, word in enumerate(words):
                if word & 0x7F800000 == 0x7F800000 and word & 0x007FFFFF:
                    words[i] = word | 0x00400000  # what arithmetic does to them

    monkeypatch.setattr(streaming, "_of_mkl", lambda: move)
    monkeypatch.setattr(streaming, "_is_faster", lambda _: True)
    assert streaming._checked_move.__wrapped__() is None


@pytest.mark.parametrize("faster", [False, True])
def test_a_copy_that_takes_longer_is_not_used(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes if nbytes < streaming._TRIED else 1)
        if not faster:
            time.sleep(0.05)

    monkeypatch.setattr(streaming, "_of_mkl", lambda: move)
    assert streaming._checked_move.__wrapped__() is (move if faster else None)


@needs_mkl
@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_a_process_without_memory_for_the_checks(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> mmap.mmap:
        raise error

    monkeypatch.setattr(streaming, "_pages", refuse)
    assert streaming._checked_move.__wrapped__() is None


def test_a_torch_without_onemkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    assert streaming._checked_move.__wrapped__() is None


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_large_copies_are_streamed(large: bool, available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    def move(destination: int, source: int, nbytes: int) -> None:
        moved.append(nbytes)
        ctypes.memmove(destination, source, nbytes)

    monkeypatch.setattr(copying, "streaming_move", lambda: move if available else None)
    sources = list(torch.randn(WORTH_STREAMING // 4 - 4 * (not large)).split(1 << 20))
    pairs = [(torch.zeros_like(source), source) for source in sources]
    (lane,) = copying.copy_lanes(pairs, 1)
    assert lane(lambda: False)
    assert all(torch.equal(destination, source) for destination, source in pairs)
    assert moved == ([source.nbytes for source in sources] if large and available else [])


class _Interrupt(BaseException):
    pass


@needs_mkl
def test_an_interrupted_copy_leaves_onemkl_its_threads() -> None:
    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    source = torch.ones(16 << 20)
    destination = torch.zeros_like(source)

    def interrupt(*_: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    number = mkl.MKL_Set_Num_Threads_Local(3)
    try:
        with pytest.raises(_Interrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.002)  # the copy takes longer
            for _ in range(1000):
                _move()(destination.data_ptr(), source.data_ptr(), source.nbytes)
    finally:
        signal.signal(signal.SIGALRM, before)
        left = mkl.MKL_Set_Num_Threads_Local(number)
        assert left in {3, 0}  # 0: interrupted within a microsecond. It follows OpenMP's then


@needs_mkl
@pytest.mark.parametrize("mode", [partial(torch.device, "meta"), FakeTensorMode], ids=["meta", "fake"])
def test_the_users_default_device_and_mode_do_not_matter(mode: Callable[[], Any]) -> None:
    with mode():
        assert streaming._copies_all_bytes(_move())
        streaming._is_faster(_move())


_FORKED = """
import os, threading, torch
from aiosync.weights import streaming
torch.ones(1 << 22).add_(1).sum()  # starts OpenMP threads, which the child does not have
with streaming._checking.setdefault(os.getpid(), threading.Lock()):
    child = os.fork()
    if child == 0:
        streaming.streaming_move()
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child() -> None:
    subprocess.run([sys.executable, "-c", _FORKED], check=True, timeout=PATIENCE, cwd=ROOT)


def test_threads_wait_for_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []

    def check() -> None:
        checks.append(threading.get_ident())
        time.sleep(0.05)

    monkeypatch.setattr(streaming, "_of_mkl", check)
    monkeypatch.setattr(streaming, "_checked_move", functools.cache(streaming._checked_move.__wrapped__))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: streaming.streaming_move(), range(4)))
    assert len(checks) == 1
