"""What one peer does to a sender hurts that peer alone."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aiosync.transports.tcp.connection as tcp_module
from aiosync import HandshakeError, InvalidArgumentError, TCPWeightSyncScheme
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.schemes.tcp import _derived
from aiosync.transports.tcp.tls import TLSLayer
from tests.kit.certificates import certificates
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.raw_peer import RawWorker, drain, hello
from tests.kit.tcp import TOKEN, join, make_worker, sender_of
from tests.protocol.test_budget import AFTER, BEFORE, frame_of


def _pending(settled: int) -> int:
    return tracemalloc.get_traced_memory()[0] - settled


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


# -- memory ------------------------------------------------------------------------------------------


async def test_a_stranger_holds_little(traced: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "aiosync")
    model, count = Uniform(), 40
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        listener: Any = scheme.shared_transport
        gc.collect()
        settled = tracemalloc.get_traced_memory()[0]
        strangers = [await RawWorker.dial(scheme) for _ in range(count)]
        ours = _pending(settled)  # the test's own ends
        for stranger in strangers:
            stranger.say(hello())
            await stranger.hear()
            stranger.writer.write(frame_of(bytes(f.MAX_GREETING))[:-1])  # all but one byte of another
        await asyncio.sleep(0.1)
        assert _pending(settled) - ours < count * BEFORE
        for stranger in strangers:
            await stranger.close()
        await eventually(lambda: len(listener._alive) == 1, "they are gone")
        del strangers, stranger

        def released() -> bool:
            gc.collect()
            return _pending(settled) < count * 1024

        await eventually(released, "nothing is kept of them")
        await worker.close()


async def test_nothing_is_kept_of_workers_that_have_left(
    traced: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "aiosync")
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)

        async def come_and_go(first: int) -> None:
            for number in range(first, first + 20):
                peer = await RawWorker.join(scheme, number)
                message, trace = "m" * 8000, "t" * 32_000
                peer.say(
                    f.Nack(
                        round=-1, version=0, kind="apply", error_type="E", message=message, traceback=trace
                    )
                )
                await asyncio.sleep(0.01)
                await peer.close()
            await eventually(lambda: len(scheme.workers) == 1, "they have left")

        await come_and_go(100)
        gc.collect()
        settled = tracemalloc.get_traced_memory()[0]
        await come_and_go(1000)
        gc.collect()
        assert _pending(settled) < 20 * 4096
        await worker.close()


async def test_a_flood_of_fetches(caplog: pytest.LogCaptureFixture, traced: None) -> None:
    """A worker that fetches and never reads is disconnected, and the sender keeps no answers for it."""
    caplog.set_level(logging.CRITICAL, "aiosync")
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        peer = await RawWorker.join(scheme)
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        gc.collect()
        settled = tracemalloc.get_traced_memory()[0]
        flood = framing.encode(f.Fetch()) * 1000
        worst = 0
        for _ in range(1000):
            if len(scheme.workers) == 1:
                break
            peer.writer.write(flood)
            with suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(peer.writer.drain(), BRIEF)
            worst = max(worst, _pending(settled))
        await eventually(lambda: len(scheme.workers) == 1, "it is disconnected")
        assert worst < AFTER + 64 * len(flood)  # what the test's own end holds
        fill(model, 1)
        await scheme.send()
        assert value_of(worker.model) == 1
        await peer.close()
        await worker.close()


# -- indices -----------------------------------------------------------------------------------------


async def test_an_index_cannot_be_taken_over() -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        thief = await RawWorker.dial(scheme)
        thief.session = _session(scheme, 0)
        with pytest.raises(HandshakeError, match="is connected"):
            while True:
                await thief.step()
        await thief.close()
        forger = await RawWorker.dial(scheme)
        forger.session = _session(scheme, 0, ticket=os.urandom(16))
        with pytest.raises(HandshakeError, match="is connected"):
            while True:
                await forger.step()
        await forger.close()
        fill(model, 1)
        assert (await scheme.send()).ok
        assert value_of(worker.model) == 1
        assert scheme.stats.lost == 0
        await worker.close()


async def test_a_worker_takes_its_own_index_back_with_its_ticket() -> None:
    """Its old connection is half-open: the sender does not know yet that it is gone."""
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        first = await RawWorker.join(scheme, 5)
        second = await RawWorker.join(scheme, 5, ticket=first.welcome.ticket)
        assert second.welcome.worker == 5
        assert second.welcome.ticket != first.welcome.ticket
        assert any(isinstance(frame, f.Bye) and frame.replaced for frame in await first.rest())
        for peer in (first, second):
            await peer.close()
        await worker.close()


async def test_a_worker_without_an_index_waits_until_its_old_one_is_free() -> None:
    """It was killed, and is started again while its index is still reserved."""
    scheme = TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(), num_workers=1)
    connecting = asyncio.create_task(scheme.connect())
    first = make_worker(scheme.address)
    await first.connect()
    await within(connecting)
    transport: Any = first.scheme.receiver_transport
    transport.abort()
    again = make_worker(scheme.address)
    await again.connect()
    assert again.scheme.worker_idx == 0
    for worker in (first, again):
        await worker.close()
    await within(scheme.aclose())


async def test_a_connection_that_breaks_before_the_welcome_is_read() -> None:
    """The ticket that came with it is lost; the one before is still good."""
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        peer = await RawWorker.join(scheme, 5)
        ticket = peer.welcome.ticket
        for _ in range(3):
            await peer.close()
            peer = await RawWorker.join(scheme, 5, ticket=ticket)
        await peer.close()
        await worker.close()


async def test_a_worker_that_was_dropped_comes_back_without_an_index() -> None:
    options: dict[str, Any] = {"token": TOKEN, "timeout": PATIENCE, "on_failure": "drop"}
    scheme = TCPWeightSyncScheme("tcp://127.0.0.1:0", **options)
    model = Uniform()
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    connecting = asyncio.create_task(scheme.connect())
    workers = [make_worker(scheme.address) for _ in range(2)]
    for worker in workers:
        await worker.connect()
    await within(connecting)
    await workers[0].serve()
    late = workers[1].scheme.worker_idx
    fill(model, 1)
    report = await scheme.send(timeout=BRIEF)
    assert report.dropped == (late,)
    await workers[1].serve()
    await eventually(lambda: len(scheme.workers) == 2, "it has connected again")
    assert workers[1].scheme.worker_idx == late
    fill(model, 2)
    assert (await scheme.send()).ok
    assert [value_of(worker.model) for worker in workers] == [2, 2]
    for worker in workers:
        await worker.close()
    await within(scheme.aclose())


async def test_an_end_of_a_connection_while_it_is_admitted_leaves_its_index_free() -> None:
    """It says what may not be said, in one piece with what it is admitted for."""
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        peer = await RawWorker.dial(scheme)
        peer.session = _session(scheme, 5)
        frame: Any = None
        while not isinstance(frame, f.Challenge):
            frame = await peer.step()
        peer.session.receive(await peer.hear())
        peer.say(*3 * drain(peer.session))
        await peer.rest()
        await peer.close()
        await eventually(lambda: set(scheme.workers) == {0}, "it has gone")
        good = LocalWorker(
            TCPWeightSyncScheme(scheme.address, token=TOKEN, timeout=PATIENCE), 5, Uniform(), {}
        )
        await good.connect()
        assert good.scheme.worker_idx == 5
        for each in (worker, good):
            await each.close()


def _session(scheme: TCPWeightSyncScheme, worker: int, **more: Any) -> Any:
    return ReceiverSession(scheme._token, worker, model_id="policy", **more)


# -- strangers ---------------------------------------------------------------------------------------


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process may open as many files as the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
async def test_a_good_worker_gets_in_between_silent_strangers(
    caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    """1300 that are there, and 60 more each second."""
    caplog.set_level(logging.ERROR, "aiosync")
    model = Uniform()
    async with sender_of(model) as scheme:
        host, _, port = scheme.address.removeprefix("tcp://").rpartition(":")
        live = make_worker(scheme.address)
        await join(scheme, live)
        silent: list[socket.socket] = []

        def one_more() -> None:
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((host, int(port)))
            silent.append(sock)

        async def press() -> None:
            while True:
                await asyncio.sleep(1 / 60)
                one_more()

        for number in range(1300):
            one_more()
            if number % 50 == 0:
                await asyncio.sleep(0)
        pressing = asyncio.create_task(press())
        try:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            good = make_worker(scheme.address)
            await good.connect()
            seconds = loop.time() - begun
            record_property("seconds to join", seconds)
            assert seconds < 2 + PATIENCE / 10  # 2 s, on an idle machine
            await good.serve()
            for version in range(1, 21):
                fill(model, version)
                assert (await scheme.send()).ok
            assert live.scheme.stats.updates == 21
            assert value_of(live.model) == value_of(good.model) == 20
        finally:
            pressing.cancel()
            for sock in silent:
                sock.close()
        for worker in (good, live):
            await worker.close()


async def test_strangers_do_not_count_as_connections() -> None:
    async with sender_of(Uniform(), max_connections=2) as scheme:
        first = make_worker(scheme.address)
        await join(scheme, first)
        silent = [await RawWorker.dial(scheme) for _ in range(8)]
        second = make_worker(scheme.address)
        await second.connect()
        third = make_worker(scheme.address)
        waiting = asyncio.create_task(third.connect())
        await asyncio.sleep(BRIEF)
        assert not waiting.done()  # it tries again
        await second.close()
        await within(waiting)
        for peer in silent:
            await peer.close()
        for worker in (first, third):
            await worker.close()


async def test_the_log_of_refusals_is_short(caplog: pytest.LogCaptureFixture) -> None:
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        caplog.clear()
        for _ in range(50):
            peer = await RawWorker.dial(scheme)
            peer.say(hello(protocol=0), f.Bye(reason="x\nCRITICAL forged\x1b[31m"))
            await peer.rest()
            await peer.close()
        lines = [record.getMessage() for record in caplog.records]
        assert 1 <= len(lines) <= 6
        assert all(line.isprintable() for line in lines)
        await worker.close()
    assert any("more warnings of this kind" in record.getMessage() for record in caplog.records)


async def test_a_trainer_that_was_busy_for_longer_than_the_handshake_may_take() -> None:
    async with sender_of(Uniform()) as scheme:
        listener: Any = scheme.shared_transport
        listener.patience = BRIEF
        live = make_worker(scheme.address)
        await join(scheme, live)
        worker = make_worker(scheme.address)

        async def work() -> int | None:
            await worker.connect()
            index = worker.scheme.worker_idx
            await worker.close()
            return index

        in_a_thread = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
        for _ in range(6):
            await asyncio.sleep(0.02)
            time.sleep(2 * BRIEF)  # noqa: ASYNC251 - a step of the optimizer
        assert await within(in_a_thread) == 1
        await live.close()


@pytest.mark.parametrize("tls", [False, True])
async def test_a_sender_that_hangs_up_while_it_starts(tls: bool) -> None:
    """The first connections are accepted by something that has no sender behind it yet."""
    config = certificates().config if tls else None
    hung_up = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hung_up
        hung_up += 1
        await reader.read(1)
        writer.transport.abort()

    door = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = door.sockets[0].getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    worker_scheme = TCPWeightSyncScheme(address, token=TOKEN, tls=config, timeout=PATIENCE)
    worker = LocalWorker(worker_scheme, 0, Uniform(-1.0), {})
    worker.init(worker_idx=None)
    connecting = asyncio.create_task(worker.connect())
    await eventually(lambda: hung_up >= 2, "it has tried again")
    door.close()
    await door.wait_closed()
    scheme = TCPWeightSyncScheme(address, token=TOKEN, tls=config, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(3.0))
    await within(asyncio.gather(scheme.connect(), connecting))
    assert value_of(worker.model) == 3
    await worker.close()
    await within(scheme.aclose())


async def test_a_stranger_in_the_middle_of_a_tls_handshake_gives_way_without_nonsense() -> None:
    """What is sent in plain after the first TLS record would be a broken record."""
    found = certificates()
    scheme = TCPWeightSyncScheme(tls=found.config, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    peer = await RawWorker.dial(scheme)
    layer = TLSLayer(found.config.for_worker(), "localhost")
    layer.do_handshake()
    peer.writer.write(layer.outgoing.read())
    answer = await within(peer.reader.read(1 << 16))
    listener: Any = scheme.shared_transport
    listener._expel_one()
    answer += await within(peer.reader.read())
    while answer:  # whole TLS records, and nothing else
        assert answer[0] in (20, 21, 22, 23)
        answer = answer[5 + int.from_bytes(answer[3:5], "big") :]
    connecting.cancel()
    await peer.close()
    await within(scheme.aclose())


# -- guessing ----------------------------------------------------------------------------------------


def test_a_guess_takes_long() -> None:
    """By more than 1000 times than a bare hash, of which a core makes 200,000 a second and more."""
    begun = time.process_time()
    for number in range(5):
        _derived.__wrapped__(b"a guess %d" % number)
    assert (time.process_time() - begun) / 5 > 1000 / 226_000


@pytest.mark.parametrize("token", ["short", "a" * 40, "abcabcabcabcabcabcabc"])
def test_a_weak_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="token_hex"):
        TCPWeightSyncScheme("tcp://127.0.0.1:0", token=token)


def _open_worker(address: str) -> LocalWorker:
    """A worker that knows no token."""
    worker = LocalWorker(TCPWeightSyncScheme(address, timeout=PATIENCE), 0, Uniform(-1.0), {})
    worker.init(worker_idx=None)
    return worker


# -- Unix sockets ------------------------------------------------------------------------------------


async def test_a_squatted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's process listens where the sender was to listen."""
    scheme = TCPWeightSyncScheme(f"unix://{tmp_path}/socket", timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform(7.0))
    connecting = asyncio.create_task(scheme.connect())
    me = os.geteuid()
    monkeypatch.setattr(tcp_module, "credentials", lambda sock: (1, me + 1))
    worker = _open_worker(scheme.address)
    with pytest.raises(HandshakeError, match=f"is of user {me + 1}"):
        await worker.connect()
    assert value_of(worker.model) != 7
    connecting.cancel()
    await scheme.aclose()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_path_squatted_by_another_users_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        os.chmod(folder, 0o1777)  # as /tmp is
        ready, squats = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                os.setuid(65534)
                squatter = socket.socket(socket.AF_UNIX)
                squatter.bind(path)
                squatter.listen()
                os.write(squats, b".")
                connections = [squatter.accept() for _ in range(2)]
                connections[0][0].recv(1)
            os._exit(0)
        try:
            assert os.read(ready, 1)
            worker = _open_worker(f"unix://{path}")
            with pytest.raises(HandshakeError, match="is of user 65534"):
                asyncio.run(worker.connect())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ready)
            os.close(squats)


