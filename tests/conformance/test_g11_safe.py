"""G11: strangers are refused, garbage is survived, and nothing is allocated on a stranger's word."""

from __future__ import annotations

import ast
import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aiosync
from aiosync import HandshakeError, LayoutMismatchError, SharedMemWeightSyncScheme
from aiosync._deadline import Deadline
from aiosync.errors import ProtocolError
from aiosync.protocol import frames, framing
from aiosync.protocol.sender_session import SenderSession
from aiosync.protocol.session import proof_of
from aiosync.transports.base import FramedTransport
from aiosync.transports.unix_socket import UnixListener
from aiosync.weights.layout import Layout
from tests.kit.cases import Recipe, SchemeCase
from tests.kit.clock import PATIENCE, within
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.raw_peer import drain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")

SHARED = SchemeCase("shared", lambda workers, options: _recipe(options))


FILE = {"kind": "file", "path": "", "inode": 1, "nbytes": 256}
MEMFD = {"kind": "memfd", "pid": 0, "fd": 0, "inode": 0, "nbytes": 256}


def _recipe(options: dict[str, Any]) -> Recipe:
    return Recipe(SharedMemWeightSyncScheme(**options))


async def _dial(cluster: LocalCluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    listener = cluster.scheme.shared_transport
    assert isinstance(listener, UnixListener)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + listener.address[1:])
    return await asyncio.open_unix_connection(sock=sock)


async def _still_sound(cluster: LocalCluster) -> None:
    fill(cluster.model, cluster.scheme.version + 1)
    await cluster.scheme.send()
    assert {value_of(w.model) for w in cluster.workers} == {cluster.scheme.version}


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        secrets.token_bytes(4096),
        framing.encode(frames.Fetch()),
        framing.encode(frames.Hello(protocol=999, worker=0, pid=0, nonce=b"x" * 16)),
        framing.encode(frames.Hello(protocol=frames.PROTOCOL_VERSION, worker=0, pid=0, nonce=b"short")),
        framing.encode(frames.Bye(reason="no")),
        b"",
    ],
    ids=["http", "random", "too early", "protocol", "nonce", "bye", "nothing"],
)
async def test_garbage_from_a_stranger(garbage: bytes) -> None:
    async with LocalCluster(SHARED) as cluster:
        reader, writer = await _dial(cluster)
        writer.write(garbage)
        if not garbage:
            writer.write_eof()
        await within(reader.read())  # whatever it says, it hangs up
        writer.close()
        await writer.wait_closed()
        await _still_sound(cluster)


async def test_a_frame_that_claims_to_be_huge() -> None:
    async with LocalCluster(SHARED) as cluster:
        reader, writer = await _dial(cluster)
        head = bytearray(framing.encode(frames.Fetch())[: framing.HEADER_SIZE])
        head[4:8] = (1 << 30).to_bytes(4, "big")
        writer.write(bytes(head))
        await within(reader.read())
        writer.close()
        await writer.wait_closed()
        await _still_sound(cluster)


async def test_a_stranger_who_says_nothing_holds_nobody_up() -> None:
    async with LocalCluster(SHARED) as cluster:
        connections = [await _dial(cluster) for _ in range(20)]
        await _still_sound(cluster)
        for _, writer in connections:
            writer.close()
            await writer.wait_closed()


async def test_a_worker_without_the_token() -> None:
    async with LocalCluster(SHARED) as cluster:
        stranger = SharedMemWeightSyncScheme(timeout=PATIENCE)
        listener = cluster.scheme.shared_transport
        assert isinstance(listener, UnixListener)
        stranger._address = listener.address
        stranger.init_on_receiver(model_id="policy", model=Uniform(-1.0), worker_idx=0)
        with pytest.raises(HandshakeError, match="token"):
            await stranger.connect()
        await stranger.aclose()
        assert set(cluster.scheme.sender_transports) == {0, 1}
        await _still_sound(cluster)


async def test_a_proof_that_was_overheard_proves_nothing() -> None:
    token = secrets.token_bytes(32)
    first, second = SenderSession(token), SenderSession(token)
    hello = frames.Hello(protocol=frames.PROTOCOL_VERSION, worker=0, pid=0, nonce=b"n" * 16)
    first.receive(hello)
    second.receive(hello)
    (challenge,) = drain(first)
    assert isinstance(challenge, frames.Challenge)
    proof = frames.Proof(proof=proof_of(token, b"worker", hello.nonce, challenge.nonce))
    with pytest.raises(HandshakeError):
        second.receive(proof)
    first.receive(proof)
    assert first.receive(frames.Join())


