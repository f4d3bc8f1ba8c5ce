"""Reads the test vectors in this folder as docs/protocol.md says, without aiosync: `python reader.py`."""

import hashlib
import hmac
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zstandard

HERE = Path(__file__).parent
BLOCK = 1 << 20


def frames(stream: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each frame of a stream, with the raw bytes behind it if it is a chunk."""
    while stream:
        magic, version, compressed, length, crc = struct.unpack(">2sBBII", stream[:12])
        body, stream = stream[12 : 12 + length], stream[12 + length :]
        assert (magic, version, zlib.crc32(body)) == (b"AS", 5, crc)
        frame = msgspec.msgpack.decode(zlib.decompress(body) if compressed else body)
        size = frame["size"] if frame["type"] == "chunk" else 0
        yield frame, stream[:size]
        stream = stream[size:]


def regroup(data: bytes, width: int) -> bytes:
    """First bytes of all elements, second bytes, and so on: back to one element after another."""
    count = len(data) // width
    return bytes(data[byte * count + element] for element in range(count) for byte in range(width))


def decoded(encoding: str, raw: bytes, base: bytes) -> bytes:
    """A block, out of what stands for it."""
    kind, _, text = encoding.partition("/")
    if kind == "raw":
        return raw
    width, unpack = int(text), zstandard.ZstdDecompressor().decompress
    if kind == "zstd":
        return regroup(unpack(raw), width)
    length = int.from_bytes(raw[:4], "big")
    bits, folded = unpack(raw[4 : 4 + length]), regroup(unpack(raw[4 + length :]), width)
    out, at = bytearray(base), 0
    for element in range(len(base) // width):
        if bits[element // 8] >> (7 - element % 8) & 1:
            number = int.from_bytes(folded[at : at + width], "little")
            difference = number >> 1 if number % 2 == 0 else -(number >> 1) - 1
            where = slice(element * width, (element + 1) * width)
            new = int.from_bytes(base[where], "little") + difference
            out[where] = (new % 256**width).to_bytes(width, "little")
            at += width
    return bytes(out)


def check_greeting(v: dict[str, Any]) -> None:
    seen = [frame for frame, _ in frames(bytes.fromhex(v["stream"]))]
    hello, challenge, proof, accepted, _ = seen
    assert [f["type"] for f in seen] == ["hello", "challenge", "proof", "accepted", "join"]
    key = hashlib.scrypt(v["token"].encode(), salt=b"aiosync token 3", n=16384, r=8, p=1, dklen=32)
    theirs, mine = hello["nonce"], challenge["nonce"]
    ticket = bytes.fromhex(v["ticket"])
    for key_, role, first, second, said in (
        (key, b"worker", theirs, mine, proof["proof"]),
        (key, b"sender", mine, theirs, accepted["proof"]),
        (ticket, b"ticket", theirs, mine, proof["claim"]),
    ):
        assert hmac.new(key_, b"aiosync/3 " + role + first + second, "sha256").digest() == said


def check_update(v: dict[str, Any]) -> None:
    seen = list(frames(bytes.fromhex(v["stream"])))
    (update, _), (end, _) = seen[0], seen[-1]
    assert (update["type"], end["type"], update["version"]) == ("update", "end", v["version"])
    base, sums, out = bytes.fromhex(v["base"]), list[int](), b""
    for chunk, raw in seen[1:-1]:
        start = chunk["block"] * BLOCK
        out += decoded(chunk["encoding"], raw, base[start : start + BLOCK])
        sums.append(xxhash.xxh3_64_intdigest(out[start:]))
        assert sums[-1] == chunk["checksum"]
    assert xxhash.xxh3_128_digest(b"".join(s.to_bytes(8, "big") for s in sums)) == end["digest"]
    assert out == bytes.fromhex(v["buffer"])


def check_fields(v: dict[str, Any]) -> None:
    ((frame, _),) = frames(bytes.fromhex(v["stream"]))
    assert {key: frame[key] for key in v["fields"]} == v["fields"]


CHECKS = {"greeting": check_greeting, "welcome": check_fields, "update": check_update}
CHECKS |= {"compressed": check_update, "delta": check_update, "nack": check_fields}

if __name__ == "__main__":
    for name, check in CHECKS.items():
        check(json.loads((HERE / f"{name}.json").read_text()))
        print(f"{name}: good")
