"""Unix sockets for frames: what a peer that does not read may cost."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

from aiosync._deadline import Deadline
from aiosync.errors import SyncTimeoutError, WorkerLostError
from aiosync.protocol.frames import FROM_SENDER, Abort, Bye, Frame
from aiosync.protocol.framing import FrameDecoder, encode
from aiosync.transports import unix_socket as shared_memory
from aiosync.transports.base import FramedTransport
from aiosync.transports.unix_socket import _MAX_UNSENT, UnixConnection, UnixListener, _os_address
from tests.kit.clock import steps

pytestmark = pytest.mark.asyncio


class Sink:
    """Hears of frames, unless it ``fails`` at them, and of the end."""

    def __init__(self, *, fails: bool = False) -> None:
        self.frames: list[Frame] = []
        self.reason: str | None = None
        self.ended = asyncio.Event()
        self._fails = fails

    def frame_received(self, frame: Frame) -> None:
        if self._fails:
            raise ValueError("a fault")
        self.frames.append(frame)

    def connection_lost(self, reason: str) -> None:
        self.reason = reason
        self.ended.set()


async def _connected(listener: UnixListener) -> tuple[socket.socket, FramedTransport]:
    accepted: asyncio.Queue[FramedTransport] = asyncio.Queue()
    await listener.listen(accepted.put_nowait, lambda worker, reason: None)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(_os_address(listener.address))
    peer.setblocking(False)
    return peer, await accepted.get()


async def test_frames_do_not_pile_up_for_a_peer_that_does_not_read() -> None:
    listener, sink = UnixListener(), Sink()
    peer, transport = await _connected(listener)
    transport.start(sink)
    long = Abort(joint="a" * 8192)
    written = 0
    while sink.reason is None and written < 10_000:
        transport.write(long)
        written += 1
    assert sink.reason is not None and "does not read" in sink.reason
    taken = b""
    while True:
        try:
            taken += peer.recv(1 << 20)
        except BlockingIOError:
            break
    decoder = FrameDecoder(FROM_SENDER)
    in_kernel = len([*decoder.feed(taken)]) + (1 if decoder.alone(encode(Bye())) is None else 0)
    # Besides those: the one that the kernel did not take whole, and the one that was refused.
    assert written - in_kernel <= _MAX_UNSENT + 2
    await transport.aclose()
    peer.close()
    listener.close()


async def test_a_peer_that_catches_up_is_kept() -> None:
    listener, sink = UnixListener(), Sink()
    peer, transport = await _connected(listener)
    transport.start(sink)
    long = Abort(joint="a" * 8192)
    loop = asyncio.get_running_loop()
    decoder = FrameDecoder(FROM_SENDER)
    received = 0
    for _ in range(20):
        # As much as the kernel takes, and a few frames over.
        written = 0
        while not transport._unsent:  # type: ignore[attr-defined]
            transport.write(long)
            written += 1
        for _ in range(_MAX_UNSENT - 1):
            transport.write(long)
            written += 1
        expected = received + written
        while received < expected:
            data = await asyncio.wait_for(loop.sock_recv(peer, 1 << 20), 10)
            for frame in decoder.feed(data):
                assert frame == long
                received += 1
    assert sink.reason is None
    await transport.aclose()
    peer.close()
    listener.close()


@pytest.mark.parametrize("unread", [False, True])
async def test_what_a_peer_said_last_is_heard_though_it_reads_no_more(unread: bool) -> None:
    listener, sink = UnixListener(), Sink()
    peer, transport = await _connected(listener)
    transport.trust(FROM_SENDER)
    transport.start(sink)
    if unread:
        transport.write(Abort(joint="unread"))
    peer.send(encode(Abort(joint="last")))
    peer.close()
    transport.write(Abort(joint="too late"))
    assert sink.reason is None
    await asyncio.wait_for(sink.ended.wait(), 10)
    assert sink.frames == [Abort(joint="last")]
    assert sink.reason is not None and "its connection closed" in sink.reason
    transport.write(Abort(joint="unknown"))
    await transport.aclose()
    listener.close()


async def test_a_fault_in_here_ends_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    listener, sink = UnixListener(), Sink(fails=True)
    peer, transport = await _connected(listener)
    transport.trust(FROM_SENDER)
    transport.start(sink)
    peer.send(encode(Abort(joint="any")))
    await asyncio.wait_for(sink.ended.wait(), 10)
    assert peer.recv(10) == b""
    assert "closed after an unexpected error" in caplog.text
    await transport.aclose()
    peer.close()
    listener.close()


async def test_without_a_descriptor_it_listens_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "_RETRY", 0.05)
    listener = UnixListener()

    class Short:
        """A listening socket in a process that has no descriptor left."""

        def __init__(self, sock: socket.socket) -> None:
            self.fileno = sock.fileno

        def accept(self) -> None:
            listener._socket = whole
            raise OSError(errno.EMFILE, "too many open files")

    whole, listener._socket = listener._socket, Short(listener._socket)  # type: ignore[assignment]
    peer, transport = await _connected(listener)
    assert "no worker can connect" in caplog.text
    await transport.aclose()
    peer.close()
    listener.close()


async def test_a_write_that_fails_for_another_reason_is_the_end() -> None:
    listener, sink = UnixListener(), Sink()
    peer, transport = await _connected(listener)
    transport.start(sink)
    assert isinstance(transport, shared_memory.UnixConnection)
    whole = transport._sock
    assert whole is not None

    class Full:
        """A socket that the kernel has no memory for."""

        def send(self, data: bytes) -> int:
            raise OSError(errno.ENOMEM, "no memory")

    transport._sock = Full()  # type: ignore[assignment]
    transport.write(Abort(joint="any"))
    assert sink.reason is not None and "no memory" in sink.reason
    transport._sock = whole
    await transport.aclose()
    peer.close()
    listener.close()


async def test_what_has_arrived_is_taken_without_a_turn_of_the_loop() -> None:
    listener, sink = UnixListener(), Sink()
    peer, transport = await _connected(listener)
    transport.trust(FROM_SENDER)
    transport.start(sink)
    assert not transport.take_arrived()
    peer.send(encode(Abort(joint="a")))
    assert transport.take_arrived()
    assert sink.frames == [Abort(joint="a")]
    assert not transport.take_arrived()
    peer.send(encode(Abort(joint="b")))
    peer.close()
    assert transport.take_arrived() and transport.take_arrived()
    assert len(sink.frames) == 2 and sink.reason is not None
    assert not transport.take_arrived()
    await transport.aclose()
    listener.close()


async def test_nothing_is_taken_while_a_connection_closes() -> None:
    listener, sink = UnixListener(), Sink()
    peer, transport = await _connected(listener)
    transport.trust(FROM_SENDER)
    transport.start(sink)
    assert isinstance(transport, UnixConnection)
    while not transport._unsent:  # so that closing waits until the peer has read it
        transport.write(Abort(joint="a" * 8192))
    closing = asyncio.create_task(transport.aclose())
    await steps(5)
    peer.send(encode(Abort(joint="b")))
    assert not transport.take_arrived()
    peer.close()
    await closing
    assert sink.frames == []
    listener.close()


class Hook(Sink):
    """A sink whose handlers raise ``error``, as a user's hooks may."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def frame_received(self, frame: Frame) -> None:
        raise self._error

    def connection_lost(self, reason: str) -> None:
        super().connection_lost(reason)
        raise self._error