def test_a_second_sender_leaves_the_first_ones_socket_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = TCPWeightSyncScheme(f"unix://{path}")
    first.init_on_sender(model_id="policy", model=Uniform())
    inode = path.stat().st_ino
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            other = TCPWeightSyncScheme(f"unix://{path}")
            try:
                other.init_on_sender(model_id="policy", model=Uniform())
            except InvalidArgumentError as exc:
                code = 0 if "another sender listens there" in str(exc) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.stat().st_ino == inode
    asyncio.run(first.aclose())
    assert list(tmp_path.iterdir()) == []


def test_a_killed_senders_path_is_free_while_its_children_live(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    read, write = os.pipe()
    sender = os.fork()
    if sender == 0:
        scheme = TCPWeightSyncScheme(f"unix://{path}")
        scheme.init_on_sender(model_id="policy", model=Uniform())
        if os.fork() == 0:
            os.write(write, os.getpid().to_bytes(4, "big"))  # it has closed its parent's descriptors
            time.sleep(60)
            os._exit(0)
        os._exit(0)  # without a goodbye
    os.waitpid(sender, 0)
    child = int.from_bytes(os.read(read, 4), "big")
    try:
        second = TCPWeightSyncScheme(f"unix://{path}")
        second.init_on_sender(model_id="policy", model=Uniform())
        asyncio.run(second.aclose())
    finally:
        os.kill(child, 9)
        os.close(read)
        os.close(write)


# -- addresses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "tcp://" + "a" * 300 + ":1",
        "tcp://a..b:1",
        "tcp://h\0:1",
        "tcp://h h:1",
        "tcp://[zz]:1",
        "unix:///a\0b",
        "unix:///\ud800",
    ],
)
def test_odd_addresses(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="address"):
        TCPWeightSyncScheme(address)
