"""Codecs: whatever the bits are, they come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import InvalidArgumentError, ProtocolError
from aiosync.weights.codec import Codec, check_codec, decode, encode, known_encodings

WIDTHS = [1, 2, 4, 8]
SIZE = 4096


def _back(codec: Codec, new: bytes, old: bytes | None, width: int) -> bytes:
    base = memoryview(old) if old is not None else None
    encoded = encode(codec, memoryview(new), base, width)
    if encoded is None:
        assert old is not None
        return old
    encoding, data = encoded
    if encoding == "raw":
        return bytes(data)
    assert len(data) < len(new)
    out = bytearray(len(new))
    decode(encoding, memoryview(bytes(data)), memoryview(out), base)
    return bytes(out)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("codec", ["full", "zstd", "delta"])
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    blocks=st.integers(1, 64),
)
def test_everything_comes_back(codec: Codec, width: int, seed: int, share: float, blocks: int) -> None:
    dice = np.random.default_rng(seed)
    old = dice.integers(0, 256, 64 * blocks, np.uint8)
    new = old.copy()
    changed = dice.random(new.size) < share
    new[changed] = dice.integers(0, 256, int(changed.sum()), np.uint8)
    assert _back(codec, new.tobytes(), old.tobytes(), width) == new.tobytes()
    assert _back(codec, new.tobytes(), None, width) == new.tobytes()


@pytest.mark.parametrize("step", [1, -1, 127, -128, 2**14, -(2**15)])
def test_a_difference_of_every_size(step: int) -> None:
    old = np.arange(SIZE, dtype=np.uint16)
    new = old.copy()
    new[::7] += np.array(step).astype(np.uint16)
    assert _back("delta", new.tobytes(), old.tobytes(), 2) == new.tobytes()


def test_odd_numbers_keep_their_bits() -> None:
    bits = np.array([0x7FC00001, 0xFFC00002, 0x80000000, 0x7F800000, 1, 0], np.uint32).repeat(512)
    old = np.zeros_like(bits)
    for codec in ("zstd", "delta"):
        assert _back(codec, bits.tobytes(), old.tobytes(), 4) == bits.tobytes()


def test_few_changes_take_few_bytes() -> None:
    dice = np.random.default_rng(0)
    old = dice.integers(0, 2**16, 1 << 19, np.uint16)
    new = old.copy()
    changed = dice.random(new.size) < 0.01
    new[changed] += dice.choice(np.array([1, 0xFFFF], np.uint16), int(changed.sum()))
    encoded = encode("delta", memoryview(new.tobytes()), memoryview(old.tobytes()), 2)
    assert encoded is not None
    assert len(encoded[1]) * 60 < new.nbytes


@given(
    data=st.binary(max_size=200),
    encoding=st.sampled_from(["zstd/2", "delta/4", "delta/1", "zstd/3", "x", ""]),
)
def test_what_is_no_encoding(data: bytes, encoding: str) -> None:
    block = bytearray(SIZE)
    with pytest.raises(ProtocolError):
        decode(encoding, memoryview(data), memoryview(block), memoryview(bytes(SIZE)))


def test_a_bomb_is_not_unpacked() -> None:
    huge = encode("zstd", memoryview(bytes(1 << 22)), None, 1)
    assert huge is not None
    with pytest.raises(ProtocolError, match="another size"):
        decode("zstd/1", memoryview(bytes(huge[1])), memoryview(bytearray(SIZE)), None)


def test_names() -> None:
    assert known_encodings() == ["zstd", "delta"]
    with pytest.raises(InvalidArgumentError, match="'full', 'zstd', 'delta'"):
        check_codec("gzip")
