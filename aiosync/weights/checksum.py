"""Checksums of weights: xxHash (XXH3) over each block, and over the blocks' checksums."""

from __future__ import annotations

from collections.abc import Iterable

from aiosync.errors import InvalidArgumentError

try:
    import xxhash
except ModuleNotFoundError:  # only transfers over sockets need checksums
    xxhash = None  # type: ignore[assignment]


def check_available() -> None:
    """Raise InvalidArgumentError if xxhash is not installed."""
    if xxhash is None:
        raise InvalidArgumentError(
            "weights over sockets need xxhash, which is not installed: python -m pip install 'aiosync[tcp]'"
        )


def checksum_of(block: memoryview) -> int:
    """Return the XXH3-64 of a block's bytes. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(block)


def digest_of(checksums: Iterable[int]) -> bytes:
    """Return the XXH3-128 over the blocks' checksums, each as 8 bytes in big-endian order."""
    return xxhash.xxh3_128_digest(b"".join(value.to_bytes(8, "big") for value in checksums))
