"""Sockets in forked children: a child must not keep its parent's connections open.

When a process dies, the kernel closes its sockets, and its peers see the end of their connections. A forked
child has copies of the sockets. While it runs, the peers would not see that its parent has died.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


_sockets: weakref.WeakSet[_HasDescriptor] = weakref.WeakSet()


def close_in_children(sock: _HasDescriptor) -> None:
    """Close ``sock``, a socket or a locked file, in every process forked while it is open here."""
    _sockets.add(sock)


def _close_all() -> None:
    """Close the registered descriptors; called in the forked child."""
    descriptors = [fd for sock in _sockets if (fd := sock.fileno()) >= 0]
    _sockets.clear()
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