@pytest.mark.parametrize("error", [ValueError("a fault"), asyncio.CancelledError()])
@pytest.mark.parametrize("ends", [False, True])
async def test_an_error_of_a_handler_is_not_the_callers(error: BaseException, ends: bool) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    listener, sink = UnixListener(), Hook(error)
    peer, transport = await _connected(listener)
    transport.trust(FROM_SENDER)
    transport.start(sink)
    if not ends:
        peer.send(encode(Abort(joint="a")))
    peer.close()
    assert transport.take_arrived()
    assert [context["exception"] for context in reported] == [error]
    await transport.aclose()
    listener.close()


async def test_more_workers_at_once_than_the_system_lets_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_BACKLOG", 0)
    listener, accepted = UnixListener(), asyncio.Event()
    transports = [UnixConnection(listener.address) for _ in range(4)]
    opening = [asyncio.create_task(each.open(Deadline.after(10.0))) for each in transports]
    await asyncio.sleep(0)
    assert not all(task.done() for task in opening)
    found: list[FramedTransport] = []

    def on_connection(transport: FramedTransport) -> None:
        found.append(transport)
        if len(found) == len(transports):
            accepted.set()

    await listener.listen(on_connection, lambda worker, reason: None)
    await asyncio.wait_for(asyncio.gather(*opening, accepted.wait()), 10)
    for transport in (*transports, *found):
        await transport.aclose()
    listener.close()


async def test_a_listener_that_is_full_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_BACKLOG", 0)
    listener = UnixListener()
    first, second = (UnixConnection(listener.address) for _ in range(2))
    await first.open(Deadline.after(0.1))
    with pytest.raises(SyncTimeoutError, match="accepts no connection"):
        await second.open(Deadline.after(0.1))
    await first.aclose()
    listener.close()


async def test_a_forked_child_takes_no_connections() -> None:
    listener = UnixListener()
    parent, other = socket.socketpair()
    child = os.fork()
    if child == 0:
        parent.close()
        other.send(b".")
        other.recv(1)
        os._exit(0)
    try:
        assert parent.recv(1)
        listener.close()
        with pytest.raises(WorkerLostError, match="no sender listens"):
            await UnixConnection(listener.address).open(Deadline.after(1.0))
    finally:
        parent.close()
        other.close()
        await asyncio.to_thread(os.waitpid, child, 0)
