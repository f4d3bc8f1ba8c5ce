"""Options of sockets, and what the kernel reports about a socket, its peer, or a pipe."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import sys
from typing import Any

_UNIX_BUFFER = 2 << 20  # send buffer of a Unix socket in bytes


def credentials(sock: Any) -> tuple[int, int]:
    """Return the peer's (pid, uid); (0, -1) if the system does not report them."""
    if sys.platform != "linux" or sock is None or sock.family != socket.AF_UNIX:
        return 0, -1
    layout = struct.Struct("3i")
    pid, uid, _ = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return pid, uid


def name_of(sock: socket.socket) -> str:
    """Return the address of a connected socket's peer, for messages."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a local process"


def origin_of(sock: socket.socket) -> str:
    """Return a name of the machine of a connected socket's peer; empty if the peer has gone."""
    try:
        peer = sock.getpeername()
    except OSError:
        return ""
    if not isinstance(peer, tuple):
        return "this machine"
    host = peer[0].partition("%")[0]
    if sock.family != socket.AF_INET6 or host.startswith("::ffff:"):
        return str(host)
    # One machine can have many IPv6 addresses, with the same first 64 bits.
    return str(ipaddress.ip_network((host, 64), strict=False).network_address)


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and detect a peer whose machine is gone within half a minute."""
    if sock.family == socket.AF_UNIX:
        # The default is less than the peer can read while it wakes up.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if option in dir(socket):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if "TCP_USER_TIMEOUT" in dir(socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def ioctl_int(fd: int, request: int) -> int:
    """Return the int that the ioctl ``request`` reports for the descriptor of a pipe or a socket."""
    value = array.array("i", [0])
    fcntl.ioctl(fd, request, value)
    return value[0]
