"""Over a Unix socket blocks stay where they are, and the worker reads them there."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from aiosync import SyncTimeoutError, TCPWeightSyncScheme, WeightSyncScheme, atomic
from aiosync.errors import ProtocolError
from aiosync.protocol import frames as f
from aiosync.sender.connection import PATIENCE as STUCK_AFTER
from aiosync.transfer import stream as landing
from aiosync.transfer.stream import StreamInbound
from aiosync.transports import sockets
from aiosync.transports.tcp.connection import DialledTransport
from aiosync.weights.copying import read_at
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from tests.kit.certificates import certificates
from tests.kit.clock import BRIEF, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.relay import connect, relay_below, serve
from tests.kit.seams import has_pending_update
from tests.kit.tcp import TOKEN, join, make_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory by /proc")

SIZE = 1 << 20
NBYTES = 4 * 4 * SIZE

Instead: TypeAlias = Callable[[Callable[[int, memoryview, int], bool]], None]


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
def instead_of_reading(monkeypatch: pytest.MonkeyPatch) -> Instead:
    """Have something else happen where a worker reads a block out of the sender's memory."""
    return lambda action: monkeypatch.setattr(landing, "read_at", action)


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


async def test_a_part_is_read_in_part(instead_of_reading: Instead) -> None:
    copied: list[int] = []

    def read(fd: int, place: memoryview, offset: int) -> bool:
        copied.append(len(place))
        return read_at(fd, place, offset)

    instead_of_reading(read)
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
    instead_of_reading: Instead,
) -> None:
    spoil = threading.Event()

    def read(fd: int, place: memoryview, offset: int) -> bool:
        whole = read_at(fd, place, offset)
        if spoil.is_set():
            place[5] ^= 1
            spoil.clear()
        return whole

    instead_of_reading(read)
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        worker = large_worker(scheme.address)
        await join(scheme, worker)
        spoil.set()
        assert await sent(scheme, model, 1) > NBYTES  # again, and over the connection
        assert value_of(worker.model) == 1
        assert scheme.stats.lost == 0
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


class Stall:
    """Holds up what one worker's thread reads.

    Attributes:
        armed: from now on.
        go_on: no more.
        damaged: blocks that were not the ones that were sent.
    """

    def __init__(self) -> None:
        self.armed = threading.Event()
        self.go_on = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._before = set(threading.enumerate())

    def of_whoever_came_since(self) -> None:
        """The connections' threads that were not there when this was made."""
        self._threads = {t for t in set(threading.enumerate()) - self._before if t.name == "aiosync-tcp"}
        assert self._threads
        self.armed.set()

    def read(self, fd: int, place: memoryview, offset: int) -> bool:
        """In the place of ``read_at``."""
        if self.armed.is_set() and threading.current_thread() in self._threads:
            self.go_on.wait()
        return read_at(fd, place, offset)


async def _go_on_without(scheme: TCPWeightSyncScheme, model: nn.Module, well: LocalWorker) -> None:
    for version in range(1, 5):
        fill(model, version)
        with pytest.raises(SyncTimeoutError):
            await scheme.send(timeout=BRIEF + 2 * STUCK_AFTER * (version == 2))
        await eventually(lambda v=version: value_of(well.model) == v, "the other goes on")  # type: ignore[misc]
    assert scheme.stats.memory == 2 * NBYTES


