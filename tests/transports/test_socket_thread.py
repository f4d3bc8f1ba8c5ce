"""A socket thread by itself: a connection whose socket cannot be written."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from functools import partial

import msgspec
import pytest

from aiosync import TLSConfig
from aiosync.errors import ProtocolError
from aiosync.protocol.frames import FROM_SENDER, MAX_FRAME, Bye, Chunk, End, Frame, Inbound, Update
from aiosync.protocol.framing import encode
from aiosync.transports._loop_thread import LoopThread
from aiosync.transports.tcp.socket_thread import SocketThread
from aiosync.transports.tcp.socket_writer import _MAX_UNSENT
from aiosync.transports.tcp.tls import TLSLayer
from tests.kit.certificates import certificates
from tests.kit.clock import eventually, within


class Owner:
    """Records its calls."""

    def __init__(self) -> None:
        self.open = False
        self.frames: list[Frame] = []
        self.ended: str | None = None

    def connection(
        self, thread: LoopThread, sock: socket.socket, tls: TLSLayer | None = None
    ) -> SocketThread:
        """A connection of this owner, which reads and writes."""
        calls = {"on_open": self.on_open, "on_frames": self.on_frames, "on_end": self.on_end}
        connection = SocketThread(thread, sock, tls, **calls)  # type: ignore[arg-type]
        connection.start(None)
        return connection

    def on_open(self) -> None:
        self.open = True

    def on_frames(self, frames: list[Frame]) -> None:
        self.frames += frames

    def on_end(self, reason: str, error: ProtocolError | None) -> None:
        self.ended = reason


class Failing(socket.socket):
    """A socket whose writes fail."""

    code = 0

    def sendmsg(self, *args: object) -> int:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        (errno.ENOBUFS, True),
        (errno.ENOMEM, True),
        (errno.EHOSTUNREACH, True),
        (errno.EPIPE, False),  # what the peer said before its end is still to be read
        (errno.ECONNRESET, False),
    ],
)
async def test_a_write_that_fails(code: int, lost: bool) -> None:
    ours, theirs = socket.socketpair()
    sock = Failing(fileno=ours.detach())
    sock.code = code
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, sock)
    await eventually(lambda: owner.open, "it is open")
    try:
        connection.writer.write(encode(Bye(reason="never arrives")))
        if lost:
            await eventually(lambda: owner.ended is not None, "the loss is reported")
            assert owner.ended == f"its connection broke: {os.strerror(code)}"
        else:
            theirs.sendall(encode(Bye(reason="the last word")))
            theirs.close()
            await eventually(lambda: owner.ended is not None, "the end is read")
            assert [frame.reason for frame in owner.frames if isinstance(frame, Bye)] == ["the last word"]
    finally:
        await connection.aclose()
        thread.close()
        theirs.close()


async def test_two_tasks_close_one_connection() -> None:
    ours, theirs = socket.socketpair()
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, ours)
    await eventually(lambda: owner.open, "it is open")
    try:
        theirs.close()
        await within(asyncio.gather(connection.aclose(), connection.aclose()))
    finally:
        thread.close()


@pytest.mark.parametrize("together", [False, True])
async def test_frames_for_a_peer_that_does_not_read_end_its_connection(together: bool) -> None:
    ours, theirs = socket.socketpair()
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, ours)
    await eventually(lambda: owner.open, "it is open")
    frame, written, writer = bytes(100_000), 0, connection.writer
    try:
        while not writer.muted and written < 100:
            if together:
                writer.write_together([frame])
            else:
                writer.write(frame)
            written += 1
        # With many in one turn, the thread writes those after the first few when the turn has ended.
        assert together or written - writer.progress // len(frame) <= _MAX_UNSENT + 2
        await eventually(lambda: owner.ended is not None, "the end is reported")
        assert owner.ended == f"it does not read: {_MAX_UNSENT} frames wait for it"
    finally:
        await connection.aclose()
        thread.close()
        theirs.close()


async def test_a_peer_that_reads_too_slowly_counts_as_one_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, ours)
    await eventually(lambda: owner.open, "it is open")
    frame, rounds = bytes(50_000), 0
    try:
        while not connection.writer.muted and rounds < 200:  # three frames are written while one is read
            for _ in range(3):
                connection.writer.write(frame)
            with suppress(BlockingIOError):
                theirs.recv(len(frame))
            await asyncio.sleep(0.001)
            rounds += 1
        assert rounds < 100
        await eventually(lambda: owner.ended is not None, "the end is reported")
    finally:
        await connection.aclose()
        thread.close()
        theirs.close()


class Landing:
    """Takes chunks of any size."""

    def begin(self, update: Update) -> None: ...

    def place(self, chunk: Chunk) -> memoryview:
        return memoryview(bytearray(chunk.size))

    def placed(self, chunk: Chunk) -> None: ...

    def finish(self, end: End) -> None: ...

    def abandon(self) -> None: ...


async def test_closing_does_not_wait_for_a_peer_that_sends_slowly() -> None:
    """Of a chunk, a few bytes arrive whenever the thread has waited for a while."""
    ours, theirs = socket.socketpair()
    thread, owner, stop = LoopThread("test-socket"), Owner(), threading.Event()
    connection = SocketThread(
        thread, ours, on_open=owner.on_open, on_frames=owner.on_frames, on_end=owner.on_end
    )
    connection.decoder.sink = Landing()
    connection.decoder.inbound = Inbound(MAX_FRAME, msgspec.msgpack.Decoder(Frame))
    connection.start(None)
    await eventually(lambda: owner.open, "it is open")
    update, chunk = Update(round=0, version=0, payload={}), Chunk(block=0, size=1 << 20, checksum=0)
    theirs.sendall(encode(update) + encode(chunk))

    def drip() -> None:
        with suppress(OSError):
            while not stop.wait(0.03):
                theirs.send(b"abc")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        await asyncio.sleep(0.3)  # the thread waits for the rest of the chunk
        await within(connection.aclose(), 5.0)
    finally:
        stop.set()
        dripping.join()
        thread.close()
        theirs.close()


def _tls_config() -> TLSConfig:
    config = certificates().config
    return TLSConfig(config.certfile, config.keyfile, config.cafile)


async def test_what_waits_encrypted_for_a_peer_is_limited_too() -> None:
    config = _tls_config()
    ours, theirs = socket.socketpair()
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, ours, TLSLayer(config.for_sender()))
    wrap = partial(config.for_worker().wrap_socket, theirs, server_hostname="localhost")
    peer = await asyncio.to_thread(wrap)
    await eventually(lambda: owner.open, "it is open")
    peer.settimeout(0.05)
    writer, frame = connection.writer, bytes(100_000)
    assert writer.tls is not None

    def waiting() -> float:
        with writer.lock:
            encrypted = len(writer._sealed) + (writer.tls.outgoing.pending if writer.tls else 0)
            return (encrypted + sum(map(len, (*writer._pieces, *writer._queue)))) / len(frame)  # type: ignore[arg-type]

    try:
        for _ in range(20):
            while waiting() < _MAX_UNSENT - 2 and not writer.muted:
                writer.write(frame)
            with suppress(TimeoutError):  # it reads now and then
                await asyncio.to_thread(peer.recv, 1 << 16)
            assert writer.muted or waiting() < _MAX_UNSENT + 5
        while not writer.muted:
            writer.write(frame)
            assert writer.muted or waiting() < _MAX_UNSENT + 5
        await eventually(lambda: owner.ended is not None, "the end is reported")
    finally:
        await connection.aclose()
        thread.close()
        peer.close()


async def test_a_peer_that_has_ended_its_tls_sends_nothing_more() -> None:
    """Otherwise what it sends would be collected in the TLS layer, without a limit."""
    config = _tls_config()
    ours, theirs = socket.socketpair()
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, ours, TLSLayer(config.for_sender()))
    peer = TLSLayer(config.for_worker(), "localhost")

    def shake_hands() -> None:
        while not peer.do_handshake():
            theirs.sendall(peer.outgoing.read())
            peer.incoming.write(theirs.recv(1 << 16))
        theirs.sendall(peer.outgoing.read())

    try:
        await within(asyncio.to_thread(shake_hands))
        await eventually(lambda: owner.open, "it is open")
        with suppress(ssl.SSLWantReadError):
            peer._tls.unwrap()
        theirs.sendall(peer.outgoing.read())
        await eventually(lambda: owner.ended is not None, "the connection has ended")
        assert "has ended its TLS" in str(owner.ended)
    finally:
        await connection.aclose()
        thread.close()
        theirs.close()


@pytest.mark.parametrize("stranger", [True, False])
async def test_what_a_stranger_may_have_unread(stranger: bool) -> None:
    ours, theirs = socket.socketpair()
    thread, owner = LoopThread("test-socket"), Owner()
    connection = owner.connection(thread, ours)
    if not stranger:
        connection.decoder.inbound = FROM_SENDER
    data = memoryview(encode(Bye(reason="x" * 1000)) * 2000)
    theirs.setblocking(False)
    try:
        # This event loop is busy meanwhile, so that no frame is handled.
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                data = data[theirs.send(data) :]
        assert connection._paused and not owner.frames
        assert (connection._decoded < 200_000) == stranger
    finally:
        await connection.aclose()
        thread.close()
        theirs.close()
