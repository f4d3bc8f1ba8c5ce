"""A worker by hand: it says what a test has it say, and reads when the test reads."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

import msgspec

from aiosync import TCPWeightSyncScheme
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.session import Session
from aiosync.protocol.stream import StreamDecoder
from aiosync.transports.tcp.address import Address
from tests.kit.clock import within

__all__ = ["ANY", "RawWorker", "drain", "hello"]

ANY = f.Inbound(f.MAX_FRAME, msgspec.msgpack.Decoder(f.Frame))
"""All kinds of frames, from either side."""


def drain(session: Session) -> list[f.Frame]:
    """Remove and return the frames that a session has to send."""
    frames = list(session.outgoing)
    session.outgoing.clear()
    return frames


class _Discard:
    """Where the bodies of updates go."""

    def begin(self, update: f.Update) -> None:
        pass

    def place(self, chunk: f.Chunk) -> memoryview:
        return memoryview(bytearray(chunk.size))

    def placed(self, chunk: f.Chunk) -> None:
        pass

    def finish(self, end: f.End) -> None:
        pass

    def abandon(self) -> None:
        pass


class RawWorker:
    """A connection to a sender.

    Attributes:
        session: a worker's, as far as :meth:`join` has gone.
        welcome: what :meth:`join` got.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.session: Any = None
        self.welcome: Any = None
        self._decoder = StreamDecoder(ANY)
        self._decoder.sink = _Discard()
        self._heard: list[f.Frame] = []

    @classmethod
    async def dial(cls, scheme: TCPWeightSyncScheme) -> RawWorker:
        """Connect to the scheme's address, and say nothing."""
        address = Address.parse(scheme.address)
        if address.path:
            return cls(*await asyncio.open_unix_connection(address.path))
        return cls(*await asyncio.open_connection(address.host, address.port))

    @classmethod
    async def join(cls, scheme: TCPWeightSyncScheme, worker: int = -1, **more: Any) -> RawWorker:
        """Connect, authenticate and be welcomed."""
        self = await cls.dial(scheme)
        self.session = ReceiverSession(scheme._token, worker, model_id=scheme.model_id, **more)
        while not isinstance(self.welcome, f.Welcome):
            self.welcome = await self.step()
        return self

    async def step(self) -> f.Frame:
        """Say what the session has to say, and take one frame into it."""
        self.say(*drain(self.session))
        frame = await self.hear()
        self.session.receive(frame)
        self.say(*drain(self.session))
        return frame

    def say(self, *frames: f.Frame) -> None:
        """Write frames, right or wrong."""
        self.writer.write(b"".join(map(framing.encode, frames)))

    async def hear(self) -> f.Frame:
        """The next frame; EOFError if the connection has ended."""
        while not self._heard:
            data = await within(self.reader.read(1 << 16))
            if not data:
                raise EOFError
            self._heard += self._decoder.feed(data)
        return self._heard.pop(0)

    async def rest(self) -> list[f.Frame]:
        """All that comes until the connection ends."""
        out = []
        with suppress(EOFError, ConnectionError):
            while True:
                out.append(await self.hear())
        return out

    async def close(self) -> None:
        """End the connection."""
        self.writer.close()
        with suppress(ConnectionError, OSError):
            await within(self.writer.wait_closed())


def hello(**changes: Any) -> f.Hello:
    """A worker's first words."""
    given = {
        "protocol": f.PROTOCOL_VERSION,
        "worker": -1,
        "pid": 0,
        "nonce": os.urandom(16),
        "model_id": "policy",
    }
    return f.Hello(**{**given, **changes})
