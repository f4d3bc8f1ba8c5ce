"""How frames become bytes, and bytes become frames.

A frame is a 12-byte header and a body. The header is ``b"AS"``, the protocol's version, a byte that is 1 if
the body is compressed (zlib) and else 0, the body's length and the body's CRC-32, both as unsigned 32-bit
big-endian integers. The body is msgpack: one of the structs of :mod:`aiosync.protocol.frames`. Nothing is
unpickled.

:class:`Inbound` limits which frames a peer may send, and their length. The limits depend on the peer's side
and on whether the peer has authenticated. So a few bytes never decode into much memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from aiosync.errors import FrameError
from aiosync.protocol.frames import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Ack,
    Bye,
    Challenge,
    Chunk,
    Cut,
    End,
    Fetch,
    Frame,
    Hello,
    Join,
    Nack,
    Notify,
    Proof,
    Refused,
    Staged,
    Update,
    Welcome,
)
from aiosync.protocol.text import clean

__all__ = [
    "FROM_SENDER",
    "FROM_WORKER",
    "GREETING",
    "HEADER_SIZE",
    "MAX_ANSWER",
    "MAX_FRAME",
    "MAX_GREETING",
    "FrameDecoder",
    "Header",
    "Inbound",
    "decode",
    "encode",
    "is_frame",
    "read_header",
]

MAX_FRAME = 256 * 1024 * 1024
"""Largest body in bytes that is accepted from an authenticated sender (a layout of a million entries)."""
MAX_ANSWER = 512 * 1024
"""Largest body in bytes that is accepted from an authenticated worker (a refusal)."""
MAX_GREETING = 4096
"""Largest body in bytes that is accepted from a peer that has not authenticated."""

_QUOTED = 300
"""Characters of a peer's text that an error quotes."""

_LONG = 16 * 1024
"""Bytes from which a body is compressed."""

_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
"""What decoding a body may raise."""

_HEADER = struct.Struct(">2sBBII")
_MAGIC = b"AS"
_TLS_RECORD = b"\x16\x03"
HEADER_SIZE = _HEADER.size


_encoder = msgspec.msgpack.Encoder()
_last_update: tuple[Update, bytes] | None = None


class Inbound(msgspec.Struct, frozen=True):
    """Which frames may come from a peer.

    Only these are decoded. The other side's have fields that a small body could fill with much memory.

    Attributes:
        limit: largest body in bytes, also when it is decompressed.
        decoder: of the kinds of frames.
    """

    limit: int
    decoder: msgspec.msgpack.Decoder[Any]


GREETING = Inbound(
    MAX_GREETING, msgspec.msgpack.Decoder(Hello | Challenge | Proof | Accepted | Join | Refused | Bye)
)
"""From a peer that has not authenticated."""
FROM_WORKER = Inbound(MAX_ANSWER, msgspec.msgpack.Decoder(Fetch | Staged | Ack | Nack | Bye))
"""From an authenticated worker."""
FROM_SENDER = Inbound(
    MAX_FRAME,
    msgspec.msgpack.Decoder(Refused | Welcome | Notify | Update | Chunk | End | Cut | Abort | Bye),
)
"""From an authenticated sender."""


class Header(msgspec.Struct, frozen=True):
    """What a frame's header says of its body."""

    compressed: bool
    length: int
    checksum: int


def encode(frame: Frame) -> bytes:
    """Header and body of one frame.

    The same update goes to many workers, one after the other: it is encoded for the first.
    """
    global _last_update
    last = _last_update
    if last is not None and last[0] is frame:
        return last[1]
    body = _encoder.encode(frame)
    compressed = len(body) > _LONG  # a layout of thousands of names, which have much in common
    if compressed:
        body = zlib.compress(body, 1)
    data = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, compressed, len(body), zlib.crc32(body)) + body
    if type(frame) is Update:
        _last_update = frame, data
    return data


def decode(header: Header, body: bytes, inbound: Inbound) -> Frame:
    """The frame with this header and body.

    Raises:
        FrameError: if it arrived damaged, is over the limit when it is decompressed, is not msgpack, not one
            of the frames that may come, or has a field of a wrong type or size.
    """
    if zlib.crc32(body) != header.checksum:
        raise FrameError(f"a frame of {header.length} bytes arrived corrupted (checksum differs)")
    if header.compressed:
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(body, inbound.limit)
        except zlib.error as exc:
            raise FrameError(f"a frame's body cannot be decompressed: {exc}") from exc
        if not unpacker.eof:
            raise FrameError(f"a compressed frame is cut off, or over the limit of {inbound.limit} bytes")
    try:
        frame: Frame = inbound.decoder.decode(body)
        return frame
    except _UNREADABLE as exc:
        # The text quotes the peer.
        raise FrameError(f"a frame's body cannot be read: {clean(str(exc), _QUOTED)}") from exc


def read_header(buffer: bytes | bytearray | memoryview, offset: int, limit: int) -> Header:
    """The header at ``offset``.

    Raises:
        FrameError: on a wrong magic number, another protocol version or a body over ``limit``.
    """
    magic, version, flags, length, checksum = _HEADER.unpack_from(buffer, offset)
    if magic != _MAGIC:
        tls = "; that is TLS: give tls= to both sides or to neither" if magic == _TLS_RECORD else ""
        raise FrameError(f"expected a frame that starts with {_MAGIC!r}, got {bytes(magic)!r}{tls}")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"expected protocol version {PROTOCOL_VERSION}, got {version}")
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
    if flags > 1:
        raise FrameError(f"expected flags 0 or 1 in a frame's header, got {flags}")
    return Header(bool(flags), length, checksum)


def is_frame(start: bytes | memoryview) -> bool:
    """Whether a stream that starts so is one of frames, and not of TLS records."""
    return bytes(start[: len(_MAGIC)]) == _MAGIC


class FrameDecoder:
    """Turns a stream of bytes, cut anywhere, into frames.

    Once it has raised it stays broken: a stream that lost its framing has no next frame.

    Attributes:
        inbound: what may come.
    """

    def __init__(self, inbound: Inbound = GREETING) -> None:
        self.inbound = inbound
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes held that do not make a whole frame yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Yield every frame that ``data`` completes.

        Raises:
            FrameError: on a wrong magic number, another protocol version, a body over ``limit`` or a
                checksum that does not match.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER_SIZE:
            header = read_header(self._buffer, 0, self.inbound.limit)
            end = HEADER_SIZE + header.length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[HEADER_SIZE:end])
            del self._buffer[:end]
            yield decode(header, body, self.inbound)

    def alone(self, data: bytes | bytearray) -> Frame | None:
        """The frame that ``data`` is, if it is exactly one and not compressed, as it most often is.

        Else None. Then pass ``data`` to :meth:`feed`, which also raises for what is no frame.
        """
        if self._buffer or len(data) < HEADER_SIZE:
            return None
        magic, version, flags, length, checksum = _HEADER.unpack_from(data)
        body = data[HEADER_SIZE:]
        known = magic == _MAGIC and version == PROTOCOL_VERSION and flags == 0
        if not known or not len(body) == length <= self.inbound.limit or zlib.crc32(body) != checksum:
            return None
        try:
            frame: Frame = self.inbound.decoder.decode(body)
            return frame
        except _UNREADABLE:
            return None
