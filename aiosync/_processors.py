"""Event loops and torch's threads on processors that several processes compete for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple, cast

import torch

_SLICE = 100_000
"""Nanoseconds of a time slice. Linux's own ones are 2.8 ms and longer."""

_SYSTEM_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""The numbers of ``sched_getattr`` and ``sched_setattr``, by machine."""

_FIELDS = struct.Struct("IIQiIQQQ")
"""``struct sched_attr`` in its first form."""

_RESET_ON_FORK = 1

_GRAIN = 32 * 1024
"""torch divides larger work among its threads: at least so many elements for each."""

_MOST_TEAMS = 4

_SOFT = 1
"""OpenMP's ``omp_pause_soft``: settings stay as they are."""

MOST_RELEASED = 16
"""To end and start more threads than this takes too long."""

_FORKED = 0x40
"""Linux's ``PF_FORKNOEXEC``, among the flags of a process."""

release_callers_threads: ContextVar[Callable[[], Future[None]]] = ContextVar("release_callers_threads")
"""In a task that a thread waits for in a blocking call: that thread calls :func:`release_openmp_threads`."""


def shorten_time_slices() -> None:
    """Let the calling thread run soon after it is woken, while other threads compute. Where the system cannot
    do this, do nothing.

    From Linux 6.12 on, a thread that is woken takes the processor from one with a longer time slice.
    Otherwise it waits until that slice has passed. Its share of the processor's time stays the same.
    """
    found = _Scheduling.of_this_thread()
    if found is not None:
        found._replace(flags=found.flags | _RESET_ON_FORK, slice=_SLICE).apply()


@contextmanager
def short_time_slices() -> Iterator[None]:
    """In the body, the calling thread's time slices are short, as :func:`shorten_time_slices` makes them.

    For a thread of the user's that waits. After it, they are as long as they were.
    """
    before = _Scheduling.of_this_thread()
    if before is None or before.slice <= _SLICE:  # 0: a kernel that does not say
        yield
        return
    try:
        before._replace(slice=_SLICE).apply()
        yield
    finally:
        now = _Scheduling.of_this_thread()  # the thread's priority may have been changed meanwhile
        if now is not None and now.slice == _SLICE:
            now._replace(slice=before.slice).apply()


def yield_processor() -> None:
    """Let another thread run that waits for this processor, if there is one.

    For a thread that computes, when it has done what a short wait of another thread depends on. That one may
    have used up its share of the processor just before. Then Linux runs it only after a time slice,
    milliseconds later, however short its own slices are. The other thread may be one of this process, so the
    interpreter is left to it meanwhile: ``os.sched_yield()`` does that only from Python 3.12 on.
    """
    if sys.platform != "win32":
        _libc().sched_yield()


