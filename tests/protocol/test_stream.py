"""Streams of frames and bodies: cut anywhere, damaged anywhere, made up."""

from __future__ import annotations

import os

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from aiosync.errors import AiosyncError, FrameError, ProtocolError
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.sender_session import SenderSession
from aiosync.protocol.stream import BLOCK, StreamDecoder, block_count
from tests.protocol.test_frames import ANY, frame

FUZZ = int(os.environ.get("AIOSYNC_FUZZ", "500"))
"""Examples for each property; `AIOSYNC_FUZZ=50000` is a night's work."""


class Sink:
    """Takes bodies of blocks of any size, and keeps to the order of calls."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.bodies: list[bytes] = []
        self._parts: dict[int, bytearray] = {}
        self._open = False
        self._placing = False

    def begin(self, update: f.Update) -> None:
        assert not self._open
        self._open, self._parts = True, {}

    def place(self, chunk: f.Chunk) -> memoryview:
        assert self._open and not self._placing
        if not 0 <= chunk.block < len(self.sizes) or chunk.block in self._parts:
            raise ProtocolError("no such block")
        self._placing = True
        self._parts[chunk.block] = bytearray(self.sizes[chunk.block])
        return memoryview(self._parts[chunk.block])

    def placed(self, chunk: f.Chunk) -> None:
        assert self._placing
        self._placing = False

    def finish(self, end: f.End) -> None:
        assert self._open and not self._placing
        self._open = False
        self.bodies.append(b"".join(bytes(self._parts[n]) for n in sorted(self._parts)))

    def abandon(self) -> None:
        assert self._open
        self._open = self._placing = False


def _body(blocks: list[bytes]) -> bytes:
    out = framing.encode(f.Update(round=1, version=1, payload={"base": -1}))
    for number, block in enumerate(blocks):
        checksum = xxhash.xxh3_64_intdigest(block)
        out += framing.encode(f.Chunk(block=number, size=len(block), checksum=checksum)) + block
    return out + framing.encode(f.End(digest=b"d"))


blocks = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4)
cuts = st.lists(st.integers(1, 90), min_size=1, max_size=20)


def _feed(decoder: StreamDecoder, stream: bytes, steps: list[int]) -> list[f.Frame]:
    got: list[f.Frame] = []
    at, turn = 0, 0
    while at < len(stream):
        step = steps[turn % len(steps)]
        got += decoder.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    return got


@settings(max_examples=FUZZ)
@given(blocks, cuts)
def test_a_body_cut_anywhere(sent: list[bytes], steps: list[int]) -> None:
    sink = Sink([len(block) for block in sent])
    decoder = StreamDecoder(ANY)
    decoder.sink = sink
    stream = framing.encode(f.Notify(round=1)) + _body(sent) + framing.encode(f.Bye(reason="done"))
    got = _feed(decoder, stream, steps)
    assert [type(one) for one in got] == [f.Notify, f.Update, f.Bye]
    assert sink.bodies == [b"".join(sent)]


@settings(max_examples=FUZZ)
@given(blocks, cuts, st.data())
def test_a_damaged_stream_never_breaks_the_rules(
    sent: list[bytes], steps: list[int], drawn: st.DataObject
) -> None:
    stream = bytearray(_body(sent) * 2)
    for _ in range(drawn.draw(st.integers(1, 4))):
        stream[drawn.draw(st.integers(0, len(stream) - 1))] ^= 1 << drawn.draw(st.integers(0, 7))
    sink = Sink([len(block) for block in sent])
    decoder = StreamDecoder(ANY)
    decoder.sink = sink
    try:
        _feed(decoder, bytes(stream), steps)
    except AiosyncError:
        pass
    decoder.close()
    assert len(sink.bodies) <= 2


@settings(max_examples=FUZZ)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_noise_is_refused_and_takes_no_memory(noise: list[bytes]) -> None:
    decoder = StreamDecoder()
    try:
        for piece in noise:
            decoder.feed(piece)
    except FrameError:
        pass
    assert sum(len(buffer) for buffer in decoder.buffers()) < 10_000


def test_a_length_that_is_only_announced_takes_no_memory() -> None:
    decoder = StreamDecoder(ANY)
    head = bytearray(framing.encode(f.Fetch())[: framing.HEADER_SIZE])
    head[4:8] = (200 << 20).to_bytes(4, "big")
    decoder.feed(bytes(head) + bytes(100_000))
    assert sum(len(buffer) for buffer in decoder.buffers()) < 1_000_000


def test_frames_between_two_chunks_come_behind_the_update() -> None:
    sent = [b"a" * 10, b"b" * 10]
    stream = _body(sent)
    second = stream.index(b"a" * 10) + 10
    between = framing.encode(f.Notify(round=7)) + framing.encode(f.Abort(joint="j"))
    decoder = StreamDecoder(ANY)
    decoder.sink = Sink([10, 10])
    got = decoder.feed(stream[:second] + between + stream[second:])
    assert [type(one) for one in got] == [f.Update, f.Notify, f.Abort]


def test_an_update_that_is_taken_back() -> None:
    stream = _body([b"a" * 10, b"b" * 10])
    first = stream.index(b"a" * 10) + 10
    sink = Sink([10, 10])
    decoder = StreamDecoder(ANY)
    decoder.sink = sink
    notify = framing.encode(f.Notify(round=1))
    assert decoder.feed(stream[:first] + notify + framing.encode(f.Cut())) == [f.Cut(), f.Notify(round=1)]
    assert sink.bodies == []
    assert [type(one) for one in decoder.feed(stream)] == [f.Update]
    assert sink.bodies == [b"a" * 10 + b"b" * 10]


@pytest.mark.parametrize(
    "frames",
    [
        [f.Chunk(block=0, size=1, checksum=0)],
        [f.End(digest=b"")],
        [f.Cut()],
        [f.Update(round=0, version=0, payload={}), f.Update(round=1, version=1, payload={})],
        [f.Update(round=0, version=0, payload={}), f.Chunk(block=0, size=0, checksum=0)],
        [f.Update(round=0, version=0, payload={}), f.Chunk(block=0, size=11, checksum=0)],
        [f.Update(round=0, version=0, payload={}), f.Chunk(block=1, size=10, checksum=0)],
        [f.Update(round=0, version=0, payload={}), *[f.Notify(round=n) for n in range(40)]],
    ],
    ids=["a chunk", "an end", "a cut", "two updates", "empty", "too large", "no such block", "chatter"],
)
def test_frames_out_of_place(frames: list[f.Frame]) -> None:
    decoder = StreamDecoder(ANY)
    decoder.sink = Sink([10])
    with pytest.raises(ProtocolError):
        decoder.feed(b"".join(map(framing.encode, frames)))


def test_only_a_worker_that_fetched_is_sent_weights() -> None:
    decoder = StreamDecoder(ANY)
    with pytest.raises(ProtocolError, match="may not come here"):
        decoder.feed(_body([b"a"]))


@settings(max_examples=FUZZ)
@given(st.lists(frame, max_size=8), st.booleans())
def test_a_session_takes_a_frame_or_raises_what_it_says(sent: list[f.Frame], sender_side: bool) -> None:
    session = SenderSession(b"t") if sender_side else ReceiverSession(b"t", 0)
    for one in sent:
        try:
            session.receive(one)
        except ProtocolError:
            continue


def test_blocks() -> None:
    assert [block_count(n) for n in (1, BLOCK, BLOCK + 1)] == [1, 1, 2]
