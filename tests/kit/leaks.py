"""After each test nothing is left: threads, descriptors, child processes, shared memory, tasks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.kit.clock import SCALE

__all__ = ["Snapshot"]

_SETTLE = 5.0 * SCALE


@dataclass(frozen=True)
class Snapshot:
    """What this process had at one moment."""

    threads: frozenset[str]
    descriptors: frozenset[str]
    children: frozenset[int]
    shared: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Now."""
        return cls(
            frozenset(f"{t.name}/{t.ident}" for t in threading.enumerate()),
            frozenset(_descriptors()),
            frozenset(p.pid for p in psutil.Process().children(recursive=True) if _runs(p)),
            frozenset(_shared_memory()),
        )

    def left_since(self) -> dict[str, list[str]]:
        """What is there now and was not then, once that has had a moment to go."""
        until = time.monotonic() + _SETTLE
        while True:
            left = self._compare()
            if left:
                gc.collect()  # multiprocessing's semaphores go with their last reference
                left = self._compare()
            left["shared memory"] = [n for n in left.get("shared memory", ()) if not _foreign(n)]
            left = {what: names for what, names in left.items() if names}
            if not left or time.monotonic() > until:
                return left
            # A child that is being reaped tells nobody: there is no event to wait on.
            time.sleep(0.005)

    def _compare(self) -> dict[str, list[str]]:
        now = Snapshot.take()
        found = {
            "threads": sorted(now.threads - self.threads),
            "descriptors": sorted(now.descriptors - self.descriptors),
            "children": sorted(map(str, now.children - self.children)),
            "shared memory": sorted(now.shared - self.shared),
        }
        return {what: names for what, names in found.items() if names}


def _descriptors() -> list[str]:
    """What each open descriptor leads to, counted: numbers are used again and tell nothing."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the one that listed the folder
        # Two pipes differ in their inode; whose they are does not matter here, only how many.
        found[target.split(":")[0] if ":[" in target else target] += 1
    return [f"{target} #{n}" for target, count in found.items() for n in range(count)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shared_memory() -> list[str]:
    folder = Path("/dev/shm")
    return [entry.name for entry in folder.iterdir()] if folder.exists() else []


def _foreign(name: str) -> bool:
    """Whether a process that is none of ours has this entry mapped (a busy machine has others)."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        except OSError:
            continue
        if f"/dev/shm/{name}" in maps:
            return True
    return False
