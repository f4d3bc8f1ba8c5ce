"""Which frames a peer may send, and how long they may be.

Both depend on the peer's side and on whether the peer has authenticated. Other kinds of frames are not
decoded, so that a few bytes never decode into much memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aiosync.protocol.frames import (
    Abort,
    Accepted,
    Ack,
    Bye,
    Challenge,
    Chunk,
    Cut,
    End,
    Fetch,
    Hello,
    Join,
    Nack,
    Notify,
    Proof,
    Refused,
    Staged,
    Update,
    Welcome,
)

MAX_FRAME = 256 * 1024 * 1024
"""Largest body in bytes from an authenticated sender: a layout of a million entries."""
MAX_ANSWER = 512 * 1024
"""Largest body in bytes from an authenticated worker: a Nack."""
MAX_GREETING = 4096
"""Largest body in bytes from a peer that has not authenticated."""


class Inbound(msgspec.Struct, frozen=True):
    """The frames that a peer may send.

    Other kinds are not decoded: some have fields that take much memory for a small body.

    Attributes:
        limit: largest body in bytes, before and after decompression.
        decoder: decodes the allowed kinds of frames.
    """

    limit: int
    decoder: msgspec.msgpack.Decoder[Any]


GREETING = Inbound(
    MAX_GREETING, msgspec.msgpack.Decoder(Hello | Challenge | Proof | Accepted | Join | Refused | Bye)
)
"""Frames of a peer that has not authenticated."""
FROM_WORKER = Inbound(MAX_ANSWER, msgspec.msgpack.Decoder(Fetch | Staged | Ack | Nack | Bye))
"""Frames of an authenticated worker."""
FROM_SENDER = Inbound(
    MAX_FRAME,
    msgspec.msgpack.Decoder(Refused | Welcome | Notify | Update | Chunk | End | Cut | Abort | Bye),
)
"""Frames of an authenticated sender."""
