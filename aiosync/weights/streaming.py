"""Copy large memory past the processor's caches, with oneMKL.

An ordinary store reads a cache line before it writes it, and what a large copy wrote is gone from the caches
before anything reads it. A non-temporal store does neither, so a thread copies in about 0.6 times the time.
glibc's ``memmove`` uses such stores only for a piece of about the size of the shared cache, which a tensor
hardly has. torch's x86-64 builds contain oneMKL, whose ``mkl_somatcopy`` uses them where there is AVX-512.
Elsewhere large copies are made by ``memmove``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

WORTH_STREAMING = 16 * 1024 * 1024
"""Bytes from which a copy no longer stays in a processor's own cache. Smaller copies are read from there."""

_ROW = 16 * 1024
"""Bytes in a row of the matrix that oneMKL copies. Its copy of one long row takes longer."""

_TRIED = 16 * 1024 * 1024
"""Bytes of the copy that decides whether this processor gains by it."""

Move: TypeAlias = Callable[[int, int, int], object]
"""Copies memory without the GIL; takes destination address, source address and bytes, as ``memmove`` does."""

_checking: dict[int, threading.Lock] = {}
"""Process -> a lock. In a forked child, the thread that held its parent's does not exist."""


def streaming_move() -> Move | None:
    """Return a ``memmove`` with non-temporal stores, or None if there is none that is faster here.

    The first call in a process takes some 70 ms, longer if all processors are busy; others wait for it. Other
    processes may read a copy when it has returned: taking the GIL has ordered its stores.
    """
    with _checking.setdefault(os.getpid(), threading.Lock()):
        return _checked_move()


@cache
def _checked_move() -> Move | None:
    move = _of_mkl()
    try:
        return move if move is not None and _copies_all_bytes(move) and _is_faster(move) else None
    except (MemoryError, OSError):  # no memory for the checks: the copy itself needs none
        return None


def _of_mkl() -> Move | None:
    """Return a copy by oneMKL's ``mkl_somatcopy``, documented in Intel's oneMKL reference."""
    try:
        # Only the library that is loaded already. Windows has no such mode, and its torch exports no oneMKL.
        mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD)
        copy_matrix, set_threads = mkl.MKL_Somatcopy, mkl.MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    copy_matrix.restype = None
    copy_matrix.argtypes = [
        ctypes.c_char, ctypes.c_char, size, size, ctypes.c_float, address, size, address, size
    ]  # fmt: skip
    columns = _ROW // ctypes.sizeof(ctypes.c_float)

    def move(destination: int, source: int, nbytes: int) -> None:
        rows = nbytes // _ROW if abs(destination - source) >= nbytes else 0  # memmove allows to overlap
        if rows:
            threads = 0  # oneMKL's number for this thread; 0: as many as OpenMP has
            try:
                threads = set_threads(1)  # it would start OpenMP's, which spin
                # Row-major, not transposed, times 1.0: the bytes stay as they are, whatever numbers they are.
                copy_matrix(b"R", b"N", rows, columns, 1.0, source, columns, destination, columns)
            finally:
                set_threads(threads)
        done = rows * _ROW
        ctypes.memmove(destination + done, source + done, nbytes - done)

    return move


# The checks do not use torch: the user's default device or mode would apply, and OpenMP threads would start.


def _copies_all_bytes(move: Move) -> bool:
    """Return whether the copy keeps all bytes, also those that are no number in floating point."""
    # Each high half of a 32-bit number: infinities, signalling NaNs and denormal numbers are among them.
    source = bytearray(4 << 16)
    source[2::4] = bytes(range(256)) * 256
    source[3::4] = b"".join(bytes([number]) * 256 for number in range(256))
    source += source[1:100]
    copied = bytearray(len(source))
    move(_address(copied), _address(source), len(source))
    return copied == source


def _is_faster(move: Move) -> bool:
    """Return whether the copy takes less time than ``memmove``, the better of a few of each."""
    source, *destinations = (_pages(_TRIED) for _ in range(3))  # two slots, which take turns
    streamed: list[float] = []
    moved: list[float] = []
    for destination in destinations * 3:
        for contender, took in ((move, streamed), (ctypes.memmove, moved)):
            begun = time.perf_counter()
            contender(_address(destination), _address(source), _TRIED)
            took.append(time.perf_counter() - begun)
    return min(streamed) < min(moved)


def _pages(nbytes: int) -> mmap.mmap:
    """Allocate memory that begins a cache line, as torch's does, and that is written once."""
    pages = mmap.mmap(-1, nbytes)
    pages.write(bytes(nbytes))
    return pages


def _address(memory: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
