"""Which frames a peer may send, and how long they may be.

Both depend on the peer's side and on whether the peer has authenticated. Other kinds of frames are not
decoded, so that a few bytes never decode into much memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aiosync.protocol.frames import FromSender, FromWorker, Greeting

MAX_FRAME = 256 * 1024 * 1024
"""Largest body in bytes from an authenticated sender: a layout of a million entries."""
MAX_ANSWER = 512 * 1024
"""Largest body in bytes from an authenticated worker: a Nack."""
MAX_GREETING = 4096
"""Largest body in bytes from a peer that has not authenticated."""


class Inbound(msgspec.Struct, frozen=True):
    """The frames that a peer may send, of at most ``limit`` bytes before and after decompression.

    Other kinds are not decoded: some have fields that take much memory for a small body.
    """

    limit: int
    decoder: msgspec.msgpack.Decoder[Any]


GREETING = Inbound(MAX_GREETING, msgspec.msgpack.Decoder(Greeting))
"""Frames of a peer that has not authenticated."""
FROM_WORKER = Inbound(MAX_ANSWER, msgspec.msgpack.Decoder(FromWorker))
"""Frames of an authenticated worker."""
FROM_SENDER = Inbound(MAX_FRAME, msgspec.msgpack.Decoder(FromSender))
"""Frames of an authenticated sender."""
