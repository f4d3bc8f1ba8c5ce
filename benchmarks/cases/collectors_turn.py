"""One turn of ``aiosync bench collectors``: counts and times the frames that one collector rolls out.

A turn is a program of its own, since torch.distributed and torch RPC can be left only at the end of a
process. Each frame carries marks of the weights that acted, and the version that it claims to be of.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import psutil
import torch
import uvloop
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from benchmarks.harness.meters import memory_of

WORKERS = 2
DEADLINE = 60.0
_SAMPLES = 5  # how often memory is sampled in a turn, apart from what is timed
_FAR: dict[str, tuple[str, dict[str, Any]]] = {
    "ray": ("RayCollector", {"remote_configs": {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}}),
    "rpc": ("RPCCollector", {"launcher": "mp"}),
    "distributed": ("DistributedCollector", {"launcher": "mp", "backend": "gloo"}),
}
"""torchrl's collectors whose workers may be on other machines."""

GYM_ENVS = {"gymenv-acrobot": ("Acrobot-v1", 6, 3), "gymenv-pendulum": ("Pendulum-v1", 3, 0)}
"""torchrl's ``GymEnv``: Gymnasium's name, how many numbers it observes, how many actions it has. 0: an action
is one number."""

Count: TypeAlias = tuple[int, int]
"""Frames whose weights were not those of the version that they claim, of how many."""
Host: TypeAlias = Iterator[tuple[Iterator[Count], Callable[[], Any] | None]]
"""A collector's batches, and its update, or None if it updates by itself."""


@dataclass(frozen=True)
class Task:
    """What a turn does. It makes the environments and the policy, also in a worker."""

    library: str  # "aiosync" or "torchrl": whose scheme, or whose collector
    own: bool  # whether that is about aiosync's own collector; otherwise torchrl's collectors act
    host: str  # which collector
    scheme: str  # backend name
    env: str  # "cartpole" or "pixels"; or one of GYM_ENVS
    parameters: int  # additional ones of the policy
    per_batch: int  # frames
    batches: int  # that count
    warm_up: int  # batches before those

    def policy(self) -> Any:
        return TensorDictModule(_Policy(self), in_keys=["observation"], out_keys=["action", "marks"])

    def environment(self) -> Any:
        """For aiosync's collectors: torchrl's environment only if the case is about that."""
        if self.env in GYM_ENVS:
            return self.torchrl()
        return _Pixels() if self.env == "pixels" else gym.make("CartPole-v1")

    def torchrl(self) -> Any:
        envs = importlib.import_module("torchrl.envs")
        if self.env in GYM_ENVS:
            return envs.GymEnv(GYM_ENVS[self.env][0], categorical_action_encoding=True)
        return envs.GymWrapper(self.environment(), categorical_action_encoding=True)


@dataclass(frozen=True)
class Turn:
    """What a turn found."""

    frames: float  # per second, updates included
    update: float  # seconds of an update, the median
    first: float  # seconds from the collector's construction to its first batch
    memory: int  # bytes that trainer and workers had at most, shared ones once
    wrong: int  # frames whose weights were not those of the version that they claim, of ``total``
    total: int


