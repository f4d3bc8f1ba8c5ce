"""Over a Unix socket blocks stay where they are, and the worker reads them there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aiosync import SyncTimeoutError, TCPWeightSyncScheme
from aiosync.errors import ProtocolError
from aiosync.protocol import frames as f
from aiosync.schemes import landing
from aiosync.schemes.landing import Landing
from aiosync.schemes.link import PATIENCE as STUCK_AFTER
from aiosync.transports.tcp import DialledTransport
from aiosync.weights.copying import copy_bytes
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from tests.kit.certificates import certificates
from tests.kit.clock import BRIEF, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.transports.test_relay import connect, relay_below, serve
from tests.transports.test_tcp import TOKEN, join, make_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory by /proc")

SIZE = 1 << 20
NBYTES = 4 * 4 * SIZE


@asynccontextmanager
async def at_unix(model: nn.Module, **options: Any) -> AsyncIterator[TCPWeightSyncScheme]:
    """An elastic sender at a Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        scheme = TCPWeightSyncScheme(f"unix://{folder}/socket", token=TOKEN, timeout=60, **options)
        scheme.init_on_sender(model_id="policy", model=model)
        try:
            yield scheme
        finally:
            await within(scheme.aclose())


def large_worker(address: str, **options: Any) -> LocalWorker:
    return make_worker(address, Uniform(-1.0, size=SIZE), **options)


async def sent(scheme: TCPWeightSyncScheme, model: nn.Module, value: float) -> int:
    """Send; returns how many bytes went over the connections for it."""
    before = scheme.stats.wire_nbytes
    fill(model, value)
    assert (await scheme.send()).ok
    return scheme.stats.wire_nbytes - before


@pytest.fixture
def instead_of_copying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Have something else happen where a worker copies a block out of the sender's memory."""
    return lambda action: monkeypatch.setattr(landing, "copy_bytes", action)


async def test_the_bytes_do_not_pass_through_the_socket() -> None:
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        workers = [large_worker(scheme.address) for _ in range(2)]
        await join(scheme, *workers)
        for version in (1, 2, 3):
            assert await sent(scheme, model, version) < NBYTES // 1000
            assert [value_of(worker.model) for worker in workers] == [version] * 2
        for worker in workers:
            await worker.close()


async def test_a_part_is_read_in_part(instead_of_copying: Callable[[Callable[..., None]], None]) -> None:
    copied: list[int] = []

    def copy(place: memoryview, source: memoryview) -> None:
        copied.append(len(place))
        copy_bytes(place, source)

    instead_of_copying(copy)
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        worker = large_worker(scheme.address)
        await join(scheme, worker)
        assert sum(copied) == NBYTES
        copied.clear()
        assert (await scheme.send({"values.2": torch.full((SIZE,), 7.0)}, strict=False)).ok
        assert sum(copied) == NBYTES // 4
        assert value_of([worker.model.get_parameter("values.2")]) == 7
        assert value_of([worker.model.get_parameter("values.1")]) == 0
        await worker.close()


