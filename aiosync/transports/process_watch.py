"""Notice that a process has ended, by a descriptor that the kernel makes readable: no polling."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

__all__ = ["ProcessWatch"]


class ProcessWatch:
    """Calls ``on_exit`` once on the running loop when process ``pid`` ends (Linux: by a pidfd).

    A channel tells of its peer's death by closing, but only if no other process has inherited the
    peer's end, and a queue does not tell at all. Where the system has no pidfd nothing is watched.

    Args:
        pid: the process; 0 and this process itself are not watched.
        on_exit: takes nothing.

    Attributes:
        gone: there is no such process any more.
    """

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._fd = -1
        self.gone = False
        if pid in (0, os.getpid()) or "pidfd_open" not in dir(os):
            return
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.gone = True
            self._loop.call_soon(on_exit)
            return
        except OSError:
            return  # another PID namespace, or a kernel without it: the channel has to tell
        self._loop.add_reader(self._fd, self._exited)

    @property
    def watching(self) -> bool:
        """Whether the process is known to run and its end will be told."""
        return self._fd >= 0

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._fd >= 0:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _exited(self) -> None:
        self.close()
        self._on_exit()
