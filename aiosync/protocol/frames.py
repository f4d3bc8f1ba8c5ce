"""Frames: the messages of the protocol, and how they become bytes.

A frame is a 12-byte header and a body. The header is ``b"AS"``, the protocol's version, a byte that is 1 if
the body is compressed (zlib) and else 0, the body's length and the body's CRC-32, both as unsigned 32-bit
big-endian integers. The body is msgpack: one of the structs below, told apart by its ``type`` field.
Nothing here is ever unpickled.

Who says what::

    worker                              sender
      Hello ----------------------------->        who I am, and a nonce
            <----------------------------- Challenge   a nonce
      Proof ----------------------------->        proof that I know the token
            <----------------------------- Accepted | Refused   so do I
      Join ------------------------------>        then I take longer frames from you
            <----------------------------- Welcome | Refused    the layout of all updates to come
            <----------------------------- Notify      there is something newer than you have
      Fetch ----------------------------->        I am ready to take whatever is newest now
            <----------------------------- Update      here it lies; it is yours until you answer
            <----------------------------- Chunk* End  (where the connection carries the bytes) here it is
      Staged ---------------------------->        (only where the commit has to wait) I have it
      Ack | Nack ------------------------>        an Ack may bring the next Fetch along
            <----------------------------- Abort       a joint update is off
      Bye  <----------------------------> Bye

A worker asks for an update when it can take it, so one that is slow or stopped holds nothing but the
version that it runs on, and goes straight to the newest when it comes back.

What a peer may send, and how long its frames may be, depends on which side it is and on whether it has
authenticated: see :class:`Inbound`. So a few bytes never decode into much memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from aiosync.errors import FrameError
from aiosync.protocol.text import clean

__all__ = [
    "FROM_SENDER",
    "FROM_WORKER",
    "GREETING",
    "HEADER_SIZE",
    "MAX_ANSWER",
    "MAX_FRAME",
    "MAX_GREETING",
    "MAX_NAMES",
    "MAX_TEXT",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "Ack",
    "Bye",
    "Challenge",
    "Chunk",
    "Cut",
    "End",
    "Fetch",
    "Frame",
    "FrameDecoder",
    "Header",
    "Hello",
    "Inbound",
    "Join",
    "Joint",
    "Nack",
    "NackKind",
    "Notify",
    "Proof",
    "Refused",
    "Staged",
    "Update",
    "Welcome",
    "decode",
    "encode",
    "is_frame",
    "read_header",
]

PROTOCOL_VERSION = 3
MAX_FRAME = 256 * 1024 * 1024
"""Largest body in bytes that is accepted from an authenticated sender (a layout of a million entries)."""
MAX_ANSWER = 512 * 1024
"""Largest body in bytes that is accepted from an authenticated worker (a refusal)."""
MAX_GREETING = 4096
"""Largest body in bytes that is accepted from a peer that has not authenticated."""
MAX_NAMES = 64
"""Entries that a refusal lists at most, of each kind."""
MAX_TEXT = 256
"""Characters of a name, or of another short text, in a refusal."""

_Name: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
_Names: TypeAlias = Annotated[list[_Name], Meta(max_length=MAX_NAMES)]
_Index: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
_Count: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**62)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
NackKind: TypeAlias = Literal["layout", "apply", "joint", "below"]
if TYPE_CHECKING:  # for the type checker any text: the keys of a dict are invariant
    _Measured: TypeAlias = str
else:
    _Measured = Literal["stage", "wait", "commit"]

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


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """A worker's first words.

    ``nonce`` is 16 random bytes; ``pid`` is 0 where it means nothing; ``worker`` is -1 if the sender is to
    choose: the index ``before``, which it chose the last time, if that is free; ``codecs`` are the
    encodings that it knows besides ``raw``; ``signature`` is that of the layout that it has, or "".
    """

    protocol: int
    worker: _Index
    pid: _Index
    nonce: bytes
    model_id: str | None = None
    codecs: Annotated[list[_Name], Meta(max_length=16)] = []
    before: _Index = -1
    signature: str = ""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="challenge"):
    """The sender's nonce, 16 random bytes. It proves nothing before the worker has."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="proof"):
    """The worker's HMAC-SHA256 over both nonces under the shared token.

    ``claim``: the same under the ticket that came with the worker's last welcome, if it has one. So it proves
    that an index is its own without showing the ticket.
    """

    proof: bytes
    claim: bytes = b""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="accepted"):
    """The worker has proved itself; the sender's HMAC-SHA256 over both nonces, and its process id."""

    proof: bytes
    pid: int


