"""Blocks of weights as sockets carry them: lossless encodings, and checksums (xxHash, XXH3).

``zstd/W``
    The block's bytes in another order, compressed by zstd: the first bytes of all W-byte elements, then the
    second bytes, and so on. In floating-point numbers the exponents resemble each other, and the mantissas do
    not.
``delta/W``
    The differences from the same block of an earlier version: one bit per W-byte element that says whether
    the element changed, then the differences of the changed elements. Elements are read as unsigned integers.
    Neighbouring floating-point numbers have neighbouring integers, so small changes give small differences. A
    difference is folded so that small negative ones are small too: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    Both parts are compressed by zstd. The length of the first precedes it as a 32-bit big-endian integer.

Nothing is rounded: NaN payloads and negative zeros are kept.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiosync._extras import how_to_install
from aiosync.errors import InvalidArgumentError, ProtocolError

try:
    import xxhash
except ModuleNotFoundError:  # only transfers over sockets need checksums
    xxhash = None  # type: ignore[assignment]

Codec: TypeAlias = Literal["full", "zstd", "delta"]

_ENCODINGS = ("zstd", "delta")
"""The encodings that a worker may support."""

_LEVEL = 1
_WINDOW = 1 << 23
_LENGTH = struct.Struct(">I")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def known_encodings() -> list[str]:
    """Return the encodings that this process can encode and decode."""
    return list(_ENCODINGS) if importlib.util.find_spec("zstandard") else []


def check_codec(codec: str) -> None:
    """Raise InvalidArgumentError if ``codec`` is unknown, or needs a package that is not installed."""
    if codec not in ("full", *_ENCODINGS):
        raise InvalidArgumentError(f"codec={codec!r}: expected one of 'full', 'zstd', 'delta'")
    if codec != "full" and not known_encodings():
        raise InvalidArgumentError(
            f"codec={codec!r} needs zstandard, which is not installed: {how_to_install('delta')}"
        )


def encode(codec: Codec, block: memoryview, base: memoryview | None, width: int) -> tuple[str, Any] | None:
    """Encode a block, whose length is a multiple of the elements' ``width`` in bytes.

    ``base`` is the same block of a version that the other side has; None: there is none.

    Returns:
        The encoding's name and the encoded bytes; ``("raw", block)`` if encoding does not make the block
        smaller; None if the block equals ``base``.
    """
    if base is not None and np.array_equal(np.frombuffer(block, np.uint8), np.frombuffer(base, np.uint8)):
        return None
    if codec == "delta" and base is not None:
        smaller: Any = _delta(block, base, width)
    elif codec == "zstd":
        smaller = _compress(_shuffled(np.frombuffer(block, np.uint8), width))
    else:
        return "raw", block
    return (f"{codec}/{width}", memoryview(smaller)) if len(smaller) < len(block) else ("raw", block)


def decode(encoding: str, data: memoryview, block: memoryview, base: memoryview | None) -> None:
    """Decode ``data`` into ``block``, which has the block's length.

    ``base`` is the same block of the version that the sender encoded against; None: there is none.

    Raises:
        ProtocolError: the encoding is unknown, or ``data`` is invalid.
    """
    codec, _, text = encoding.partition("/")
    if codec not in _ENCODINGS or text not in ("1", "2", "4", "8"):
        raise ProtocolError(f"unknown encoding {encoding[:20]!r}")
    width = int(text)
    if len(block) % width:
        raise ProtocolError(f"encoding {encoding!r} does not fit a block of {len(block)} bytes")
    if codec == "zstd":
        plain = _decompress(data, len(block))
        block[:] = plain.reshape(width, -1).T.tobytes()
    elif base is None:
        raise ProtocolError("a difference came to a version that is not here")
    else:
        _apply_delta(data, block, base, width)


def _delta(block: memoryview, base: memoryview, width: int) -> bytes:
    new = np.frombuffer(block, _UNSIGNED[width])
    old = np.frombuffer(base, _UNSIGNED[width])
    changed = new != old
    signed = (new[changed] - old[changed]).view(_SIGNED[width])
    folded = ((signed << 1) ^ (signed >> (8 * width - 1))).view(np.uint8)
    where = _compress(np.packbits(changed))
    return _LENGTH.pack(len(where)) + where + _compress(_shuffled(folded, width))


def _apply_delta(data: memoryview, block: memoryview, base: memoryview, width: int) -> None:
    if len(data) < _LENGTH.size:
        raise ProtocolError("a difference is cut off")
    (length,) = _LENGTH.unpack_from(data)
    rest = data[_LENGTH.size :]
    count = len(block) // width
    changed = np.unpackbits(_decompress(rest[:length], -(-count // 8)), count=count).view(bool)
    size = int(changed.sum()) * width
    folded = _decompress(rest[length:], size).reshape(width, -1).T.copy().view(_UNSIGNED[width]).reshape(-1)
    signed = (folded >> 1).view(_SIGNED[width]) ^ -(folded & 1).view(_SIGNED[width])
    old = np.frombuffer(base, _UNSIGNED[width])
    new = old.copy()
    new[changed] += signed.view(_UNSIGNED[width])
    block[:] = new.view(np.uint8).data


def _shuffled(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(data.reshape(-1, width).T)


def _compress(data: NDArray[np.uint8]) -> bytes:
    import zstandard

    packed: bytes = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(data.data)
    return packed


def _decompress(data: memoryview, size: int) -> NDArray[np.uint8]:
    """Decompress ``data``, which must give ``size`` bytes. No more memory than that is allocated."""
    import zstandard

    try:
        if zstandard.get_frame_parameters(data).content_size != size:
            raise ProtocolError(f"compressed weights of another size than {size}")
        plain = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompress(data)
    except zstandard.ZstdError as exc:
        raise ProtocolError(f"weights that cannot be decompressed: {exc}") from exc
    if len(plain) != size:
        raise ProtocolError(f"compressed weights of {len(plain)} bytes, expected {size}")
    return np.frombuffer(plain, np.uint8)


def check_xxhash(what: str = "weights over sockets") -> None:
    """Raise InvalidArgumentError, which names ``what``, if xxhash is not installed."""
    if xxhash is None:
        raise InvalidArgumentError(
            f"{what}: this needs xxhash, which is not installed: {how_to_install('tcp')}"
        )


def checksum_of(block: memoryview) -> int:
    """Return the XXH3-64 of a block's bytes. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(block)


def digest_of(checksums: Iterable[int]) -> bytes:
    """Return the XXH3-128 over the blocks' checksums, each as 8 bytes in big-endian order."""
    return xxhash.xxh3_128_digest(b"".join(value.to_bytes(8, "big") for value in checksums))
