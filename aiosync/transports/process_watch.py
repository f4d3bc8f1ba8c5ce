"""Watch for the end of a process, by a descriptor that the kernel makes readable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress


class ProcessWatch:
    """Calls ``on_exit`` once on the running loop when the process ``pid`` ends, by a pidfd of Linux.

    A connection closes when its peer dies, unless another process has inherited the peer's end; a queue does
    not close at all. On a system without pidfds nothing is watched; nor are the pid 0 and this process.
    """

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._fd = -1
        self.gone = False  # whether the process had ended before the watch began
        if pid in (0, os.getpid()) or "pidfd_open" not in dir(os):
            return
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.gone = True
            self._loop.call_soon(on_exit)
        except OSError:
            return  # another PID namespace, or a kernel without pidfds: the connection has to show the end
        else:
            self._loop.add_reader(self._fd, self._exited)

    @property
    def watching(self) -> bool:
        """Whether the process runs, and ``on_exit`` will be called at its end."""
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
