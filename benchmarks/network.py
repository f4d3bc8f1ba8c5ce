"""``aiosync bench --network``: TCPWeightSyncScheme beside blocking sockets, in one run and in turn.

The other side of the comparison is the fastest thing that a few lines of Python do: ``sendall`` out of a
ready buffer, ``recv_into`` a warm one, and a byte back. It copies nothing out of a trainer and checks
nothing. aiosync's time is that of ``send``: until every worker's parameters are the new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import aiosync
from benchmarks.links import save
from benchmarks.meters import Spread, spread, ticking

__all__ = ["run"]

SPAWN = multiprocessing.get_context("spawn")
TENSORS = 64
WARM_UP = 2
STOPPED_ROUNDS = 8
STALL_ROUNDS = 5
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table."""

    kind: str
    tls: bool
    mib: int
    receivers: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; times in milliseconds.

    Attributes:
        aiosync, blocking: a send to all receivers; the same bytes to one blocking socket.
        sender_stall, worker_stall: how late a 1 ms ticker beside the sends was.
        sender_models: memory that the sender's slots took, in model sizes.
        one_stopped: the same, at most, and the sends' times to the others, while one of several workers was
            stopped (SIGSTOP).
    """

    setting: Setting
    aiosync: Spread
    blocking: Spread
    sender_stall: Spread
    worker_stall: Spread
    sender_models: float
    one_stopped: tuple[float, Spread] | None = None

    @property
    def ratio(self) -> float:
        """Bytes per second of aiosync, to all receivers together, over those of one blocking socket."""
        return self.setting.receivers * self.blocking.median / self.aiosync.median


def make_model(mib: int) -> nn.Module:
    """``mib`` MiB of fp32 parameters."""
    each = mib * MIB // 4 // TENSORS
    return nn.ParameterList(torch.zeros(each) for _ in range(TENSORS))


# -- the other processes ---------------------------------------------------------------------------


def aiosync_worker(
    scheme: aiosync.TCPWeightSyncScheme, index: int, mib: int, pipe: Connection[Any, Any]
) -> None:
    """A receiver beside a ticker; sends its stalls when the sender has gone."""
    torch.set_num_threads(1)

    async def main() -> None:
        scheme.init_on_receiver(model_id="policy", model=make_model(mib), worker_idx=index)
        async with scheme, scheme.receiving():
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            async with ticking() as late:
                await scheme.wait_closed()
        pipe.send(late)

    asyncio.run(main())


def blocking_receiver(address: Any, tls: aiosync.TLSConfig | None, nbytes: int) -> None:
    """Reads into one warm buffer for as long as something comes."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.connect(address)
    sock = _tuned(sock)
    if tls is not None:
        sock = tls.for_worker().wrap_socket(sock, server_hostname="localhost")
    memory = torch.zeros(nbytes, dtype=torch.uint8).numpy().data
    sock.sendall(b"r")
    while True:
        got = 0
        while got < nbytes:
            count = sock.recv_into(memory[got:])
            if not count:
                return
            got += count
        sock.sendall(b"k")


def _tuned(sock: socket.socket) -> socket.socket:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


# -- here ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def certificates(wanted: bool) -> Iterator[aiosync.TLSConfig | None]:
    """A certificate for localhost that is gone afterwards."""
    if not wanted:
        yield None
        return
    import trustme

    folder = Path(tempfile.mkdtemp(prefix="aiosync-bench-"))
    try:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
        yield aiosync.TLSConfig(str(folder / "own.pem"), cafile=str(folder / "ca.pem"))
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def blocking_sender(kind: str, tls: aiosync.TLSConfig | None, nbytes: int) -> Iterator[socket.socket]:
    """A connected blocking socket, and a process at its other end."""
    folder = tempfile.mkdtemp(prefix="aiosync-bench-")
    listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listener.bind(os.path.join(folder, "socket") if kind == "unix" else ("127.0.0.1", 0))
    listener.listen()
    process = SPAWN.Process(target=blocking_receiver, args=(listener.getsockname(), tls, nbytes))
    process.start()
    try:
        sock = _tuned(listener.accept()[0])
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            assert tls.certfile is not None
            context.load_cert_chain(tls.certfile, tls.keyfile)
            sock = context.wrap_socket(sock, server_side=True)
        with sock:
            sock.recv(1)
            yield sock
    finally:
        process.join()
        listener.close()
        shutil.rmtree(folder)


