"""CUDA memory that several processes use, by CUDA IPC.

torch counts for each export whether its importer still uses the memory. Memory whose owner has dropped it is
freed once all importers have. An importer that is killed does not count down, so the owner does it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from aiosync.weights.devices import using

Export: TypeAlias = list[Any]
"""(device, memory handle, bytes, offset, counter's file, its index there, event handle, wait for it), as
``UntypedStorage._share_cuda_`` returns them."""

_COUNTER = slice(4, 6)

_closed: list[tuple[int, Export]] = []
"""(pid, export) of buffers that their owner has dropped, whose importers have not ended."""


class CudaExports:
    """What a process exports of one buffer: once for each process that imports it.

    Raises:
        RuntimeError: torch cannot export memory of this device.
    """

    def __init__(self, buffer: Tensor) -> None:
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
        """Drop the buffer; idempotent. It is freed once each importer has dropped it or has ended."""
        if self._buffer is not None:
            self._buffer = None
            if self._spare is not None:
                decline(self._spare)
            _closed.extend(self._exports)
            self._exports.clear()
        # Also those of earlier buffers, whose importers were killed since.
        for each in [each for each in _closed if _has_ended(each[0])]:
            _closed.remove(each)
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
