"""Options that are set on sockets, and what the kernel says about the other end."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from typing import Any

__all__ = ["credentials", "name_of", "origin_of", "tune"]

_UNIX_BUFFER = 2 << 20


def credentials(sock: Any) -> tuple[int, int]:
    """The peer's (pid, uid), or (0, -1) where the system does not tell."""
    if sys.platform != "linux" or sock is None or sock.family != socket.AF_UNIX:
        return 0, -1
    layout = struct.Struct("3i")
    pid, uid, _ = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return pid, uid


def name_of(sock: socket.socket) -> str:
    """Where a connected socket's peer is, for people to read."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a local process"


def origin_of(sock: socket.socket) -> str:
    """The machine that a connected socket's peer is on. One machine can have many IPv6 addresses, so of these
    the first 64 bits count."""
    try:
        peer = sock.getpeername()
    except OSError:
        return ""
    if not isinstance(peer, tuple):
        return "this machine"
    host = peer[0].partition("%")[0]
    if sock.family != socket.AF_INET6 or host.startswith("::ffff:"):
        return str(host)
    return str(ipaddress.ip_network((host, 64), strict=False).network_address)


def tune(sock: socket.socket) -> None:
    """Small frames at once, and a peer whose machine is gone is noticed within half a minute."""
    if sock.family == socket.AF_UNIX:
        # What it has by default is less than the other side takes while it is being woken up.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if option in dir(socket):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if "TCP_USER_TIMEOUT" in dir(socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