class _ForgedSender:
    """Knows the token, and says what it likes."""

    def __init__(
        self, scheme: SharedMemWeightSyncScheme, welcome: frames.Welcome, update: frames.Update
    ) -> None:
        self.listener = UnixListener()
        self._session = SenderSession(scheme._token, os.getpid())
        self._says = welcome, frames.Notify(round=0)
        self._update = update
        self.answers: asyncio.Queue[frames.Frame] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._transports: list[FramedTransport] = []

    async def listen(self) -> None:
        await self.listener.listen(
            lambda t: self._tasks.append(asyncio.ensure_future(self._serve(t))), lambda worker, reason: None
        )

    async def _serve(self, transport: FramedTransport) -> None:
        self._transports.append(transport)
        await transport.authenticate_worker(self._session, Deadline.after(PATIENCE))
        transport.write(*self._says)
        answer = await transport.receive(Deadline.after(PATIENCE))
        if isinstance(answer, frames.Fetch):
            transport.write(self._update)
            answer = await transport.receive(Deadline.after(PATIENCE))
        self.answers.put_nowait(answer)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)
        for transport in self._transports:
            await transport.aclose()
        self.listener.close()


def _update(handle: dict[str, Any] | None = None) -> frames.Update:
    new = [[0, handle]] if handle is not None else []
    return frames.Update(round=0, version=0, payload={"slot": 0, "new": new, "gone": []})


def _own_layout() -> dict[str, Any]:
    model = Uniform()
    return Layout.of(dict(model.named_parameters())).to_wire()


def _enormous() -> dict[str, Any]:
    return Layout([(f"values.{i}", (1 << 40,), torch.float32) for i in range(4)]).to_wire()


@pytest.mark.parametrize(
    ("layout", "device", "update", "error"),
    [
        (_enormous(), "cpu", _update(), LayoutMismatchError),
        ({"entries": "nonsense"}, "cpu", _update(), ProtocolError),
        (_own_layout(), "nowhere", _update(), ProtocolError),
        (_own_layout(), "cpu", _update(), ProtocolError),
        (_own_layout(), "cpu", _update({**FILE, "path": "/etc/passwd"}), ProtocolError),
        (_own_layout(), "cpu", _update({**MEMFD, "pid": 1}), ProtocolError),
        (_own_layout(), "cpu", _update({"kind": "nonsense"}), ProtocolError),
    ],
    ids=["enormous", "no layout", "no device", "no slot", "a file", "another process", "no handle"],
)
async def test_a_sender_that_forges(
    layout: dict[str, Any], device: str, update: frames.Update, error: type[Exception]
) -> None:
    scheme = SharedMemWeightSyncScheme(timeout=PATIENCE)
    welcome = frames.Welcome(layout=layout, version=0, worker=0, instance="i", device=device)
    forger = _ForgedSender(scheme, welcome, update)
    await forger.listen()
    scheme._address = forger.listener.address
    model = Uniform(5.0)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    with pytest.raises(error):
        await scheme.connect()
    assert isinstance(await within(forger.answers.get()), frames.Nack)
    assert value_of(model) == 5
    await scheme.aclose()
    await forger.close()


def test_nothing_that_reads_a_socket_unpickles() -> None:
    package = Path(aiosync.__file__).parent
    # The caller's own pipe may carry the caller's own pickles; queues pickle by themselves.
    allowed = {"transports/mp/pipes.py"}
    banned = {"pickle", "ForkingPickler", "cloudpickle", "marshal"}
    found: set[str] = set()
    folders = (
        package / name
        for name in ("protocol", "receiver", "relay", "sender", "transfer", "transports", "weights")
    )
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom():
                    names = {node.module or "", *(alias.name for alias in node.names)}
                case ast.Import():
                    names = {alias.name for alias in node.names}
                case ast.Attribute():
                    names = {"pickle"} if ast.unparse(node) == "torch.load" else set()
                case _:
                    continue
            if banned & names:
                found.add(path.relative_to(package).as_posix())
    assert found <= allowed
