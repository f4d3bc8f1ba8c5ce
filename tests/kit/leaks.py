"""After each test nothing is left: threads, descriptors, child processes, shared memory, tasks."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path

import psutil

from tests.kit.clock import SCALE

__all__ = ["Snapshot", "mark_what_is_ours"]

_SETTLE = 40.0 * SCALE
"""Seconds that what is left has to go. More than the 30 seconds for which gloo may hold a thread."""


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
        # Once: psutil reads a file of each process on the machine for it.
        children = psutil.Process().children(recursive=True)
        return cls(
            frozenset(f"{t.name}/{t.ident}" for t in threading.enumerate()),
            frozenset(_descriptors()),
            frozenset(process.pid for process in children if _runs(process)),
            frozenset(_shared_memory({os.getpid(), *(process.pid for process in children)})),
        )

    def left_since(self) -> dict[str, list[str]]:
        """What is there now and was not then, once that has had a moment to go."""
        until = time.monotonic() + _SETTLE
        while True:
            left = self._compare()
            if left:
                gc.collect()  # multiprocessing's semaphores go with their last reference
                left = self._compare()
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
        if not target.startswith("/dev/nvidia"):  # CUDA opens more of these as it pleases
            found[target.split(":")[0] if ":[" in target else target] += 1
    return [f"{target} #{n}" for target, count in found.items() for n in range(count)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_PREFIX = f"/mp-aiosync{os.getpid()}"
"""What the names of multiprocessing's semaphores begin with that this process and its children make."""

_pids: set[int] = set()
"""The children that this process has started, those that have ended too."""


def mark_what_is_ours() -> None:
    """Have this process tree's shared memory be known by its names. Other programs on the machine make and
    remove entries of their own at any time, and these are nothing to the tests."""
    # Every Process copies this to its child, whichever way that is started.
    current_process()._config["semprefix"] = _PREFIX  # type: ignore[attr-defined]
    start = BaseProcess.start

    def start_and_note(self: BaseProcess) -> None:
        start(self)
        if self.pid is not None:
            _pids.add(self.pid)

    BaseProcess.start = start_and_note  # type: ignore[method-assign]


def _shared_memory(tree: set[int]) -> list[str]:
    """The entries of /dev/shm that a process of this tree has made. ``tree``: its processes at the moment."""
    pids = tree | _pids
    names = os.listdir("/dev/shm") if os.path.exists("/dev/shm") else []
    return [name for name in names if _is_ours(name, pids)]


def _is_ours(name: str, pids: set[int]) -> bool:
    """Whether a process of this tree has made an entry of /dev/shm."""
    if name.startswith("sem."):
        return name.startswith(f"sem.{_PREFIX[1:]}")
    by_torch = re.match(r"torch_(\d+)_", name)
    if by_torch is not None:
        return int(by_torch[1]) in pids
    return any(f"/dev/shm/{name}" in _maps(pid) for pid in pids)


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return ""
