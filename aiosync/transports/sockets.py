"""Sockets: their options, what the kernel reports about them and pipes, and their end in forked children.

When a process dies, the kernel closes its sockets, and its peers see the end of their connections. A forked
child has copies of the sockets. While it runs, the peers would not see that its parent has died. So a child
must not keep them open.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import select
import socket
import struct
import sys
import weakref
from typing import Any, Protocol

_UNIX_BUFFER = 2 << 20  # send buffer of a Unix socket in bytes


def has_broken(sock: socket.socket) -> bool:
    """Return whether the other end has closed and left something unread; True only once.

    The caller, a reader that the event loop calls, must then read to the end of the stream: libuv stops to
    poll a socket that has an error, so uvloop calls a reader once more, and then never again.
    """
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def credentials(sock: Any) -> tuple[int, int]:
    """Return the peer's (pid, uid); (0, -1) if the system does not report them."""
    if sys.platform != "linux" or sock is None or sock.family != socket.AF_UNIX:
        return 0, -1
    layout = struct.Struct("3i")
    pid, uid, _ = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return pid, uid


def peer_of(sock: socket.socket) -> tuple[str, str]:
    """Return the address of a connected socket's peer, for messages, and a name of the peer's machine."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer that has gone", ""
    if not isinstance(peer, tuple):
        return "a local process", "this machine"
    name, host = f"{peer[0]}:{peer[1]}", peer[0].partition("%")[0]
    if sock.family != socket.AF_INET6 or host.startswith("::ffff:"):
        return name, str(host)
    # One machine can have many IPv6 addresses, with the same first 64 bits.
    return name, str(ipaddress.ip_network((host, 64), strict=False).network_address)


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and detect a peer whose machine is gone within half a minute."""
    if sock.family == socket.AF_UNIX:
        # The default is less than the peer can read while it wakes up.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)
    for option, value in options:
        if option in dir(socket):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listening(family: int, target: Any, backlog: int) -> socket.socket:
    """Return a socket that listens at ``target``. Only this user's processes can connect to a Unix socket."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            os.fchmod(sock.fileno(), 0o600)  # bind() makes the file with this mode
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def inode(file: str | int) -> int | None:
    """Return the inode of a path or a descriptor; None if there is no such file."""
    try:
        return os.stat(file).st_ino
    except OSError:
        return None


def ioctl_int(fd: int, request: int) -> int:
    """Return the int that the ioctl ``request`` reports for the descriptor of a pipe or a socket."""
    value = array.array("i", [0])
    fcntl.ioctl(fd, request, value)
    return value[0]


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


_not_for_children: weakref.WeakSet[_HasDescriptor] = weakref.WeakSet()


def is_writable(fd: int) -> bool:
    """Whether poll() finds a descriptor writable now."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def close_in_children(sock: _HasDescriptor) -> None:
    """Close ``sock``, a socket or a locked file, in every process forked while it is open here."""
    _not_for_children.add(sock)


def _close_all() -> None:
    """Close the registered descriptors; called in the forked child."""
    descriptors = [fd for sock in _not_for_children if (fd := sock.fileno()) >= 0]
    _not_for_children.clear()
    if not descriptors:
        return
    # Replaced by /dev/null, not closed: the child's copy of the socket object closes the number again, and by
    # then the number could belong to another file.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in descriptors:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


if "register_at_fork" in dir(os):
    os.register_at_fork(after_in_child=_close_all)
