"""A socket thread by itself: a connection whose socket cannot be written."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress

import pytest

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Bye, Frame
from aiosync.protocol.framing import encode
from aiosync.transports._offload import LoopThread
from aiosync.transports.tcp.socket_thread import SocketThread
from aiosync.transports.tcp.socket_writer import _MAX_UNSENT
from tests.kit.clock import eventually, within


class Owner:
    """Records its calls."""

    def __init__(self) -> None:
        self.open = False
        self.frames: list[Frame] = []
        self.ended: str | None = None

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
    connection = SocketThread(
        thread, sock, on_open=owner.on_open, on_frames=owner.on_frames, on_end=owner.on_end
    )
    connection.start(None)
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
    connection = SocketThread(
        thread, ours, on_open=owner.on_open, on_frames=owner.on_frames, on_end=owner.on_end
    )
    connection.start(None)
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
    connection = SocketThread(
        thread, ours, on_open=owner.on_open, on_frames=owner.on_frames, on_end=owner.on_end
    )
    connection.start(None)
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
    connection = SocketThread(
        thread, ours, on_open=owner.on_open, on_frames=owner.on_frames, on_end=owner.on_end
    )
    connection.start(None)
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