class _Pixels(gym.Env[Any, Any]):
    """Observes 84x84x4 bytes that are new at each step, and costs no other processor time."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self._frames = np.random.default_rng(0).integers(0, 255, (16, 84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._frames[self._step % 16], 1.0, self._step >= 500, False, {}


class _Policy(nn.Module):
    """A small policy. With each action go marks: its first parameter before it, and its last after it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._pixels = task.env == "pixels"
        _, observed, self._actions = GYM_ENVS.get(task.env, ("", 196 if self._pixels else 4, 2))
        self.first = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(observed, 64), nn.Tanh(), nn.Linear(64, self._actions or 1))
        share = max(1, task.parameters // 50)
        self.ballast = nn.ParameterList(torch.zeros(share) for _ in range(50 if task.parameters else 0))
        self.last = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first.detach().clone()
        seen = observation[..., ::12, ::12, :].flatten(-3).float() / 255 if self._pixels else observation
        found = self.net(seen)
        action = found.argmax(-1) if self._actions else 2 * found.tanh()
        marks = torch.stack([first, self.last.detach().clone()])
        return action, marks.expand(*found.shape[:-1], 2).clone()


def _count(marks: Tensor, claimed: Tensor) -> Count:
    return int((marks != claimed[..., None]).any(-1).sum()), claimed.numel()


def _counted(collector: Any) -> Iterator[Count]:
    for batch in collector:
        yield _count(batch["marks"], batch["next", "policy_version"])


class _Tally:
    """Counts and times what a turn does."""

    def __init__(self, task: Task) -> None:
        self._task, self.policy = task, task.policy()
        self._number = self._wrong = self._total = self._memory = 0
        self._seconds: list[float] = []
        self._begun = self._started = time.perf_counter()
        self._first = self._sampling = 0.0

    def arrived(self, found: Count) -> None:
        """Count the frames of a batch, and change the policy."""
        self._number += 1
        self._first = self._first or time.perf_counter() - self._begun
        self._wrong += found[0]
        self._total += found[1]
        with torch.no_grad():
            self.policy.module.first.fill_(self._number)
            self.policy.module.last.fill_(self._number)

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
        taken = time.perf_counter() - self._started - self._sampling
        update = statistics.median(self._seconds)
        return Turn(self._total / taken, update, self._first, self._memory, self._wrong, self._total)


def _memory() -> int:
    this = psutil.Process()
    pids = [process.pid for process in (this, *this.children(recursive=True))]
    return sum(pss for pss, _ in memory_of(pids))


async def _take_own_turn(task: Task) -> Turn:
    """aiosync's collector, with an event loop."""
    tally = _Tally(task)
    async with importlib.import_module("aiosync.collectors").MultiCollector(
        [task.environment] * WORKERS, tally.policy, sync=task.host == "sync", frames_per_batch=task.per_batch,
        total_frames=-1, track_policy_version=True, timeout=DEADLINE,
    ) as collector:  # fmt: skip
        async for batch in collector:
            tally.arrived(_count(batch["marks"], batch["policy_version"]))
            with tally.timed():
                await collector.update_policy_weights_()
            if tally.ended():
                break
        return tally.turn()


def _take_turn(task: Task) -> Turn:
    """torchrl's collectors, with a scheme of either library."""
    importlib.import_module("torchrl.collectors")
    library, backend = "aiosync.sync", task.scheme
    if task.library == "torchrl":  # which has no TCP: its queues stand beside that
        library, backend = "torchrl.weight_update", "process" if backend == "tcp" else backend
    scheme = importlib.import_module(library).WeightSyncScheme.from_backend(backend)
    hosts = {"evaluator": _evaluator, "single": _process, "server": _process}
    # Imported for Ray only: the memory of all processes counts.
    cluster = task.host == "ray" and importlib.import_module("aiosync._demo").ray_cluster(store=2 << 30)
    with cluster or contextlib.nullcontext():
        tally = _Tally(task)
        with hosts.get(task.host, _collector)(task, scheme, tally) as (batches, update):
            for found in batches:
                tally.arrived(found)
                if update is not None:
                    with tally.timed():
                        update()
                if tally.ended():
                    break
            return tally.turn()


@contextlib.contextmanager
def _collector(task: Task, scheme: Any, tally: _Tally) -> Host:
    """A collector of several workers."""
    collectors: Any = importlib.import_module("torchrl.collectors")
    tracked = {"track_policy_version": True}
    given = {
        "frames_per_batch": task.per_batch,
        "total_frames": task.per_batch * (task.batches + task.warm_up + 1),
        "weight_sync_schemes": {"policy": scheme},
    }
    if task.host in _FAR:
        name, more = _FAR[task.host]
        make = getattr(importlib.import_module("torchrl.collectors.distributed"), name)
        given |= {"collector_class": collectors.Collector, "collector_kwargs": tracked, "sync": False, **more}
    else:
        make = getattr(collectors, f"Multi{task.host.title()}Collector")
        given |= tracked
    collector = make([task.torchrl] * WORKERS, tally.policy, **given)
    yield _counted(collector), collector.update_policy_weights_
    collector.shutdown()


@contextlib.contextmanager
def _evaluator(task: Task, scheme: Any, tally: _Tally) -> Host:
    """An evaluator with a process of its own, which it updates by itself before each evaluation. Its frames
    claim nothing, so that only torn ones are counted."""
    collectors: Any = importlib.import_module("torchrl.collectors")
    updating = collectors.MultiSyncCollector
    updating.update_policy_weights_ = tally.timed()(updating.update_policy_weights_)
    found: list[Count] = []

    def look(batch: Any) -> dict[str, float]:
        mask, marks = batch["collector", "mask"], batch["marks"]
        torn = (marks[..., 0] != marks[..., 1]) & mask.view(marks.shape[:-1])
        found.append((int(torn.sum()), int(mask.sum())))
        return {}

    def batches() -> Iterator[Count]:
        while True:
            evaluator.evaluate(weights=tally.policy)
            yield found[-1]

    evaluator = collectors.Evaluator(
        task.torchrl, policy_factory=task.policy, num_trajectories=max(1, task.per_batch // 10),
        max_steps=200, backend="process", weight_sync_schemes={"policy": scheme}, metrics_fn=look,
    )  # fmt: skip
    yield batches(), None
    evaluator.shutdown()


@contextlib.contextmanager
def _process(task: Task, scheme: Any, tally: _Tally) -> Host:
    """A single collector, or an inference server, in a process that receives by a scheme."""
    context = multiprocessing.get_context("spawn")
    scheme.init_on_sender(model_id="policy", model=tally.policy, devices=[torch.device("cpu")], ctx=context)
    conn, theirs = context.Pipe()
    process = context.Process(target=_act, args=(task, scheme, theirs), daemon=True)
    process.start()
    theirs.close()
    scheme.connect()

    def batches() -> Iterator[Count]:
        while conn.poll(DEADLINE):
            yield conn.recv()

    yield batches(), lambda: scheme.send(weights=tally.policy)
    conn.close()
    process.join(DEADLINE)
    scheme.shutdown()


def _act(task: Task, scheme: Any, conn: Connection[Count, Any]) -> None:
    warnings.simplefilter("ignore")
    if task.host == "server":
        batches = _serve(task, scheme)
    else:
        collectors: Any = importlib.import_module("torchrl.collectors")
        collector = collectors.Collector(
            task.torchrl, task.policy(), frames_per_batch=task.per_batch, total_frames=-1,
            weight_recv_schemes={"policy": scheme}, worker_idx=0, track_policy_version=True,
        )  # fmt: skip
        batches = _counted(collector)
    with contextlib.suppress(OSError):  # the trainer has closed its end
        for found in batches:
            conn.send(found)
    os._exit(0)


def _serve(task: Task, scheme: Any) -> Iterator[Count]:
    servers: Any = importlib.import_module("torchrl.modules.inference_server")
    server = servers.InferenceServer(task.policy(), servers.ThreadingTransport(), weight_sync=scheme)
    server.start()
    client, request = server.client(), TensorDict({"observation": torch.randn(4)}, [])
    while True:
        answers: Any = torch.stack([client(request) for _ in range(task.per_batch)])
        yield _count(answers["marks"], answers["policy_version"].view(-1))


def main() -> None:
    """Take the turn of the command line, and print it as the last line."""
    warnings.simplefilter("ignore")
    task = Task(**json.loads(sys.argv[1]))
    own = task.own and task.library == "aiosync"
    turn = uvloop.run(_take_own_turn(task)) if own else _take_turn(task)
    print(f"\n{json.dumps(asdict(turn))}", flush=True)
    os._exit(0)  # torchrl's threads and processes of torch.distributed would hold up the exit