class _Scheduling(NamedTuple):
    """How Linux schedules a thread: ``struct sched_attr``, see sched_setattr(2)."""

    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    slice: int  # nanoseconds
    deadline: int
    period: int

    @classmethod
    def of_this_thread(cls) -> _Scheduling | None:
        """The calling thread's; None: the system does not say, or it is not the usual policy."""
        if sys.platform != "linux" or platform.machine() not in _SYSTEM_CALLS:
            return None
        found = ctypes.create_string_buffer(_FIELDS.size)
        number = _SYSTEM_CALLS[platform.machine()][0]
        if _libc().syscall(number, 0, found, ctypes.c_uint(_FIELDS.size), ctypes.c_uint(0)):
            return None
        scheduling = cls(*_FIELDS.unpack(found.raw))
        return scheduling if scheduling.policy == os.SCHED_OTHER else None

    def apply(self) -> None:
        """Schedule the calling thread so, if the system can do this."""
        number = _SYSTEM_CALLS[platform.machine()][1]
        _libc().syscall(number, 0, _FIELDS.pack(*self), ctypes.c_uint(0))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def allowed_processors() -> list[int]:
    """Return the numbers of the processors that this thread may use; nothing if the system does not say."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def processors() -> int:
    """Return how many processors this process may use."""
    return len(allowed_processors()) or os.cpu_count() or 1


def places_of(workers: int) -> list[int | None]:
    """Return the processors that so many processes are to begin their work on when all begin at the same
    time. None: the system places them well, since more processors are free."""
    allowed = allowed_processors()
    if len(allowed) < 2 or workers < len(allowed):
        return [None] * workers
    return [allowed[worker % len(allowed)] for worker in range(workers)]


@cache
def _sched_getcpu() -> Callable[[], int] | None:
    return getattr(_libc(), "sched_getcpu", None) if sys.platform == "linux" else None


def current_processor() -> int | None:
    """Return the number of the processor that runs this thread; None if the system does not say."""
    ask = _sched_getcpu()
    return None if ask is None else ask()


def move_to(processor: int) -> None:
    """Move the calling thread to a processor. The system may move it on at any time.

    Linux places a thread that is woken by itself. If one thread wakes as many as there are processors, it
    may place two of them on one. Then one waits for a time slice of the other, or several, while a processor
    is idle.
    """
    if sys.platform != "linux" or current_processor() == processor:
        return
    allowed = os.sched_getaffinity(0)
    if processor in allowed:
        for where in ({processor}, allowed):
            with suppress(OSError):  # the program has been restricted to others meanwhile
                os.sched_setaffinity(0, where)


def bind_thread(processor: int) -> None:
    """Keep the calling thread on one processor, if the system can do this."""
    with suppress(OSError):
        os.sched_setaffinity(0, {processor})


def release_openmp_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next work; that work starts new ones.

    They spin for milliseconds before they sleep. Call this before work for that long by other threads, which
    need all processors. It takes about 0.1 ms if there are such threads, and does nothing if torch leaves
    processors free.
    """
    threads = torch.get_num_threads()
    if processors() <= threads <= MOST_RELEASED and threads > 1 and not _may_have_lost_threads():
        pause = _openmp_pause()
        if pause is not None:
            pause(_SOFT)


def _may_have_lost_threads() -> bool:
    """Whether the OpenMP threads of this thread may have stayed behind in a process that forked this one.
    GNU OpenMP would wait for them for ever. Only the thread that forked can have had any: the first one."""
    return threading.get_native_id() == os.getpid() and _is_forked(os.getpid())


@cache
def _is_forked(pid: int) -> bool:
    """Whether this process was forked and has executed no program since."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            return bool(int(file.read().rpartition(")")[2].split()[6]) & _FORKED)
    except OSError:
        return True


@cache
def _openmp_pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the OpenMP library that torch uses, if that is known."""
    try:
        return cast("Callable[[int], int]", ctypes.CDLL(None).omp_pause_resource_all)
    except (AttributeError, OSError, TypeError):
        return None


def share_processors(workers: int, *, warn: bool) -> None:
    """Prepare this worker process to compute beside others.

    torch's OpenMP threads spin for milliseconds when they wait for each other. If other processes keep the
    thread that they wait for from running, all that time is lost.

    Args:
        workers: how many worker processes this machine has, each with as many threads as this one.
        warn: whether to warn if they have more threads than there are processors.
    """
    threads, there = torch.get_num_threads(), processors()
    if threads == 1 or threads * workers <= there:
        return
    if warn:
        warnings.warn(
            f"torch uses {threads} threads in each of {workers} workers, on {there} processors: the threads "
            "wait for each other; call torch.set_num_threads(1) in each worker",
            RuntimeWarning,
            stacklevel=2,
        )
    _keep_from_spinning(os.getpid(), threads, there)


@cache
def _keep_from_spinning(pid: int, threads: int, there: int) -> None:
    # GNU OpenMP stops to spin when a process has more threads in its teams than there are processors. Each
    # Python thread has a team of its own, from its first parallel region until its end.
    teams = (there - threads) // (threads - 1) + 1
    for _ in range(teams if teams <= _MOST_TEAMS else 0):
        threading.Thread(target=_hold_team, args=(threads,), name="aiosync-openmp", daemon=True).start()


def _hold_team(threads: int) -> None:
    torch.zeros(threads * _GRAIN, dtype=torch.uint8).fill_(1)
    threading.Event().wait()
