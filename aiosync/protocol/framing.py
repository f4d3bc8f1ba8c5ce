"""How frames become bytes, and bytes become frames.

A frame is a 12-byte header and a body. The header is ``b"AS"``, the protocol's version, a byte that is 1 if
the body is compressed (zlib) and else 0, the body's length and the body's CRC-32, both as unsigned 32-bit
big-endian integers. The body is msgpack: one of the structs of :mod:`aiosync.protocol.frames`. Nothing is
unpickled.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from aiosync.errors import FrameError, ProtocolError
from aiosync.protocol.frames import (
    GREETING,
    PROTOCOL_VERSION,
    Bye,
    Frame,
    Inbound,
    Interrupt,
    Nack,
    Refused,
    Update,
)

_QUOTED = 300
"""Characters of a peer's text that an error quotes."""

_LONG = 16 * 1024
"""Longer bodies are compressed, in bytes."""

# Exceptions of decoding a body.
_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError

_HEADER = struct.Struct(">2sBBII")
_MAGIC = b"AS"
_TLS_RECORD = b"\x16\x03"
HEADER_SIZE = _HEADER.size

A = TypeVar("A", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct)

_WITH_MESSAGES = (Bye, Interrupt, Nack, Refused)
"""Frames with the text of an exception."""

_encoder = msgspec.msgpack.Encoder()
_last_update: tuple[Update, bytes] | None = None


# -- the text that a peer sends ----------------------------------------------------------------------


def cut(text: str, limit: int, *, keep_end: bool = False) -> str:
    """Return at most ``limit`` characters of ``text``, with a note of how many are omitted.

    The note counts too, so ``limit`` is at least 40. ``keep_end``: keep the text's end, not its beginning.
    """
    if len(text) <= limit:
        return text
    note = f"[{len(text) - limit} more characters]"
    kept = limit - len(note)
    return f"{note}{text[-kept:]}" if keep_end else f"{text[:kept]}{note}"


def clean(text: str, limit: int, *, lines: bool = False, keep_end: bool = False) -> str:
    """Return ``text`` cut, and with control characters escaped, for a log or a terminal.

    A newline could forge a line of a log, and an escape sequence could control the reader's terminal. They
    are escaped as in a Python string literal.

    ``limit`` counts characters before they are escaped. ``lines``: newlines and tabs stay, as in a traceback.
    """
    text = cut(text, limit, keep_end=keep_end)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


# -- frames and bytes --------------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True):
    """The fields of a frame's header that describe its body."""

    compressed: bool
    length: int
    checksum: int


def encode(frame: Frame) -> bytes:
    """Return a frame's header and body.

    The last Update is cached, because the same Update is sent to many workers in a row.
    """
    global _last_update
    last = _last_update
    if last is not None and last[0] is frame:
        return last[1]
    try:
        body = _encoder.encode(frame)
    except UnicodeEncodeError:
        if not isinstance(frame, _WITH_MESSAGES):
            raise
        body = _encoder.encode(_without_surrogates(frame))
    compressed = len(body) > _LONG  # a layout of thousands of names compresses well
    if compressed:
        body = zlib.compress(body, 1)
    data = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, compressed, len(body), zlib.crc32(body)) + body
    if type(frame) is Update:
        _last_update = frame, data
    return data


def _without_surrogates(value: Any) -> Any:
    """A frame with texts that UTF-8 can carry. An exception's text may name a file that it cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(each) for each in value]
    if isinstance(value, msgspec.Struct):
        texts = {name: _without_surrogates(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **texts)
    return value


def decode(header: Header, body: bytes, inbound: Inbound) -> Frame:
    """Decode a frame's body, as received.

    Raises:
        FrameError: the checksum differs, the decompressed body is over the limit, or the body is not an
            allowed frame with fields of valid types and sizes.
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
    """Decode the header at ``offset``.

    Raises:
        FrameError: the magic number is wrong, the protocol version differs, or the body is longer than
            ``limit``.
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
    """Return whether a stream with these first bytes contains frames, and not TLS records."""
    return bytes(start[: len(_MAGIC)]) == _MAGIC


class FrameDecoder:
    """Decodes a stream of bytes, in pieces of any length, into frames.

    After an error the decoder is unusable: the start of the next frame is unknown.
    """

    def __init__(self, inbound: Inbound = GREETING) -> None:
        self.inbound = inbound
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Yield every frame that ``data`` completes.

        Raises:
            FrameError: as :func:`read_header` and :func:`decode`.
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
        """Decode ``data`` if it is exactly one uncompressed frame, which is the usual case.

        Returns None otherwise. The caller then passes ``data`` to :meth:`feed`, which raises if it is
        invalid.
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


def encode_payload(payload: msgspec.Struct) -> dict[str, Any]:
    """Return the payload of an Update frame, a struct of a transfer, as the frame has it: a msgpack map."""
    found: dict[str, Any] = msgspec.to_builtins(payload, builtin_types=(bytes,))
    return found


def decode_payload(update: Update, kind: type[A]) -> A:
    """Return the payload of an Update frame as a struct.

    Raises:
        ProtocolError: a field is missing or has a wrong value.
    """
    try:
        return msgspec.convert(update.payload, kind)
    except msgspec.ValidationError as exc:
        trouble = f"an update's payload cannot be used: {exc}: {update.payload!r:.80}"
        raise ProtocolError(trouble) from exc


def decode_either(update: Update, one: type[A], other: type[B]) -> A | B:
    """Decode the payload as ``one`` if it has the first field of that, else as ``other``."""
    return decode_payload(update, one if one.__struct_encode_fields__[0] in update.payload else other)
