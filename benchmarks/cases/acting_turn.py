"""One turn of ``aiosync bench acting``: blocking sends to workers that act as fast as they can.

The policy is four layers of 256, 1 MB. Each worker computes forward passes in its main thread, while its
library applies updates in a thread of its own. The trainer changes the weights and sends them: with a pause
of 10 ms after each send, or at fixed times.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import MODEL_ID

_ROWS = 8  # of the workers' inputs
_WIDTH = 256
_FORWARDS = 20  # between two looks at whether to stop
_PAUSE = 0.01  # seconds after each send
_WARM_UP = 10  # sends
_CLASSES = {"shared": "SharedMemWeightSyncScheme", "process": "MultiProcessWeightSyncScheme"}
_MODULES = {"aiosync": "aiosync.sync", "torchrl": "torchrl.weight_update"}


@dataclass(frozen=True)
class ActingTask:
    """What a turn does."""

    library: str
    scheme: str
    threads: int  # torch's, in each process; 0: torch's default
    workers: int
    sends: int
    every: float  # seconds from the start of a send to that of the next; 0: a pause after each


@dataclass(frozen=True)
class ActingTurn:
    """What a turn found."""

    seconds: list[float]  # of each send
    forwards: float  # per second, of all workers together
    behind: int  # workers whose weights were not the trainer's after the last send


def _policy() -> nn.Module:
    return nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(4)])


def _work(scheme: Any, index: int, task: ActingTask, ready: Any, stop: Any, counts: Any, firsts: Any) -> None:
    """Act until ``stop`` is set. ``counts`` gets the forward passes, ``firsts`` one of the weights."""
    warnings.simplefilter("ignore")
    if task.threads:
        torch.set_num_threads(task.threads)
    policy, observations = _policy(), torch.zeros(_ROWS, _WIDTH)
    scheme.init_on_receiver(model_id=MODEL_ID, model=policy, worker_idx=index)
    scheme.connect(worker_idx=index)
    ready.release()
    with torch.no_grad():
        while not stop.is_set():
            for _ in range(_FORWARDS):
                policy(observations)
            counts[index] += _FORWARDS
    time.sleep(0.5)  # torchrl's trainer may go on before the update is applied
    firsts[index] = next(policy.parameters()).flatten()[0].item()
    ready.release()
    time.sleep(60)  # until the trainer kills this process: nothing here is to wait for the other side


def _trainer(task: ActingTask) -> ActingTurn:
    if task.threads:
        torch.set_num_threads(task.threads)
    spawn = mp.get_context("spawn")
    scheme = getattr(importlib.import_module(_MODULES[task.library]), _CLASSES[task.scheme])()
    policy = _policy()
    if task.library == "torchrl":
        from benchmarks.contenders.torchrl import memory_of_workers

        scheme.init_on_sender(ctx=spawn, **memory_of_workers(task.scheme, policy, task.workers))
    else:
        scheme.init_on_sender(num_workers=task.workers, model_id=MODEL_ID, model=policy)
    ready, stop = spawn.Semaphore(0), spawn.Event()
    counts: Any = spawn.Array("q", task.workers)
    firsts: Any = spawn.Array("d", task.workers)
    workers = [
        spawn.Process(target=_work, args=(scheme, index, task, ready, stop, counts, firsts), daemon=True)
        for index in range(task.workers)
    ]
    for worker in workers:
        worker.start()
    scheme.connect()
    for _ in workers:
        ready.acquire()
    seconds: list[float] = []
    for number in range(_WARM_UP + task.sends):
        if number == _WARM_UP:
            begun, before = time.perf_counter(), sum(counts)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1e-3)
        started = time.perf_counter()
        scheme.send(policy)
        seconds.append(time.perf_counter() - started)
        time.sleep(max(0.0, started + task.every - time.perf_counter()) if task.every else _PAUSE)
    forwards = (sum(counts) - before) / (time.perf_counter() - begun)
    stop.set()
    for _ in workers:
        ready.acquire()
    last = next(policy.parameters()).flatten()[0].item()
    behind = sum(first != last for first in firsts)
    for worker in workers:
        worker.kill()
    return ActingTurn(seconds[_WARM_UP:], forwards, behind)


def main() -> None:
    """Take the turn of the command line, and print it as the last line."""
    warnings.simplefilter("ignore")
    turn = _trainer(ActingTask(**json.loads(sys.argv[1])))
    print(f"\n{json.dumps(asdict(turn))}", flush=True)
    os._exit(0)