@pytest.mark.parametrize("how", ["loop", "receive", "cut"])
async def test_a_worker_that_stops_in_the_middle_costs_no_memory(
    how: str, instead_of_reading: Instead, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "cut":
        monkeypatch.setattr(sockets, "_UNIX_BUFFER", 2048)  # so that not all frames fit in
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        well = large_worker(scheme.address)
        await join(scheme, well)
        stall = Stall()
        stopped = large_worker(scheme.address)
        await stopped.connect()
        if how == "receive":
            polling = asyncio.create_task(_poll(stopped.scheme))
        else:
            await stopped.serve()
        stall.of_whoever_came_since()
        instead_of_reading(stall.read)
        try:
            await _go_on_without(scheme, model, well)
        finally:
            stall.go_on.set()
        await eventually(lambda: stopped.scheme.version == 4, "it is back")
        assert value_of(stopped.model) == 4
        assert scheme.stats.lost == 0  # on the connection that it had
        if how == "receive":
            polling.cancel()
        for worker in (well, stopped):
            await worker.close()


async def _poll(scheme: WeightSyncScheme) -> None:
    while True:
        await scheme.receive(timeout=BRIEF)


async def test_a_relay_that_stops_in_the_middle(instead_of_reading: Instead) -> None:
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        well = large_worker(scheme.address)
        await join(scheme, well)
        stall = Stall()
        async with relay_below(scheme.address) as relay:
            await relay.connect()
            stall.of_whoever_came_since()
            below = large_worker(relay.address)
            await serve(below)
            instead_of_reading(stall.read)
            try:
                await _go_on_without(scheme, model, well)
            finally:
                stall.go_on.set()
            await eventually(lambda: value_of(below.model) == 4, "it is back")
            assert scheme.stats.lost == 0
            await below.close()
        await well.close()


async def test_what_was_not_for_a_worker_that_stopped_is_not_given_to_it(instead_of_reading: Instead) -> None:
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        well = large_worker(scheme.address)
        await join(scheme, well)
        stall = Stall()
        stopped = large_worker(scheme.address)
        await stopped.connect()
        await stopped.serve()
        stall.of_whoever_came_since()
        instead_of_reading(stall.read)
        try:
            fill(model, 1)
            with pytest.raises(SyncTimeoutError):
                await scheme.send(timeout=2 * STUCK_AFTER)
            for version in range(2, 6):
                fill(model, version)
                await scheme.send(worker_ids=[0])
        finally:
            stall.go_on.set()
        await eventually(lambda: stopped.scheme.version == 1, "it has what it was to have")
        assert value_of(stopped.model) == 1
        fill(model, 6)
        assert (await scheme.send()).ok
        assert value_of(stopped.model) == 6
        for worker in (well, stopped):
            await worker.close()


async def test_a_joint_part_that_gives_way_to_a_newer_version(instead_of_reading: Instead) -> None:
    policy, value = Uniform(size=SIZE), Uniform(size=SIZE)
    async with at_unix(policy, max_slots=2) as first, at_unix(value) as second:
        partner = large_worker(second.address)
        await join(second, partner)
        stall = Stall()
        stopped = large_worker(first.address)
        await join(first, stopped)
        stall.of_whoever_came_since()
        instead_of_reading(stall.read)
        try:
            fill(policy, 1)
            fill(value, 1)
            with pytest.raises(SyncTimeoutError):
                async with atomic(first, second, timeout=2 * STUCK_AFTER):
                    pass
            for version in range(2, 6):
                fill(policy, version)
                with pytest.raises(SyncTimeoutError):
                    await first.send(timeout=BRIEF)
        finally:
            stall.go_on.set()
        await eventually(lambda: value_of(stopped.model) == 5, "it has the newest version")
        # Committed with the other one or given up, but not waiting for it for ever.
        await eventually(lambda: not has_pending_update(partner.scheme), "the other part is done with")
        fill(value, 2)
        assert (await second.send()).ok
        for worker in (stopped, partner):
            await worker.close()


async def test_without_memory_to_share_it_passes_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int = 0) -> int:
        raise PermissionError(errno.EACCES, "not here")

    monkeypatch.setattr(os, "memfd_create", refused)
    model = Uniform(size=SIZE)
    async with at_unix(model) as scheme:
        worker = large_worker(scheme.address)
        await join(scheme, worker)
        assert await sent(scheme, model, 1) > NBYTES
        assert value_of(worker.model) == 1
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


def _landing(sender: int) -> StreamInbound:
    landed = StreamInbound(Layout.of({"w": torch.zeros(SIZE)}))
    landed.prepare()
    landed._sender = sender
    return landed


def _update(memory: object) -> f.Update:
    return f.Update(round=1, version=1, payload={"base": -1, "memory": memory})


@pytest.mark.parametrize("memory", [1, [], [1], ["1", 2], [1, 2, 3], [1.5, 2], {"fd": 1}])
def test_memory_that_is_no_memory(memory: object) -> None:
    with pytest.raises(ProtocolError, match=r"payload cannot be used: .*memory"):
        _landing(os.getpid()).begin(_update(memory))


def test_memory_that_was_not_asked_for() -> None:
    with pytest.raises(ProtocolError, match="this process cannot read"):
        _landing(0).begin(_update([1, 2]))
    landed = _landing(0)
    landed.begin(f.Update(round=1, version=1, payload={"base": -1}))
    with pytest.raises(ProtocolError, match="encoded block"):
        landed.place(f.Chunk(block=0, size=0, checksum=0, encoding="shared"))


def test_files_that_are_no_memory_are_not_opened() -> None:
    def refused(fd: int, nbytes: int = 4096, inode: int | None = None) -> str:
        with pytest.raises((OSError, ProtocolError)) as caught:
            Segment.open(os.getpid(), fd, os.fstat(fd).st_ino if inode is None else inode, nbytes)
        return str(caught.value)

    segment = Segment.shared(1 << 16)
    assert segment.handle is not None
    fd = segment.handle["fd"]
    with open("/dev/null", "rb") as null:
        read, write = os.pipe()
        try:
            assert "not the memory" in refused(null.fileno())
            assert "not the memory" in refused(read)
            assert "not the memory" in refused(fd, inode=1)
            assert "not the memory" in refused(fd, nbytes=1 << 17)
            segment.buffer[7] = 3
            opened = Segment.open(os.getpid(), fd, os.fstat(fd).st_ino, 1 << 16)
            place = bytearray(8)
            assert read_at(opened, memoryview(place), 0) and place[7] == 3
            assert not read_at(opened, memoryview(place), (1 << 16) - 4)
        finally:
            for each in (opened, read, write):
                os.close(each)
            segment.close()