async def measure(setting: Setting, rounds: int) -> Figures:
    """Both in turn: a send of aiosync's, a send of the blocking socket's, and again; then sends beside
    tickers, which would take processor time from one side of the comparison only."""
    nbytes = setting.mib * MIB
    model = make_model(setting.mib)
    ready = torch.zeros(nbytes, dtype=torch.uint8).numpy().data
    folder = tempfile.mkdtemp(prefix="aiosync-bench-")
    address = f"unix://{folder}/socket" if setting.kind == "unix" else "tcp://127.0.0.1:0"
    ours: list[float] = []
    theirs: list[float] = []
    stalls: list[float] = []
    with certificates(setting.tls) as tls, blocking_sender(setting.kind, tls, nbytes) as sock:
        scheme = aiosync.TCPWeightSyncScheme(address, tls=tls, timeout=120)
        scheme.init_on_sender(model_id="policy", model=model)
        pipes, processes = _spawn(scheme, setting)
        await scheme.connect(min_workers=setting.receivers)
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                ours, theirs = [], []
            begun = time.perf_counter()
            await scheme.send()
            ours.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            sock.sendall(ready)
            sock.recv(1)
            theirs.append(time.perf_counter() - begun)
        for pipe in pipes:
            pipe.send("now")
        for _ in range(STALL_ROUNDS):
            async with ticking() as late:
                await scheme.send()
            stalls += late
        memory = scheme.stats.memory / nbytes
        stopped = (
            await _with_one_stopped(scheme, processes[-1].pid, nbytes) if setting.receivers > 1 else None
        )
        await scheme.aclose()
        workers: list[float] = [tick for pipe in pipes for tick in pipe.recv()]
        for process in processes:
            process.join()
    shutil.rmtree(folder)
    return Figures(setting, _of(ours), _of(theirs), _of(stalls), _of(workers), memory, stopped)


async def _with_one_stopped(
    scheme: aiosync.TCPWeightSyncScheme, pid: int, nbytes: int
) -> tuple[float, Spread]:
    """Sends that go on while one worker is stopped: the most memory, and their times."""
    *others, _ = scheme.workers
    memory, seconds = [], []
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(STOPPED_ROUNDS):
            begun = time.perf_counter()
            await scheme.send(wait=False)
            await scheme.wait_ack(others)
            seconds.append(time.perf_counter() - begun)
            memory.append(scheme.stats.memory / nbytes)
    finally:
        os.kill(pid, signal.SIGCONT)
    return max(memory), _of(seconds)


def _of(samples: Sequence[float]) -> Spread:
    found = spread(samples)
    assert found is not None
    return found


def _spawn(
    scheme: aiosync.TCPWeightSyncScheme, setting: Setting
) -> tuple[list[Connection[Any, Any]], list[Any]]:
    pipes: list[Connection[Any, Any]] = []
    processes = []
    for index in range(setting.receivers):
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=aiosync_worker, args=(scheme, index, setting.mib, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    return pipes, processes


def run(
    mib: Sequence[int], receivers: Sequence[int], kinds: Sequence[str], rounds: int, out: Path | None
) -> None:
    """Measure, print a table, write JSON.

    Args:
        mib: sizes of the model in MiB.
        receivers: how many workers, each.
        kinds: of ``tcp``, ``unix``, ``tls``.
        rounds: timed sends of each.
        out: where the JSON goes.
    """
    table = Table(title="aiosync over sockets, beside one blocking socket (medians; least and most)")
    for column in (
        "link",
        "MiB",
        "workers",
        "send, ms",
        "blocking, ms",
        "ratio",
        "stall p99, ms",
        "slots",
        "one stopped",
    ):
        table.add_column(column, justify="right")
    found = []
    for kind in kinds:
        for size in mib:
            for count in receivers:
                setting = Setting("tcp" if kind == "tls" else kind, kind == "tls", size, count)
                figures = asyncio.run(measure(setting, rounds))
                found.append({**asdict(figures), "ratio": figures.ratio})
                ours, theirs = figures.aiosync, figures.blocking
                table.add_row(
                    kind,
                    str(size),
                    str(count),
                    f"{ours.median:.0f} ({ours.min:.0f}-{ours.max:.0f})",
                    f"{theirs.median:.0f} ({theirs.min:.0f}-{theirs.max:.0f})",
                    f"{figures.ratio:.2f}",
                    f"{figures.sender_stall.p99:.1f} / {figures.worker_stall.p99:.1f}",
                    f"{figures.sender_models:.1f}",
                    _stopped(figures.one_stopped),
                )
    Console().print(table)
    save(out, "network", found)


def _stopped(found: tuple[float, Spread] | None) -> str:
    return f"{found[0]:.1f} slots, {found[1].median:.0f} ms" if found is not None else ""
