"""One turn of ``aiosync bench collectors``: counts and times the frames that one collector rolls out.

It is run as a program (``python -m``), since torch.distributed and torch RPC can be left only at the end of a
process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import uvloop

from benchmarks.cases import collectors_hosts as hosts

__all__ = ["Turn"]

_SAMPLES = 5
"""How often memory is sampled in a turn, apart from what is timed."""
_CLASSES = {
    "shared": "SharedMem",
    "process": "MultiProcess",
    "tcp": "TCP",
    "distributed": "Distributed",
    "rpc": "RPC",
    "ray": "Ray",
}


@dataclass(frozen=True)
class Turn:
    """What a turn found.

    Attributes:
        frames: per second, updates included.
        update: seconds of an update, the median.
        first: seconds from the collector's construction to its first batch.
        memory: bytes that trainer and workers had at most, shared ones once.
        wrong: frames whose weights were not those of the version that they claim, of ``total``.
        total: frames.
    """

    frames: float
    update: float
    first: float
    memory: int
    wrong: int
    total: int


class _Tally:
    """Counts and times what a turn does."""

    def __init__(self, task: hosts.Task, policy: Any) -> None:
        self._task, self._policy = task, policy
        self._number = self._wrong = self._total = self._memory = 0
        self._seconds: list[float] = []
        self._begun = self._started = time.perf_counter()
        self._first = self._sampling = 0.0

    def arrived(self, found: hosts.Count) -> None:
        """A batch: count its frames, and change the policy."""
        self._number += 1
        if self._number == 1:
            self._first = time.perf_counter() - self._begun
        self._wrong += found[0]
        self._total += found[1]
        with torch.no_grad():
            self._policy.module.first.fill_(self._number)
            self._policy.module.last.fill_(self._number)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around an update."""
        before = time.perf_counter()
        yield
        self._seconds.append(time.perf_counter() - before)

    def ended(self) -> bool:
        """Whether that was the last batch. The warm-up does not count."""
        number, task = self._number - self._task.warm_up, self._task
        if number == 0:
            self._wrong = self._total = 0
            self._seconds.clear()
            self._started = time.perf_counter()
        elif task.own and number > 0 and number % max(1, task.batches // _SAMPLES) == 0:
            before = time.perf_counter()
            self._memory = max(self._memory, _memory())
            self._sampling += time.perf_counter() - before
        return number == task.batches

    def turn(self) -> Turn:
        """What was found."""
        taken = time.perf_counter() - self._started - self._sampling
        update = statistics.median(self._seconds)
        return Turn(self._total / taken, update, self._first, self._memory, self._wrong, self._total)


def _memory() -> int:
    found = 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found


async def _take_own_turn(task: hosts.Task, policy: Any) -> Turn:
    """aiosync's collector, with an event loop."""
    collectors: Any = importlib.import_module("aiosync.collectors")
    makers = [hosts.Make(task).gymnasium] * hosts.WORKERS
    tally = _Tally(task, policy)
    async with collectors.MultiCollector(
        makers,
        policy,
        sync=task.host == "sync",
        frames_per_batch=task.per_batch,
        total_frames=-1,
        track_policy_version=True,
        timeout=hosts.DEADLINE,
    ) as collector:
        async for batch in collector:
            tally.arrived(hosts.count(batch["marks"], batch["policy_version"]))
            with tally.timed():
                await collector.update_policy_weights_()
            if tally.ended():
                break
        return tally.turn()


def _take_turn(task: hosts.Task, policy: Any) -> Turn:
    """torchrl's collectors, with a scheme of either library."""
    importlib.import_module("torchrl.collectors")
    peers: Any = importlib.import_module("torchrl.weight_update")
    library = importlib.import_module("aiosync.sync") if task.library == "aiosync" else peers
    # torchrl has no scheme for some: its queues stand beside those.
    make = getattr(library, f"{_CLASSES[task.scheme]}WeightSyncScheme", peers.MultiProcessWeightSyncScheme)
    # Imported for Ray only: all processes of a turn import this module, and their memory counts.
    cluster = task.host == "ray" and importlib.import_module("aiosync._demo").ray_cluster(store=2 << 30)
    with cluster or contextlib.nullcontext():
        tally = _Tally(task, policy)
        host: hosts.TorchrlCollector | hosts.TorchrlEvaluator | hosts.TorchrlProcess
        match task.host:
            case "evaluator":
                host = hosts.TorchrlEvaluator(task, make(), policy, tally.timed)
            case "single" | "server":
                host = hosts.TorchrlProcess(task, make(), policy)
            case _:
                host = hosts.TorchrlCollector(task, make(), policy)
        for found in host.batches():
            tally.arrived(found)
            if not isinstance(host, hosts.TorchrlEvaluator):
                with tally.timed():
                    host.update()
            if tally.ended():
                break
        turn = tally.turn()
        host.close()
    return turn


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _task = hosts.Task(**json.loads(sys.argv[1]))
    _policy = hosts.Make(_task).policy()
    if _task.own and _task.library == "aiosync":
        _turn = uvloop.run(_take_own_turn(_task, _policy))
    else:
        _turn = _take_turn(_task, _policy)
    sys.stdout.write(f"\n{json.dumps(asdict(_turn))}\n")
    sys.stdout.flush()
    os._exit(0)  # torchrl's threads and processes of torch.distributed would hold up the exit
