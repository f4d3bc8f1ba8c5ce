"""Ports for what has to be told its port before it listens."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["free_port"]

_FIRST, _LAST, _SIZE = 10_000, 30_000, 100  # below Linux's ephemeral ports

_ours: dict[int, Iterator[int]] = {}
"""Process id -> the ports that this process hands out. A forked child takes a range of its own."""


def free_port() -> int:
    """A port of the loopback address that is free.

    The system gives it to no outgoing connection, and no other process of these tests hands it out.
    """
    ports = _ours.get(os.getpid())
    if ports is None:
        ports = _ours[os.getpid()] = _range()
    while True:
        port = next(ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _range() -> Iterator[int]:
    """Take a range of ports until this process ends, and cycle through it.

    The process that holds the first port of a range has the range.
    """
    starts = list(range(_FIRST, _LAST, _SIZE))
    random.shuffle(starts)
    for start in starts:
        lock = socket.socket()
        try:
            lock.bind(("127.0.0.1", start))
        except OSError:
            lock.close()
            continue
        lock.detach()  # open until the process ends
        return _cycle(start + 1, start + _SIZE)
    raise RuntimeError(f"every range of ports between {_FIRST} and {_LAST} is taken")


def _cycle(first: int, end: int) -> Iterator[int]:
    while True:
        yield from range(first, end)
