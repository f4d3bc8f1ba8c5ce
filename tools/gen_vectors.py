"""Writes the test vectors of docs/protocol.md: ``python tools/gen_vectors.py`` into tests/protocol/vectors/.

Implementations in other languages test against them. If they change, the protocol has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.receiver_session import ReceiverSession
from aiosync.protocol.sender_session import SenderSession
from aiosync.protocol.session import Session
from aiosync.schemes.tcp import _derived
from aiosync.weights.codec import Codec, checksum_of, digest_of
from aiosync.weights.codec import encode as encode_block
from aiosync.weights.layout import Layout

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "protocol" / "vectors"
TOKEN = "00112233445566778899aabbccddeeff"


def _drain(session: Session) -> list[f.Frame]:
    frames = list(session.outgoing)
    session.outgoing.clear()
    return frames


def greeting() -> dict[str, Any]:
    """Hello, challenge, proof, accepted and join, one after another."""
    key, ticket = _derived(TOKEN.encode()), bytes(range(16))
    worker = ReceiverSession(
        key, 3, pid=0, model_id="policy", codecs=["zstd", "delta"], before=3, signature="abc", ticket=ticket
    )
    sender = SenderSession(key)
    worker._nonce, sender._nonce = bytes(range(100, 116)), bytes(range(200, 216))
    (hello,) = _drain(worker)
    assert isinstance(hello, f.Hello)
    said: list[f.Frame] = [f.Hello(**{**_fields(hello), "nonce": worker._nonce})]
    for _ in range(2):
        sender.receive(said[-1])
        said += _drain(sender)
        worker.receive(said[-1])
        said += _drain(worker)
    return {"token": TOKEN, "ticket": ticket.hex(), "stream": b"".join(map(framing.encode, said)).hex()}


def _fields(frame: Any) -> dict[str, Any]:
    return {name: getattr(frame, name) for name in frame.__struct_fields__}


def _tensors(shift: float) -> dict[str, torch.Tensor]:
    ramp = torch.linspace(-1, 1, 40)
    ramp[::7] += shift
    return {
        "weight": ramp.to(torch.bfloat16),
        "bias": torch.tensor([0.5, -0.0, 3e38]),
        "steps": torch.tensor(7),
    }


def _buffer(layout: Layout, tensors: dict[str, torch.Tensor]) -> bytes:
    out = bytearray(layout.nbytes)
    for entry in layout.entries:
        data = tensors[entry.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        out[entry.offset : entry.offset + entry.nbytes] = data
    return bytes(out)


def welcome() -> dict[str, Any]:
    """A layout of three tensors."""
    layout = Layout.of(_tensors(0))
    frame = f.Welcome(
        layout=layout.to_wire(), version=17, worker=3, instance="0123", signature="abc", via=["0123"]
    )
    fields = {"type": "welcome", "layout": layout.to_wire(), "version": 17, "worker": 3, "via": ["0123"]}
    return {"stream": framing.encode(frame).hex(), "fields": fields}


def update(codec: Codec, version: int) -> dict[str, Any]:
    """An update, its one chunk and its end."""
    layout = Layout.of(_tensors(0))
    base, buffer = _buffer(layout, _tensors(0)), _buffer(layout, _tensors(0.01 * version))
    against = memoryview(base) if codec == "delta" else None
    encoded = encode_block(codec, memoryview(buffer), against, 2)
    assert encoded is not None and encoded[0].startswith({"full": "raw"}.get(codec, codec))
    encoding, raw = encoded[0], bytes(encoded[1])
    checksum = checksum_of(memoryview(buffer))
    payload = {"base": 0 if codec == "delta" else -1}
    frames = [
        framing.encode(f.Update(round=4, version=version, payload=payload)),
        framing.encode(f.Chunk(block=0, size=len(raw), checksum=checksum, encoding=encoding)) + raw,
        framing.encode(f.End(digest=digest_of([checksum]))),
    ]
    stream = b"".join(frames)
    return {"version": version, "base": base.hex(), "buffer": buffer.hex(), "stream": stream.hex()}


def nack() -> dict[str, Any]:
    """A refusal of the layout."""
    fields = {
        "round": -1,
        "version": 17,
        "kind": "layout",
        "error_type": "aiosync.errors.LayoutMismatchError",
        "message": "the weights do not fit",
        "missing": ["head.bias"],
        "differing": {"head.weight": ["float32[2, 64]", "float32[4, 64]"]},
        "omitted": 3,
    }
    differing = {"head.weight": ("float32[2, 64]", "float32[4, 64]")}
    given: dict[str, Any] = {**fields, "differing": differing}
    return {"stream": framing.encode(f.Nack(**given)).hex(), "fields": {"type": "nack", **fields}}


def vectors() -> dict[str, dict[str, Any]]:
    """File name without its ending -> what is in it."""
    np.seterr(all="raise")
    return {
        "greeting": greeting(),
        "welcome": welcome(),
        "update": update("full", 1),
        "compressed": update("zstd", 2),
        "delta": update("delta", 3),
        "nack": nack(),
    }


if __name__ == "__main__":
    for name, vector in vectors().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(vector, indent=1) + "\n")
