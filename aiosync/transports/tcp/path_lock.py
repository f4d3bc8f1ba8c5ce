"""A lock on the path of a Unix socket: one sender at a time may listen there."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from aiosync.transports.forks import close_in_children

__all__ = ["PathLock"]


class PathLock:
    """A lock on ``path``, in the file ``{path}.lock``. Only the process that holds it may unlink ``path``.

    The kernel releases the lock when the process ends. Forked children do not hold it.

    Args:
        path: the socket's path.

    Raises:
        BlockingIOError: another sender holds the lock.
        OSError: the lock's file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._name = f"{path}.lock"
        self._owner = os.getpid()
        self._fd = -1
        while self._fd < 0:
            self._fd = self._acquire()
        close_in_children(self)

    def _acquire(self) -> int:
        """Lock the file and return its descriptor; -1 if its last holder unlinked it after it was opened
        here."""
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
        """Return the file's descriptor; -1 after the release."""
        return self._fd

    def release(self) -> None:
        """Release the lock; idempotent. In a forked child only the descriptor is closed."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if os.getpid() == self._owner:
            with suppress(OSError):
                os.unlink(self._name)
        os.close(fd)
