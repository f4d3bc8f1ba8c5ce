"""What the kernel tells about a socket's other end."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any

__all__ = ["credentials"]


def credentials(sock: Any) -> tuple[int, int]:
    """The peer's (pid, uid), or (0, -1) where the system does not tell."""
    if sys.platform != "linux" or sock is None or sock.family != socket.AF_UNIX:
        return 0, -1
    layout = struct.Struct("3i")
    pid, uid, _ = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return pid, uid
