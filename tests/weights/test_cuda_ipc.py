"""CUDA IPC's counters, in files like torch's. tests/conformance/test_cuda.py has the tests on a GPU."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aiosync.weights import cuda_ipc
from aiosync.weights.cuda_ipc import CudaExports, Export, free_dropped_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA IPC needs Linux")

_BYTES = 8
_HEADER = 64


class Counters:
    """Stands in for torch's side: a file with one counter for each export."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exported = 0
        path.write_bytes(bytes(_HEADER))

    def export(self, buffer: torch.Tensor) -> Export:
        with self.path.open("ab") as file:
            file.write((1).to_bytes(_BYTES, sys.byteorder))
        self.exported += 1
        return [0, b"", buffer.numel(), 0, f"/{self.path.name}".encode(), self.exported - 1, b"", False]

    def values(self) -> list[int]:
        data = self.path.read_bytes()[_HEADER:]
        parts = [data[at : at + _BYTES] for at in range(0, len(data), _BYTES)]
        return [int.from_bytes(part, sys.byteorder, signed=True) for part in parts]

    def count_down(self, name: bytes, index: int) -> None:
        value = self.values()[index] - 1
        with self.path.open("r+b") as file:
            file.seek(_HEADER + _BYTES * index)
            file.write(value.to_bytes(_BYTES, sys.byteorder, signed=True))


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counters]:
    path = Path("/dev/shm") / f"torch_{os.getpid()}_{secrets.token_hex(4)}"
    stand_in = Counters(path)
    monkeypatch.setattr(cuda_ipc, "_export", stand_in.export)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", stand_in.count_down)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    yield stand_in
    path.unlink()


def importer() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_memory_of_importers_is_counted_down_once(counters: Counters) -> None:
    """The first importer drops the memory and ends, the second one is killed."""
    dropping, killed = importer(), importer()
    exports = CudaExports(torch.zeros(8, dtype=torch.uint8))
    for process in (dropping, killed):
        exports.add(process.pid)
    assert counters.values() == [1, 1]
    counters.count_down(b"", 0)
    end(dropping)
    end(killed)
    exports.close()
    exports.close()
    assert counters.values() == [0, 0]


def test_an_importer_that_is_killed_after_the_owner_has_closed(counters: Counters) -> None:
    process = importer()
    exports = CudaExports(torch.zeros(8, dtype=torch.uint8))
    exports.add(process.pid)
    exports.close()
    assert counters.values() == [1]
    end(process)
    free_dropped_memory()
    assert counters.values() == [0]


def test_an_export_that_nobody_got(counters: Counters) -> None:
    CudaExports(torch.zeros(8, dtype=torch.uint8)).close()
    assert counters.values() == [0]


def test_a_forked_child_does_not_count_down(counters: Counters) -> None:
    exports = CudaExports(torch.zeros(8, dtype=torch.uint8))
    child = os.fork()
    if child == 0:
        exports.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert counters.values() == [1]
    exports.close()
    assert counters.values() == [0]
