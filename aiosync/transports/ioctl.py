"""Ask the kernel how many bytes are in a pipe or a socket."""

from __future__ import annotations

import array
import fcntl

__all__ = ["ioctl_int"]


def ioctl_int(fd: int, request: int) -> int:
    """Return the int that the ioctl ``request`` reports for the descriptor ``fd``."""
    value = array.array("i", [0])
    fcntl.ioctl(fd, request, value)
    return value[0]
