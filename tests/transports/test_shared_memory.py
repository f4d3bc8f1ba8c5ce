"""Unix sockets for frames: what a peer that does not read may cost."""

from __future__ import annotations

import asyncio
import socket

import pytest

from aiosync.protocol.frames import FROM_SENDER, Abort, Frame, FrameDecoder
from aiosync.transports.base import Transport
from aiosync.transports.shared_memory import _MAX_UNSENT, UnixListener, _os_address

pytestmark = pytest.mark.asyncio


class Sink:
    """Hears of the end."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def frame_received(self, frame: Frame) -> None:
        raise AssertionError(frame)

    def connection_lost(self, reason: str) -> None:
        self.reason = reason


async def _connected(listener: UnixListener) -> tuple[socket.socket, Transport]:
    accepted: asyncio.Queue[Transport] = asyncio.Queue()
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
    in_kernel = len([*decoder.feed(taken)]) + (1 if decoder.buffered else 0)
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
        while not transport._full:  # type: ignore[attr-defined]
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
