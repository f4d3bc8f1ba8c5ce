"""CUDA memory that several processes use, by CUDA IPC.

torch counts for each export whether its importer still uses the memory: 1, then 0. Memory whose owner has
dropped it is freed once all importers have. An importer that is killed does not count down, so the owner does
it. It must not do so twice: the counter is unsigned, and below 0 the memory would never be freed.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aiosync.weights.devices import using

Export: TypeAlias = list[Any]
"""(device, memory handle, bytes, offset, counter's file, its index there, event handle, wait for it), as
``UntypedStorage._share_cuda_`` returns them."""

_COUNTER = slice(4, 6)

_SHARED_MEMORY = "/dev/shm"
_HEADER = 64
"""Bytes before the first counter in a file of torch's."""

_closed: list[tuple[int, Export]] = []
"""(pid, export) of buffers that their owner has dropped, whose importers have not ended."""

_closed_lock = threading.Lock()


class CudaExports:
    """What a process exports of one buffer: once for each process that imports it.

    Raises:
        RuntimeError: torch cannot export memory of this device.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._owner = os.getpid()
        self._buffer: Tensor | None = buffer
        self._exports: list[tuple[int, Export]] = []
        # Made now, so that the caller learns at once if there are none.
        self._spare: Export | None = _export(buffer)

    def add(self, pid: int) -> Export:
        """Export the buffer to one process; ``pid``: 0 if that is unknown."""
        assert self._buffer is not None
        export, self._spare = self._spare or _export(self._buffer), None
        self._exports.append((pid, export))
        return export

    def close(self) -> None:
        """Drop the buffer; idempotent. It is freed once each importer has dropped it or has ended.

        Does nothing in a forked child, which cannot use CUDA.
        """
        if os.getpid() != self._owner:
            return
        if self._buffer is not None:
            self._buffer = None
            if self._spare is not None:
                decline(self._spare)
            with _closed_lock:
                _closed.extend(self._exports)
            self._exports.clear()
        free_dropped_memory()


def free_dropped_memory() -> None:
    """Free buffers that this process has dropped and that no importer uses any more.

    Raises:
        RuntimeError: CUDA cannot be used.
    """
    torch.cuda._lazy_init()  # raises in a forked child, whose parent owns the buffers
    with _closed_lock:
        for each in [each for each in _closed if _has_ended(each[0])]:
            _closed.remove(each)
            if _count(each[1]) > 0:
                decline(each[1])
    torch.cuda.ipc_collect()


def import_cuda(export: Export) -> Tensor:
    """Return the memory of an export, 1-D ``uint8``. Each export may be imported once."""
    torch.cuda._lazy_init()
    with using(torch.device("cuda", export[0])):
        storage = torch.UntypedStorage._new_shared_cuda(*export)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def decline(export: Export) -> None:
    """Count down for an importer that will not import an export, or that was killed."""
    torch.UntypedStorage._release_ipc_counter_cuda(*export[_COUNTER])


def _count(export: Export) -> int:
    """The counter of an export; 0 if it cannot be read, since :func:`decline` then does nothing either."""
    name, index = export[_COUNTER]
    try:
        with open(f"{_SHARED_MEMORY}{os.fsdecode(name)}", "rb") as file:
            file.seek(_HEADER + 8 * index)
            return int.from_bytes(file.read(8), sys.byteorder, signed=True)
    except OSError:
        return 0


def _export(buffer: Tensor) -> Export:
    with using(buffer.device):
        return list(buffer.untyped_storage()._share_cuda_())


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # After the name in parentheses: Z for a process that waits to be joined, X for a dead one.
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return pid != 0
    except OSError:
        return False
