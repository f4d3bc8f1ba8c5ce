"""Processes that have lost their sender and may still be reading its memory."""

from __future__ import annotations

import os

from aiosync.schemes.link import WorkerLink
from aiosync.transports.liveness import ProcessWatch

__all__ = ["Orphans"]


class Orphans:
    """A process that lost its channel but runs on may be computing with a slot: the slot stays held in its
    name until it has ended. In this process a lost channel is all there is."""

    def __init__(self) -> None:
        self._watches: dict[int, ProcessWatch] = {}

    def adopt(self, link: WorkerLink) -> tuple[str, int] | None:
        """The name in which what a lost worker reads is to be held; None if it reads nothing any more."""
        pid, group = link.pid, link.group
        if not link.reading or pid in (0, os.getpid()):
            return None

        def ended() -> None:
            self._watches.pop(pid, None)
            group.release(("orphan", pid))

        watch = ProcessWatch(pid, ended)
        if not watch.watching:
            return None
        self._watches[pid] = watch
        return ("orphan", pid)

    def close(self) -> None:
        """Watch nobody any more."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
