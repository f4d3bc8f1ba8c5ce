"""Who is let in over TCP, what a stranger can cost, and that nothing is unpickled."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import secrets
import socket
import stat
import tracemalloc
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from aiosync import (
    HandshakeError,
    InsecureTransportError,
    InvalidArgumentError,
    TCPWeightSyncScheme,
    TLSConfig,
    WorkerLostError,
)
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.session import proof_of
from tests.kit.certificates import certificates
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.tcp import TOKEN, join, make_worker, sender_of


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def _refused(caplog: pytest.LogCaptureFixture, word: str) -> None:
    await eventually(lambda: any(word in line for line in _warnings(caplog)), f"a warning about {word}")
    assert len([line for line in _warnings(caplog) if "refused" in line]) == 1


async def _still_updating(scheme: TCPWeightSyncScheme, model: Uniform, worker: LocalWorker) -> None:
    fill(model, 5)
    assert (await scheme.send()).ok
    assert value_of(worker.model) == 5
    await worker.close()


# -- tokens ----------------------------------------------------------------------------------------


async def test_a_wrong_token(caplog: pytest.LogCaptureFixture) -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        caplog.clear()
        stranger = TCPWeightSyncScheme(scheme.address, token="another token, as long", timeout=PATIENCE)
        stranger.init_on_receiver(model_id="policy", model=Uniform())
        with pytest.raises(HandshakeError, match="token"):
            await stranger.connect()
        await _still_updating(scheme, model, worker)


async def _dial(scheme: TCPWeightSyncScheme) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = scheme.address.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _hello(protocol: int = f.PROTOCOL_VERSION) -> f.Hello:
    return f.Hello(protocol=protocol, worker=-1, pid=0, nonce=os.urandom(16), model_id="policy")


async def _ends(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):
        while await within(reader.read(1 << 16)):
            pass


async def test_a_proof_that_was_overheard(caplog: pytest.LogCaptureFixture) -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        hello = _hello()
        proof = b""
        for attempt in range(2):
            caplog.clear()
            reader, writer = await _dial(scheme)
            writer.write(framing.encode(hello))
            decoder, seen = framing.FrameDecoder(), list[f.Frame]()
            while not seen:
                seen += decoder.feed(await within(reader.read(4096)))
            (challenge,) = seen
            assert isinstance(challenge, f.Challenge)
            if not proof:
                proof = proof_of(scheme._token, b"worker", hello.nonce, challenge.nonce)
            writer.write(framing.encode(f.Proof(proof=proof)) + framing.encode(f.Join()))
            if attempt == 0:
                await eventually(lambda: len(scheme.workers) == 2, "the first time it is good")
            else:
                await _ends(reader)
                await _refused(caplog, "token")
            writer.close()
        await eventually(lambda: len(scheme.workers) == 1, "the first has gone")
        await _still_updating(scheme, model, worker)


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (framing.encode(_hello(protocol=0)), "protocol 0"),
        (framing.encode(_hello())[:2] + b"\x00" + framing.encode(_hello())[3:], "protocol version"),
        (framing.encode(f.Refused(reason="x" * 9000)), "over the limit"),
        (b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n", "expected a frame"),
        (framing.encode(f.Fetch()), "cannot be read"),
        (framing.encode(f.Chunk(block=0, size=1 << 30, checksum=0)) + bytes(100), "cannot be read"),
        (framing.encode(f.Join()), "may come"),
        (framing.encode(_hello())[:-1] + b"\xff", "corrupted"),
    ],
    ids=[
        "an older protocol",
        "another version",
        "too large",
        "a browser",
        "a fetch",
        "a chunk",
        "too early",
        "damaged",
    ],
)
async def test_what_is_no_greeting(sent: bytes, word: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        caplog.clear()
        reader, writer = await _dial(scheme)
        writer.write(sent)
        await _ends(reader)
        await _refused(caplog, word)
        writer.close()
        await _still_updating(scheme, model, worker)


async def test_who_says_nothing_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        listener: Any = scheme.shared_transport
        listener.patience = BRIEF
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        caplog.clear()
        reader, writer = await _dial(scheme)
        writer.write(framing.encode(_hello())[:20])
        await _ends(reader)
        await _refused(caplog, "not finished")
        writer.close()
        await _still_updating(scheme, model, worker)


async def test_only_so_many_strangers_at_a_time() -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        silent = [await _dial(scheme) for _ in range(400)]
        listener: Any = scheme.shared_transport
        oldest, _ = silent[0]
        decoder, seen = framing.FrameDecoder(), list[f.Frame]()
        while not seen:
            seen += decoder.feed(await within(oldest.read(4096)))
        assert isinstance(seen[0], f.Refused) and seen[0].retry
        await eventually(lambda: len(listener._alive) <= 258, "as many as are let in")
        assert len(listener._strangers) <= 257
        for _, writer in silent:
            writer.close()
        await eventually(lambda: not listener._strangers, "they are gone")
        await _still_updating(scheme, model, worker)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_garbage_beside_good_workers(count: int, caplog: pytest.LogCaptureFixture) -> None:
    # Each refusal is a line, and pytest keeps every line that it sees: that is not what is measured here.
    caplog.set_level(logging.ERROR, "aiosync")
    dice = random.Random(count)
    model = Uniform()
    async with sender_of(model) as scheme:
        workers = [make_worker(scheme.address) for _ in range(2)]
        await join(scheme, *workers)
        version = 0

        async def bother() -> None:
            host, _, port = scheme.address.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port))) as sock:
                sock.setblocking(False)
                start = framing.encode(_hello()) if dice.random() < 0.5 else b""
                sock.send(start[: dice.randrange(len(start) + 1)] + dice.randbytes(dice.randrange(200)))
                await asyncio.sleep(0)

        tracemalloc.start()
        for number in range(count):
            await bother()
            if number % 50 == 0:
                version += 1
                fill(model, version)
                assert (await scheme.send()).ok
            if number == count // 2:
                first, _ = tracemalloc.get_traced_memory()
        listener: Any = scheme.shared_transport
        await eventually(lambda: not listener._strangers, "all of them have been sent away")
        last, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert last - first < 2_000_000
        assert [value_of(worker.model) for worker in workers] == [version, version]
        assert all(worker.scheme.stats.updates == version + 1 for worker in workers)
        for worker in workers:
            await worker.close()


# -- TLS -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("config", "stranger"), ("config", "anonymous"), ("config", "expired"), ("expired", "config")],
    ids=["another authority", "no certificate", "an expired one", "the sender's is expired"],
)
async def test_certificates_that_do_not_do(ours: str, theirs: str, caplog: pytest.LogCaptureFixture) -> None:
    found = certificates()
    scheme = TCPWeightSyncScheme(tls=getattr(found, ours), timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    stranger = TCPWeightSyncScheme(scheme.address, tls=getattr(found, theirs), timeout=PATIENCE)
    stranger.init_on_receiver(model_id="policy", model=Uniform(9.0))
    with pytest.raises((HandshakeError, WorkerLostError)):
        await stranger.connect()
    await _refused(caplog, "TLS")
    assert not scheme.workers
    good = TCPWeightSyncScheme(scheme.address, tls=found.config, timeout=PATIENCE)
    good.init_on_receiver(model_id="policy", model=Uniform())
    if ours == "config":
        await good.connect()
        await within(connecting)
        await good.aclose()
    else:
        connecting.cancel()
    await scheme.aclose()


async def test_renewed_certificates_are_used_for_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
    for path in paths:
        path.touch()
    files = TLSConfig(*map(str, paths))

    def renew(*, key: bool = True) -> TLSConfig:
        """Put the certificates of a new authority in their place; return what a worker of it needs."""
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(files.certfile or "")
        if key:
            issued.private_key_pem.write_to_path(files.keyfile or "")
        authority.cert_pem.write_to_path(files.cafile or "")
        folder = tmp_path / secrets.token_hex(4)
        folder.mkdir()
        own, trusted = str(folder / "own.pem"), str(folder / "ca.pem")
        issued.private_key_and_cert_chain_pem.write_to_path(own)
        authority.cert_pem.write_to_path(trusted)
        return TLSConfig(own, cafile=trusted)

    first = renew()
    model = Uniform()
    scheme = TCPWeightSyncScheme(tls=files, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=model)
    workers = []

    async def connects(config: TLSConfig) -> None:
        worker = TCPWeightSyncScheme(scheme.address, tls=config, timeout=PATIENCE)
        worker.init_on_receiver(model_id="policy", model=Uniform(9.0))
        await within(worker.connect())
        workers.append(worker)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(scheme.aclose)
        connecting = asyncio.create_task(scheme.connect(min_workers=1))
        await asyncio.sleep(0)
        await connects(first)
        await within(connecting)
        renew(key=False)
        await connects(first)  # half a renewal cannot be used: the old certificate stays
        assert "cannot be used" in caplog.text
        third = renew()
        await connects(third)
        assert len(scheme.workers) == 3  # the connections that were open stay
        with pytest.raises((HandshakeError, WorkerLostError)):
            await connects(first)
        for worker in workers:
            stack.push_async_callback(worker.aclose)


async def test_plain_words_to_a_tls_port(caplog: pytest.LogCaptureFixture) -> None:
    scheme = TCPWeightSyncScheme(tls=certificates().config, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    plain = TCPWeightSyncScheme(scheme.address, timeout=10 * BRIEF)
    plain.init_on_receiver(model_id="policy", model=Uniform())
    with pytest.raises(HandshakeError, match="give this worker tls="):
        await plain.connect()
    await _refused(caplog, "TLS")
    connecting.cancel()
    await scheme.aclose()


async def test_tls_to_a_plain_port(caplog: pytest.LogCaptureFixture) -> None:
    scheme = TCPWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    connecting = asyncio.create_task(scheme.connect())
    await asyncio.sleep(0)
    secret = TCPWeightSyncScheme(scheme.address, tls=certificates().config, timeout=PATIENCE)
    secret.init_on_receiver(model_id="policy", model=Uniform())
    with pytest.raises(HandshakeError, match="the sender does not speak TLS: take tls= away"):
        await secret.connect()
    await _refused(caplog, "that is TLS")
    connecting.cancel()
    await scheme.aclose()


def test_a_config_that_does_not_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no such file"):
        TLSConfig(certfile=str(tmp_path / "nowhere.pem"))
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for config in (TLSConfig(str(junk)), TLSConfig(cafile=certificates().config.cafile)):
        scheme = TCPWeightSyncScheme(tls=config)
        with pytest.raises(InvalidArgumentError, match="TLSConfig"):
            scheme.init_on_sender(model_id="policy", model=Uniform())


# -- addresses and secrets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost:80",
        "tcp://host",
        "tcp://:1",
        "tcp://h:99999",
        "unix://relative",
        "unix:///" + "x" * 120,
        7,
    ],
)
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="address"):
        TCPWeightSyncScheme(address)


def test_an_address_that_is_taken() -> None:
    first = TCPWeightSyncScheme()
    first.init_on_sender(model_id="policy", model=Uniform())
    second = TCPWeightSyncScheme(first.address)
    with pytest.raises(InvalidArgumentError, match="cannot listen"):
        second.init_on_sender(model_id="policy", model=Uniform())
    asyncio.run(first.aclose())


@pytest.mark.parametrize("options", [{"token": TOKEN}, {"insecure": True}, {"tls": True}])
def test_listening_to_other_machines(options: dict[str, Any]) -> None:
    with pytest.raises(InsecureTransportError, match="insecure=True"):
        TCPWeightSyncScheme("tcp://0.0.0.0:0").init_on_sender(model_id="policy", model=Uniform())
    given = {**options, **({"tls": certificates().config} if "tls" in options else {})}
    scheme = TCPWeightSyncScheme("tcp://0.0.0.0:0", **given)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    asyncio.run(scheme.aclose())


def test_tls_without_asking_workers_is_no_authentication() -> None:
    one_sided = TLSConfig(certificates().config.certfile)
    with pytest.raises(InsecureTransportError):
        TCPWeightSyncScheme("tcp://0.0.0.0:0", tls=one_sided).init_on_sender(
            model_id="policy", model=Uniform()
        )


def test_a_unix_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        scheme = TCPWeightSyncScheme(f"unix://{path}")
        scheme.init_on_sender(model_id="policy", model=Uniform())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InvalidArgumentError, match="cannot listen"):
            TCPWeightSyncScheme(f"unix://{path}").init_on_sender(model_id="policy", model=Uniform())
        asyncio.run(scheme.aclose())
        assert not path.exists()
        left_over = socket.socket(socket.AF_UNIX)
        left_over.bind(str(path))  # as one whose process was killed
        left_over.close()
    path.unlink()
    path.write_text("a file of the user's")
    with pytest.raises(InvalidArgumentError, match="cannot listen"):
        TCPWeightSyncScheme(f"unix://{path}").init_on_sender(model_id="policy", model=Uniform())
    assert path.read_text() == "a file of the user's"


def test_short_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="16 characters"):
        TCPWeightSyncScheme(token="short")


def test_secrets_are_never_shown() -> None:
    config = TLSConfig(certificates().config.certfile, password="open sesame")
    scheme = TCPWeightSyncScheme(token=TOKEN, tls=config)
    shown = f"{scheme!r} {scheme.__getstate__()!r} {config!r} {vars(scheme)!r}"
    for secret in (TOKEN, "open sesame", repr(bytes(scheme._token))):
        assert secret not in shown
    assert pickle.loads(pickle.dumps(scheme))._token == scheme._token


async def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*args: object, **kwargs: object) -> Any:
        raise AssertionError("something was unpickled")

    model = Uniform(size=1 << 18)
    async with sender_of(model, codec="delta") as scheme:
        monkeypatch.setattr(pickle, "loads", loads)
        monkeypatch.setattr(pickle, "load", loads)
        monkeypatch.setattr(pickle, "Unpickler", loads)
        worker = make_worker(scheme.address, Uniform(-1.0, size=1 << 18))
        await join(scheme, worker)
        for version in range(1, 4):
            fill(model, version)
            await scheme.send()
            assert value_of(worker.model) == version
        await worker.close()