class Join(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="join"):
    """The sender has proved itself too: the worker takes its welcome, which may be long."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refused"):
    """The sender will not serve this worker; the connection ends. ``retry``: it may a little later."""

    reason: str
    retry: bool = False


class Joint(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="joint"):
    """Marks an update as one part of a joint update of ``size`` models."""

    id: str
    size: int


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="update"):
    """One version of the weights, and where it lies.

    ``round`` counts what was sent and is never used twice; ``version`` is what users see. ``names`` are
    the entries that changed against ``base`` where the sender gave a subset, None where it gave all.
    ``payload`` belongs to the carrier: the session hands it through.
    """

    round: int
    version: int
    payload: dict[str, Any]
    base: int = -1
    names: list[str] | None = None
    joint: Joint | None = None


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="welcome"):
    """The sender takes the worker in.

    ``layout`` is that of all updates to come, None if the worker said that it has the one of this
    ``signature``; ``device`` where the sender has them, ``version`` its newest.
    ``worker`` is the worker's index from now on. ``instance`` tells one sender from the next at the same
    address: versions count anew with it.
    ``eager``: the worker is to send its Fetch in advance, without waiting for a Notify.
    ``ticket`` is a secret of 16 bytes: as long as another connection has the worker's index, only a worker
    that holds the ticket may take its place. ``via`` are the senders that an update passes on its way, the
    trainer first and this one last.
    """

    layout: dict[str, Any] | None
    version: int
    worker: int
    instance: str
    signature: str = ""
    device: str = "cpu"
    eager: bool = False
    ticket: bytes = b""
    via: Annotated[list[_Name], Meta(max_length=64)] = []


class Notify(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="notify"):
    """There is something newer than what the worker has."""

    round: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fetch"):
    """The worker is ready to take the newest update.

    ``have`` is a version whose bytes it still holds, so that what differs from it is enough; -1: none.
    ``maps``: it can read the sender's memory, so blocks may be left where they are.
    """

    have: _Count = -1
    maps: bool = False


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="chunk"):
    """``size`` raw bytes follow this frame: those of block ``block`` of the update under way.

    ``encoding`` is how they stand for the block; ``checksum`` is the XXH3-64 of the block itself. A block
    that is ``shared`` has no bytes here: it lies in the sender's memory.
    """

    block: int
    size: int
    checksum: int
    encoding: str = "raw"


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """The update under way is complete. ``digest`` is the XXH3-128 of all its blocks' checksums, in
    order, as unsigned 64-bit big-endian integers; also of the blocks that were not sent."""

    digest: bytes


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="cut"):
    """The update under way is taken back; the Fetch is answered later."""


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="staged"):
    """The worker holds the update in a back slot of its own and waits for the moment to commit."""

    round: _Count
    copied: bool


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="ack"):
    """The worker runs on this version now: the one that it was offered.

    ``seconds`` per phase as the worker measured them; ``fetch`` is its next Fetch, if it is ready for that.
    """

    round: _Count
    version: _Count
    seconds: dict[_Measured, _Seconds]
    fetch: Fetch | None = None


class Nack(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="nack"):
    """The worker refused an update, or the layout that it was welcomed with, and kept what it had.

    ``kind``: layout, apply or joint; or below, from a relay: it has the update, some of its workers have not.
    ``missing``, ``unexpected`` and ``differing`` name :data:`MAX_NAMES` entries each at most; ``omitted`` is
    how many more there are.
    """

    round: _Count
    version: _Count
    kind: NackKind
    error_type: str
    message: str
    traceback: str = ""
    missing: _Names = []
    unexpected: _Names = []
    differing: Annotated[dict[_Name, tuple[_Name, _Name]], Meta(max_length=MAX_NAMES)] = {}
    omitted: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="abort"):
    """A joint update is cancelled. A worker that still holds a part of it drops that part."""

    joint: str


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="bye"):
    """The last frame of an orderly end. ``dropped``: the sender goes on without this worker; ``replaced``:
    with another in its place, so it is not to come back. From a worker ``dropped`` says that it still reads
    what it was given."""

    reason: str = ""
    dropped: bool = False
    replaced: bool = False


Frame: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Accepted
    | Join
    | Refused
    | Welcome
    | Notify
    | Fetch
    | Update
    | Chunk
    | End
    | Cut
    | Staged
    | Ack
    | Nack
    | Abort
    | Bye
)

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
