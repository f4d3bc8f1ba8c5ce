"""Sockets in forked children: a child must not keep its parent's connections open.

The other side of a connection learns of a process's death when the kernel closes the process's sockets. A
child that a worker forked has copies of them, and would hide the death for as long as it lives.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import Protocol

__all__ = ["close_in_children"]


class HasDescriptor(Protocol):
    """Something with a descriptor."""

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""


_sockets: weakref.WeakSet[socket.socket | HasDescriptor] = weakref.WeakSet()


def close_in_children(sock: socket.socket | HasDescriptor) -> None:
    """Close this socket, or locked file, in every process that this one forks, as long as it is open here."""
    _sockets.add(sock)


def _close_all() -> None:
    """In the forked child."""
    descriptors = [fd for sock in _sockets if (fd := sock.fileno()) >= 0]
    _sockets.clear()
    if not descriptors:
        return
    # Not closed but replaced: the child's copy of the socket object would close the number again, which
    # could be another file's by then.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in descriptors:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


if "register_at_fork" in dir(os):
    os.register_at_fork(after_in_child=_close_all)
