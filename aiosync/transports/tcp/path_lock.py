"""The right to listen at the path of a Unix socket: one sender at a time has it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from aiosync.transports.forks import close_in_children

__all__ = ["PathLock"]


class PathLock:
    """A lock on ``path``, in a file beside it. Only its holder may unlink what lies at the path.

    The kernel releases it when the process ends. Forked children do not have it.

    Args:
        path: of the socket.

    Raises:
        BlockingIOError: another sender has it.
        OSError: the file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._name = f"{path}.lock"
        self._owner = os.getpid()
        self._fd = -1
        while self._fd < 0:
            self._fd = self._acquire()
        close_in_children(self)

    def _acquire(self) -> int:
        """The locked file's descriptor; -1 if its last holder has unlinked it since it was opened."""
        fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == os.stat(self._name).st_ino:
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return -1

    def fileno(self) -> int:
        """The file's descriptor; -1 once it is released."""
        return self._fd

    def release(self) -> None:
        """Let another sender have it; idempotent. In a forked child this only forgets it."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if os.getpid() == self._owner:
            with suppress(OSError):
                os.unlink(self._name)
        os.close(fd)
