"""What the benchmarks over sockets share: links as slow as a network's, and where figures go."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiosync
from benchmarks.results import machine

__all__ = ["hold_to", "save"]

_SO_MAX_PACING_RATE = 47
_MBIT = 1_000_000 // 8


def hold_to(mbit: float, scheme: aiosync.TCPWeightSyncScheme) -> None:
    """Have the kernel send no more than so many megabits per second over each of a sender's connections; to
    be called before one is made. 0: as fast as it goes."""
    if mbit:
        # Connections have the options of the socket that they were accepted by.
        listening: socket.socket = scheme._listener._socket  # type: ignore[union-attr]
        listening.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(mbit * _MBIT))


def save(out: Path | None, name: str, found: Sequence[dict[str, Any]]) -> None:
    """Write figures as JSON, if they are wanted."""
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), name: found}, indent=1), encoding="utf-8")
