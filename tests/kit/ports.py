"""Ports for what has to be told its port before it listens."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]


def free_port() -> int:
    """A port of the loopback address that is free, and that the system gives to no outgoing connection."""
    while True:
        port = random.randrange(10_000, 30_000)  # below Linux's ephemeral ports
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
