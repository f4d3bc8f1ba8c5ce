"""CUDA memory that several processes use, by CUDA IPC.

torch counts for each export whether its importer still uses the memory. Memory whose owner has dropped it is
freed once all importers have. An importer that is killed does not count down, so the owner does it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from aiosync.weights.devices import UNDISTURBED

_COUNTER = slice(4, 6)
"""The items of an export that name its counter."""


class CudaExports:
    """What a process exports of one buffer: once for each process that imports it."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        # (pid, export)
        self._exports: list[tuple[int, list[Any]]] = []

    def add(self, pid: int) -> list[Any]:
        """Export the buffer to one process; ``pid``: 0 if that is unknown."""
        # (device, memory handle, bytes, offset, counter's file, its index there, event handle, wait for it)
        export = list(self._buffer.untyped_storage()._share_cuda_())
        self._exports.append((pid, export))
        return export

    def close(self) -> None:
        """Drop the buffer. It is freed once each importer has dropped it or has ended; idempotent."""
        exports, self._exports = self._exports, []
        for pid, export in exports:
            if _has_ended(pid):
                torch.UntypedStorage._release_ipc_counter_cuda(*export[_COUNTER])
        del self._buffer
        torch.cuda.ipc_collect()


def import_cuda(export: list[Any]) -> Tensor:
    """Return the memory of an export, 1-D ``uint8``. Each export may be imported once."""
    with UNDISTURBED:
        torch.cuda._lazy_init()
        storage = torch.UntypedStorage._new_shared_cuda(*export)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _has_ended(pid: int) -> bool:
    if not pid:
        return False
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # After the name, which is in parentheses: Z for a process that waits to be joined, X for a dead one.
        return file.read().rpartition(")")[2].split()[0] in "ZX"
    return True
