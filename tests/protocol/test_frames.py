"""Frames: what goes in comes out, however the stream is cut, and nothing else does."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import FrameError, LayoutMismatchError
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.nack import nack_of
from tests.kit.strategies import nacks

text = st.text(max_size=20)
data = st.binary(max_size=32)
seconds = st.dictionaries(st.sampled_from(["stage", "wait", "commit"]), st.floats(0, 9), max_size=2)
number = st.integers(min_value=-1, max_value=2**40)
index = st.integers(min_value=-1, max_value=2**31 - 1)

ANY = f.Inbound(f.MAX_FRAME, msgspec.msgpack.Decoder(f.Frame))
"""All kinds of frames, from either side."""
update = st.builds(
    f.Update,
    round=number,
    version=number,
    payload=st.dictionaries(text, st.one_of(number, text, st.binary(max_size=8)), max_size=3),
    base=number,
    names=st.none() | st.lists(text, max_size=3),
    joint=st.none() | st.builds(f.Joint, id=text, size=number),
)
frame = st.one_of(
    st.builds(f.Hello, protocol=number, worker=index, pid=index, nonce=data, model_id=text),
    st.builds(f.Challenge, nonce=data),
    st.builds(f.Proof, proof=data, claim=data),
    st.builds(f.Accepted, proof=data, pid=number),
    st.builds(f.Join),
    st.builds(f.Refused, reason=text, retry=st.booleans()),
    st.builds(
        f.Welcome,
        layout=st.dictionaries(text, text, max_size=2),
        version=number,
        worker=number,
        instance=text,
        device=text,
        eager=st.booleans(),
    ),
    st.builds(f.Notify, round=number),
    st.builds(f.Fetch),
    update,
    st.builds(f.Staged, round=number, copied=st.booleans()),
    st.builds(f.Ack, round=number, version=number, seconds=seconds),
    nacks(number, text),
    st.builds(f.Abort, joint=text),
    st.builds(f.Interrupt, round=number),
    st.builds(f.Bye, reason=text, dropped=st.booleans()),
)


def _take(decoder: framing.FrameDecoder, data: bytes | bytearray) -> list[f.Frame]:
    """As a transport does."""
    alone = decoder.alone(data)
    return list(decoder.feed(data)) if alone is None else [alone]


@given(st.lists(frame, max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_stream_cut_anywhere(sent: list[f.Frame], cuts: list[int]) -> None:
    stream = b"".join(map(framing.encode, sent))
    decoder = framing.FrameDecoder(ANY)
    received: list[f.Frame] = []
    at, turn = 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        received += decoder.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert received == sent
    assert decoder.alone(framing.encode(f.Bye())) == f.Bye()  # nothing is left over


@given(st.lists(frame, max_size=5), st.data())
def test_frames_that_come_alone_or_in_pieces(sent: list[f.Frame], drawn: st.DataObject) -> None:
    decoder = framing.FrameDecoder(ANY)
    received: list[f.Frame] = []
    for each in sent:
        stream = framing.encode(each)
        cut = drawn.draw(st.integers(0, len(stream)))
        for piece in (stream[:cut], stream[cut:]):
            received += _take(decoder, piece)
    assert received == sent
    assert decoder.alone(framing.encode(f.Bye())) == f.Bye()  # nothing is left over


@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error_or_waits_for_more(garbage: bytes) -> None:
    decoder = framing.FrameDecoder(ANY)
    try:
        assert _take(decoder, garbage) == []
    except FrameError:
        pass


@given(frame, st.data())
def test_a_flipped_bit_never_gives_another_frame(sent: f.Frame, drawn: st.DataObject) -> None:
    stream = bytearray(framing.encode(sent))
    bit = drawn.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    decoder = framing.FrameDecoder(ANY)
    try:
        received = _take(decoder, stream)
    except FrameError:
        return
    # Either the length grew and the rest is waited for, or the bit is one that says nothing.
    assert received in ([], [sent])


@given(frame, st.integers(0, 300))
def test_a_cut_off_frame_is_not_delivered(sent: f.Frame, at: int) -> None:
    stream = framing.encode(sent)
    assert list(framing.FrameDecoder(ANY).feed(stream[: min(at, len(stream) - 1)])) == []


def test_the_limit_counts_before_the_body_has_come() -> None:
    head = framing.encode(f.Refused(reason="x" * 5000))[: framing.HEADER_SIZE]
    with pytest.raises(FrameError, match="over the limit"):
        list(framing.FrameDecoder(f.GREETING).feed(head))
    assert list(framing.FrameDecoder(ANY).feed(head)) == []


def test_a_decoder_that_broke_stays_broken() -> None:
    decoder = framing.FrameDecoder(ANY)
    for _ in range(2):
        with pytest.raises(FrameError):
            _take(decoder, b"no frame at all")
        with pytest.raises(FrameError):
            _take(decoder, framing.encode(f.Fetch()))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "nonsense"}),
        msgspec.msgpack.encode({"type": "notify", "round": "one"}),
        msgspec.msgpack.encode({"type": "notify"}),
        b"\x91" * 5000,
    ],
    ids=["empty", "reserved", "a list", "unknown", "a wrong type", "a missing field", "nested"],
)
def test_bodies_that_are_no_frames(body: bytes) -> None:
    with pytest.raises(FrameError, match="cannot be read"):
        framing.decode(framing.Header(False, len(body), zlib.crc32(body)), body, ANY)


def test_a_long_body_is_compressed_and_bounded() -> None:
    long = f.Refused(reason="no " * 100_000)
    stream = framing.encode(long)
    assert len(stream) < 2000
    assert list(framing.FrameDecoder(ANY).feed(stream)) == [long]
    with pytest.raises(FrameError, match="over the limit"):
        list(framing.FrameDecoder(f.GREETING).feed(stream))
    cut = stream[framing.HEADER_SIZE : -4]
    with pytest.raises(FrameError, match="cut off"):
        framing.decode(framing.Header(True, len(cut), zlib.crc32(cut)), cut, ANY)
    with pytest.raises(FrameError, match="decompressed"):
        framing.decode(framing.Header(True, 2, zlib.crc32(b"xx")), b"xx", ANY)


@pytest.mark.parametrize(
    "seconds",
    [{"stage": float("nan")}, {"stage": float("inf")}, {"wait": -1.0}, {"commit": 1e10}, {"x" * 200: 1.0}],
    ids=repr,
)
def test_what_no_worker_can_have_measured_is_no_frame(seconds: dict[str, float]) -> None:
    """It would go into reports and metrics."""
    with pytest.raises(FrameError):
        _take(
            framing.FrameDecoder(f.FROM_WORKER),
            framing.encode(f.Ack(round=5, version=5, seconds=seconds)),
        )


@given(st.lists(update, min_size=1, max_size=4), st.data())
def test_an_update_for_many_workers_is_encoded_once(updates: list[f.Update], drawn: st.DataObject) -> None:
    for _ in range(8):
        sent = drawn.draw(st.sampled_from(updates))
        encoded = framing.encode(sent)
        assert framing.encode(sent) is encoded
        assert [*framing.FrameDecoder(ANY).feed(encoded)] == [sent]


def test_a_refusal_whose_text_no_file_can_have() -> None:
    error = LayoutMismatchError(unexpected=["weight\udc80"])
    for sent in (nack_of(3, ValueError("of \udcff")), nack_of(3, error), f.Bye(reason="\ud83d")):
        decoder = framing.FrameDecoder()
        decoder.inbound = f.FROM_WORKER
        (found,) = decoder.feed(framing.encode(sent))
        assert type(found) is type(sent)
        assert "?" in str(found)