@pytest.mark.parametrize("what", ["tls", "zstd"])
async def test_what_is_encrypted_or_encoded_passes_through_it(what: str) -> None:
    tls = certificates().config if what == "tls" else None
    model = Uniform(size=SIZE)
    torch.manual_seed(0)
    options: dict[str, Any] = {"tls": tls} if tls is not None else {"codec": "zstd"}
    async with at_unix(model, **options) as scheme:
        worker = large_worker(scheme.address, tls=tls)
        await join(scheme, worker)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_()
        before = scheme.stats.wire_nbytes
        assert (await scheme.send()).ok
        assert scheme.stats.wire_nbytes - before > NBYTES // 2
        for mine, theirs in zip(worker.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        await worker.close()


async def test_memory_that_was_written_over_is_noticed(
    instead_of_copying: Callable[[Callable[..., None]], None],
) -> None:
    spoil = threading.Event()

    def copy(place: memoryview, source: memoryview) -> None:
        copy_bytes(place, source)
        if spoil.is_set():
            place[5] ^= 1
            spoil.clear()

    instead_of_copying(copy)
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        worker = large_worker(scheme.address)
        await join(scheme, worker)
        spoil.set()
        assert await sent(scheme, model, 1) > NBYTES  # again, and over the connection
        assert value_of(worker.model) == 1
        await worker.close()


@pytest.fixture
def stranger() -> Iterator[int]:
    """The id of a process that has nothing to do with us."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


async def test_memory_of_somebody_else_is_left_alone(stranger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a proxy holds the other end of the socket."""
    monkeypatch.setattr(DialledTransport, "shares_with", property(lambda self: stranger))
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        worker = large_worker(scheme.address)
        await join(scheme, worker)
        assert await sent(scheme, model, 1) > NBYTES
        assert value_of(worker.model) == 1
        await worker.close()


async def test_a_worker_that_stops_in_the_middle_costs_no_memory(
    instead_of_copying: Callable[[Callable[..., None]], None],
) -> None:
    go_on, armed = threading.Event(), threading.Event()

    def copy(place: memoryview, source: memoryview) -> None:
        if threading.current_thread() is stuck_in[0] and armed.is_set():
            go_on.wait()
        copy_bytes(place, source)

    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        well, stopped = large_worker(scheme.address), large_worker(scheme.address)
        await join(scheme, well)
        before = set(threading.enumerate())
        await stopped.connect()
        await stopped.serve()
        stuck_in = [t for t in set(threading.enumerate()) - before if t.name == "aiosync-tcp"]
        assert len(stuck_in) == 1
        armed.set()
        instead_of_copying(copy)
        try:
            for version in range(1, 5):
                fill(model, version)
                with pytest.raises(SyncTimeoutError):
                    await scheme.send(timeout=BRIEF + 2 * STUCK_AFTER * (version == 2))
                await eventually(lambda v=version: value_of(well.model) == v, "the other goes on")  # type: ignore[misc]
            assert scheme.stats.memory == 2 * NBYTES
        finally:
            go_on.set()
        await eventually(lambda: stopped.scheme.version == 4, "it is back")
        assert value_of(stopped.model) == 4
        for worker in (well, stopped):
            await worker.close()


async def test_below_a_relay() -> None:
    model = Uniform(size=SIZE)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            at_unix(model) as scheme,
            relay_below(scheme.address, f"unix://{folder}/below") as relay,
        ):
            await connect(scheme, relay)
            worker = large_worker(relay.address)
            await serve(worker)
            for version in (1, 2, 3):
                assert await sent(scheme, model, version) < NBYTES // 1000
                assert value_of(worker.model) == version
            await worker.close()


# -- what a sender may name ------------------------------------------------------------------------


def _landing(sender: int) -> Landing:
    landed = Landing(Layout.of({"w": torch.zeros(SIZE)}))
    landed.prepare()
    landed._sender = sender
    return landed


def _update(memory: object) -> f.Update:
    return f.Update(round=1, version=1, payload={"base": -1, "memory": memory})


@pytest.mark.parametrize("memory", [None, 1, [], [1], ["1", 2], [1, 2, 3], [1.5, 2], {"fd": 1}])
def test_memory_that_is_no_memory(memory: object) -> None:
    with pytest.raises(ProtocolError, match="cannot be read here"):
        _landing(os.getpid()).begin(_update(memory))


def test_memory_that_was_not_asked_for() -> None:
    with pytest.raises(ProtocolError, match="cannot be read here"):
        _landing(0).begin(_update([1, 2]))
    landed = _landing(0)
    landed.begin(f.Update(round=1, version=1, payload={"base": -1}))
    with pytest.raises(ProtocolError, match="encoded block"):
        landed.place(f.Chunk(block=0, size=0, checksum=0, encoding="shared"))


def test_files_that_are_no_memory_are_not_opened(tmp_path: Path) -> None:
    def refused(fd: int, nbytes: int = 4096, inode: int | None = None) -> str:
        with pytest.raises((OSError, ProtocolError)) as caught:
            Segment.peek(os.getpid(), fd, os.fstat(fd).st_ino if inode is None else inode, nbytes)
        return str(caught.value)

    segment = Segment.shared(1 << 16)
    assert segment.handle is not None
    fd = segment.handle["fd"]
    with (tmp_path / "file").open("w+b") as file, open("/dev/null", "rb") as null:
        file.truncate(1 << 16)
        unsealed = os.memfd_create("test")
        read, write = os.pipe()
        os.ftruncate(unsealed, 1 << 16)
        try:
            assert "not the memory" in refused(null.fileno())
            assert "not the memory" in refused(read)
            assert "not the memory" in refused(fd, inode=1)
            assert "not the memory" in refused(fd, nbytes=1 << 17)
            assert "may shrink" in refused(unsealed)
            refused(file.fileno())
            segment.buffer[7] = 3
            assert Segment.peek(os.getpid(), fd, os.fstat(fd).st_ino, 1 << 16)[7] == 3
        finally:
            for opened in (unsealed, read, write):
                os.close(opened)
            segment.close()


def test_shared_memory_cannot_shrink() -> None:
    segment = Segment.shared(1 << 16)
    assert segment.handle is not None
    with pytest.raises(PermissionError):
        os.ftruncate(segment.handle["fd"], 0)
    segment.close()
