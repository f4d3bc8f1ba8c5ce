"""Sessions: what may be said when, on each side of one connection.

Both are sans I/O. Feed them the frames that arrived (:meth:`receive` returns events) or tell them what
happened here (the other methods); take what has to be sent from :meth:`frames_to_send`.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import ClassVar

from aiosync.protocol import frames as f
from aiosync.protocol import framing

__all__ = ["NONCE_SIZE", "REASON", "Session", "proof_of"]


NONCE_SIZE = 16
"""Bytes."""

REASON = 512
"""Characters of a peer's reason that are kept."""


def proof_of(key: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    """The HMAC-SHA256 with which a side proves that it has ``key``.

    Args:
        key: the token, or a ticket.
        role: ``b"worker"``, ``b"sender"`` or ``b"ticket"``: what is proved.
        mine: the nonce of the side that proves.
        theirs: the other side's nonce.
    """
    return hmac.new(key, b"aiosync/3 " + role + mine + theirs, hashlib.sha256).digest()


class Session:
    """What both sides have.

    Attributes:
        outgoing: the frames to send now, in order.
        inbound: what the peer may send once it has authenticated.
    """

    inbound: ClassVar[framing.Inbound]

    def __init__(self) -> None:
        self.outgoing: list[f.Frame] = []

    def frames_to_send(self) -> list[f.Frame]:
        """The frames to send now, in order; each is handed out once."""
        out, self.outgoing = self.outgoing, []
        return out
