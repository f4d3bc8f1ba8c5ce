"""The base of both sessions: which frames are allowed when, on each side of one connection.

Sessions do no I/O. ``receive`` handles a frame that arrived, and returns what is left for the caller to
handle. The other methods report what happened on this side. :attr:`Session.outgoing` is the queue of
frames to send.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from typing import ClassVar

from aiosync.protocol import frames as f

NONCE_SIZE = 16
"""Bytes of a nonce."""

REASON = 512
"""Characters of a peer's reason that are kept."""


def proof_of(key: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    """Return the HMAC-SHA256 that proves the knowledge of ``key``.

    Args:
        key: the token, or a ticket.
        role: ``b"worker"``, ``b"sender"`` or ``b"ticket"``.
        mine: the nonce of the side that makes the proof.
        theirs: the other side's nonce.
    """
    return hmac.new(key, b"aiosync/3 " + role + mine + theirs, hashlib.sha256).digest()


class Session:
    """The common part of both sessions."""

    inbound: ClassVar[f.Inbound]
    """The frames that the peer may send after its authentication."""

    def __init__(self) -> None:
        # The frames to send now, in order. The caller sends them and removes them.
        self.outgoing: deque[f.Frame] = deque()
