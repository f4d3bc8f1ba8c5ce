"""Bytes received against bytes held: no frame, of whatever kind, makes a peer's few bytes into many here."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import msgspec
import pytest

from aiosync.errors import ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.sender_session import SenderSession
from aiosync.protocol.stream import StreamDecoder
from tests.protocol.test_sessions import TOKEN, greet, joined

BEFORE = 64 * 1024
"""Bytes that a connection may take before its worker has authenticated."""

AFTER = 4 * 1024 * 1024
"""And after that, besides slots."""

ROUNDS = int(os.environ.get("AIOSYNC_FUZZ", "500"))

KINDS = [
    "hello", "challenge", "proof", "accepted", "join", "refused", "welcome", "notify", "fetch", "update",
    "chunk", "end", "cut", "staged", "ack", "nack", "abort", "bye", "unheard of",
]  # fmt: skip
FIELDS = [
    "missing", "unexpected", "differing", "seconds", "codecs", "layout", "payload", "names", "via",
    "message", "traceback", "reason", "nonce", "fetch", "joint", "round", "version", "unheard of",
]  # fmt: skip


def frame_of(body: bytes, *, compressed: bool = False) -> bytes:
    """Any body, as a frame with a header that is right."""
    if compressed:
        body = zlib.compress(body, 1)
    head = struct.pack(">2sBBII", b"AS", f.PROTOCOL_VERSION, compressed, len(body), zlib.crc32(body))
    return head + body


def _fills(room: int) -> Iterator[bytes]:
    """Values that take ``room`` bytes on the wire, and as much memory as can be made of that."""
    size = struct.pack(">I", room)
    yield b"\xdd" + size + b"\xa0" * room  # a list of empty texts
    yield b"\xdd" + size + b"\x80" * room  # of empty maps
    yield b"\xdd" + size + b"\x90" * room  # of empty lists
    yield b"\xdd" + struct.pack(">I", room // 2) + b"\xa1x" * (room // 2)
    yield b"\xdd" + struct.pack(">I", room // 3) + b"\xcd\x11\x11" * (room // 3)  # of integers
    yield (
        b"\xdf"
        + struct.pack(">I", room // 4)
        + b"".join(b"\xa2" + struct.pack(">H", n % 65536) + b"\x80" for n in range(room // 4))
    )
    yield b"\xdd" + struct.pack(">I", 2**32 - 1)  # announced, and no more
    yield b"\xdf" + struct.pack(">I", 2**32 - 1)
    yield b"\x91" * room  # a list in a list in a list
    yield b"\xdb" + size + b"a" * room  # a long text
    yield b"\xdb" + size + "\u20ac".encode() * (room // 3) + b"a" * (room % 3)


def bombs(inbound: f.Inbound) -> Iterator[bytes]:
    """Bodies of the largest size that may come, each with one field that is much too large."""
    limit = inbound.limit
    few = inbound is not f.GREETING  # of half a megabyte each
    kinds = ["fetch", "staged", "ack", "nack", "bye", "update", "unheard of"] if few else KINDS
    fields = ["missing", "differing", "seconds", "message", "reason", "payload"] if few else FIELDS
    fills = list(_fills(limit - 64))
    for kind in kinds:
        for field in fields:
            start = msgspec.msgpack.encode({"type": kind, field: 0})[:-1]
            for fill in fills:
                yield start + fill


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _peak(decoder: StreamDecoder, session: SenderSession, sent: bytes) -> int:
    """Bytes that were held at most while this came in, in pieces as a socket gives them."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    view = memoryview(sent)
    try:
        while view:
            buffer = decoder.buffers()[0]
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            for frame in decoder.received(count):
                session.receive(frame)
    except ProtocolError:
        pass
    return tracemalloc.get_traced_memory()[1] - before


PEERS = [f.GREETING, f.FROM_WORKER]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("inbound", [f.GREETING, f.FROM_WORKER], ids=["stranger", "worker"])
def test_no_frame_holds_more_than_its_budget(inbound: f.Inbound, compressed: bool) -> None:
    budget = BEFORE if inbound is f.GREETING else AFTER
    worst = 0
    for body in bombs(inbound):
        sent = frame_of(body, compressed=compressed)
        session = SenderSession(TOKEN) if inbound is f.GREETING else joined()[0]
        worst = max(worst, _peak(StreamDecoder(inbound), session, sent))
    assert worst < budget


@pytest.mark.parametrize("inbound", [f.GREETING, f.FROM_WORKER], ids=["stranger", "worker"])
def test_no_mutated_frame_holds_more_than_its_budget(inbound: f.Inbound) -> None:
    """As the ones before, but with bytes changed at random and the checksum put right."""
    dice = random.Random(3)
    budget = BEFORE if inbound is f.GREETING else AFTER
    seeds = list(bombs(f.GREETING))
    for _ in range(ROUNDS):
        body = bytearray(dice.choice(seeds))
        for _ in range(dice.randrange(1, 20)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        session = SenderSession(TOKEN) if inbound is f.GREETING else joined()[0]
        assert _peak(StreamDecoder(inbound), session, frame_of(bytes(body))) < budget


def test_a_handshake_holds_little() -> None:
    before = tracemalloc.get_traced_memory()[0]
    sender = SenderSession(TOKEN)
    decoder = StreamDecoder()
    worker = ReceiverSession(TOKEN, 0, model_id="m" * 1000, codecs=["c" * 200] * 10, signature="s" * 500)
    ours = tracemalloc.get_traced_memory()[0]
    greet(sender, worker)
    del worker
    assert tracemalloc.get_traced_memory()[0] - min(before, ours) < BEFORE
    del decoder
