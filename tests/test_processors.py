"""Event loops and torch's threads where several processes compute."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import platform
import struct
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from aiosync import _processors
from aiosync.sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, _portal
from tests.kit.clock import PATIENCE

ROOT = Path(__file__).resolve().parents[1]

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def _slice() -> int:
    """Nanoseconds of the calling thread's time slices; 0: the system's own."""
    found = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).syscall(_SCHED_GETATTR[platform.machine()], 0, found, 64, 0)
    return int(struct.unpack_from("IIQiIQ", found.raw)[5])


def _in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


needs_slices = pytest.mark.skipif(
    platform.machine() not in _SCHED_GETATTR or sys.platform != "linux", reason="Linux only"
)


@needs_slices
def test_time_slices_are_of_one_thread() -> None:
    before = _slice()
    found: list[int] = []

    def shorten() -> None:
        os.nice(1)
        _processors.shorten_time_slices()
        found.append(_slice())
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        _in_thread(lambda: found.append(_slice()))
        if (child := os.fork()) == 0:
            os._exit(_slice() == _processors._SLICE)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    nice = os.getpriority(os.PRIO_PROCESS, 0)
    _in_thread(shorten)
    there, priority, of_thread, in_child = found
    if there != before:  # Linux 6.12
        assert there == _processors._SLICE
    assert (priority, of_thread, in_child) == (nice + 1, before, 0)
    assert _slice() == before


@needs_slices
@pytest.mark.parametrize("end", ["returns", "raises"])
def test_slices_are_short_in_a_body_only(end: str) -> None:
    found: list[int] = []

    def wait() -> None:
        os.nice(1)
        found.append(_slice())
        with suppress(ZeroDivisionError), _processors.short_time_slices():
            with _processors.short_time_slices():
                found.append(_slice())
            found.append(_slice())
            if end == "raises":
                raise ZeroDivisionError
        found.append(_slice())
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        if (child := os.fork()) == 0:
            os._exit(_slice() != found[0])
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    nice = os.getpriority(os.PRIO_PROCESS, 0)
    _in_thread(wait)
    before, inner, outer, after, priority, in_child = found
    assert inner == outer
    assert inner in ({before, _processors._SLICE} if before == 0 else {_processors._SLICE})
    assert (after, priority, in_child) == (before, min(nice + 1, 19), 0)


@needs_slices
def test_a_blocking_call_waits_with_short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = _slice(), list[int]()
    wait = _portal._Call.wait

    def waited(call: Any) -> None:
        found.append(_slice())
        wait(call)

    async def nothing() -> None:
        pass

    monkeypatch.setattr(_portal._Call, "wait", waited)
    _portal.portal().call(nothing)
    assert found == [_processors._SLICE if before else 0]
    assert _slice() == before


@needs_slices
def test_another_policy_is_left_alone() -> None:
    found: list[int] = []

    def wait() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = _slice()
        with _processors.short_time_slices():
            found.append(_slice() - before)
        _processors.shorten_time_slices()
        found.append(_slice() - before)
        found.append(os.sched_getscheduler(0))

    _in_thread(wait)
    assert found == [0, 0, os.SCHED_BATCH]


@needs_slices
def test_what_others_change_during_a_body_stays() -> None:
    found: list[int] = []

    def wait() -> None:
        found.append(_slice())
        with _processors.short_time_slices():
            os.nice(1)
        found.append(_slice())
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    nice = os.getpriority(os.PRIO_PROCESS, 0)
    _in_thread(wait)
    before, after, priority = found
    assert (after, priority) == (before, min(nice + 1, 19))


@pytest.mark.parametrize("machine", ["riscv64", ""])
def test_other_machines_keep_their_slices(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)

    def wait() -> None:
        _processors.shorten_time_slices()
        with _processors.short_time_slices():
            pass

    _in_thread(wait)


@pytest.mark.parametrize(
    ("threads", "workers", "there", "teams"),
    [
        (1, 99, 2, 0),  # they do not wait for each other
        (2, 3, 6, 0),  # there are enough processors
        (2, 3, 2, 1),
        (64, 5, 128, 2),
        (2, 99, 64, 0),  # it would take too many
    ],
)
def test_threads_for_whom_there_are_no_processors(
    threads: int, workers: int, there: int, teams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(_processors, "_hold_team", held.append)
    monkeypatch.setattr(_processors, "processors", lambda: there)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    _processors._keep_from_spinning.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for warn in (False, True):
            _processors.share_processors(workers, warn=warn)
    for thread in threading.enumerate():
        if thread.name == "aiosync-openmp":
            thread.join()
    _processors._keep_from_spinning.cache_clear()
    assert held == [threads] * teams
    assert len(warned) == (threads > 1 and threads * workers > there)
    for each in warned:
        assert f"{threads} threads in each of {workers} workers, on {there} processors" in str(each.message)


_RELEASE = """
import torch
from aiosync import _processors
from tests.test_processors import native_threads
count = _processors.processors()
torch.set_num_threads(count)
before = native_threads()
def compute():
    assert torch.ones(1 << 20).add_(1).sum() == 1 << 21
    assert native_threads() == before + count - 1
for _ in range(3):
    compute()
    _processors.release_openmp_threads()
    while native_threads() != before:  # the kernel still has an ended one for a moment
        pass
compute()
torch.set_num_threads(1)
_processors.release_openmp_threads()  # torch leaves processors free
assert native_threads() == before + count - 1
"""

_RELEASE_IN_A_CHILD = """
import os, torch
{before}
torch.set_num_threads(os.cpu_count())
torch.ones(1 << 20).add_(1)
if (child := os.fork()) == 0:  # it has none of the threads
    from aiosync import _processors
    _processors.release_openmp_threads()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def native_threads() -> int:
    """How many threads this process has that are not Python's."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


needs_openmp = pytest.mark.skipif(
    sys.platform != "linux"
    or not 2 <= _processors.processors() <= _processors.MOST_RELEASED
    or _processors._openmp_pause() is None,
    reason="Linux, a few processors and GNU OpenMP",
)


@needs_openmp
def test_openmp_threads_are_ended_and_started_again() -> None:
    subprocess.run([sys.executable, "-c", _RELEASE], check=True, timeout=PATIENCE, cwd=ROOT)


@needs_openmp
@pytest.mark.parametrize("before", ["", "import aiosync._processors"], ids=["imported after", "before"])
def test_openmp_threads_that_a_fork_has_lost(before: str) -> None:
    script = _RELEASE_IN_A_CHILD.format(before=before)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE, cwd=ROOT)


def _receive(scheme: Any, index: int, threads: int, found: Any) -> None:
    """Say what connecting has warned of, and how many Python threads hold a team."""
    torch.set_num_threads(threads)
    model = torch.nn.Linear(2, 2)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scheme.connect()
    names = [thread.name for thread in threading.enumerate()]
    ours = [str(each.message) for each in warned if "torch.set_num_threads" in str(each.message)]
    found.put((index, ours, names.count("aiosync-openmp")))
    scheme.shutdown()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_the_first_worker_warns(kind: Any, method: str) -> None:
    threads = _processors.processors()  # in one process they would have room
    ctx: Any = mp.get_context(method)
    scheme = kind(timeout=PATIENCE)
    given = {"ctx": ctx} if kind is MultiProcessWeightSyncScheme else {}
    scheme.init_on_sender(model_id="policy", model=torch.nn.Linear(2, 2), num_workers=2, **given)
    found = ctx.SimpleQueue()
    workers = [
        ctx.Process(target=_receive, args=(scheme, index, threads, found), daemon=True) for index in (0, 1)
    ]
    for worker in workers:
        worker.start()
    with scheme:
        (_, first, held), (_, other, held_too) = sorted(found.get() for _ in workers)
        for worker in workers:
            worker.join()
    if threads > 1:
        assert len(first) == 1 and f"{threads} threads in each of 2 workers" in first[0]
        assert (other, held, held_too) == ([], 1, 1)
    else:
        assert not first and not other


@pytest.mark.parametrize(
    ("allowed", "workers", "places"),
    [
        ([], 2, [None, None]),  # the system does not say
        ([5], 2, [None, None]),
        ([3, 5, 6], 2, [None, None]),  # a processor is free for the one that wakes them
        ([3, 5], 2, [3, 5]),
        ([3, 5], 5, [3, 5, 3, 5, 3]),
    ],
)
def test_places_of_workers(
    allowed: list[int], workers: int, places: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processors, "allowed_processors", lambda: allowed)
    assert _processors.places_of(workers) == places


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_thread_moves_and_may_be_moved_on() -> None:
    found: list[Any] = []

    def move() -> None:
        allowed = os.sched_getaffinity(0)
        for processor in sorted(allowed):
            _processors.move_to(processor)
            found.append((_processors.current_processor() in allowed, os.sched_getaffinity(0) == allowed))
        absent = max(allowed) + 1
        _processors.move_to(absent)  # the program has been restricted meanwhile: it stays where it is
        found.append((_processors.current_processor() != absent, os.sched_getaffinity(0) == allowed))

    _in_thread(move)
    assert found and all(inside and unchanged for inside, unchanged in found)


def test_without_its_number_nothing_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processors, "_sched_getcpu", lambda: None)
    assert _processors.current_processor() is None
