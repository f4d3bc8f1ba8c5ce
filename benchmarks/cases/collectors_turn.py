"""One turn of ``aiosync bench collectors``: frames are rolled out here, or below, and counted.

It is run as a program (``python -m``), since torch.distributed and torch RPC can be left only at the end of a
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
from collections.abc import Iterator
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

from aiosync._demo import ray_cluster

__all__ = ["Task", "Turn"]

WORKERS = 2
_DEADLINE = 60.0
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

Count: TypeAlias = tuple[int, int]
"""Frames whose weights were not those of the version that they claim, of how many."""


@dataclass(frozen=True)
class Task:
    """What a turn does.

    Attributes:
        library: ``aiosync`` or ``torchrl``: whose scheme, or whose collector.
        own: whether that is about aiosync's own collector; otherwise torchrl's collectors act.
        host: which collector.
        scheme: backend name.
        env: ``cartpole`` or ``pixels``.
        parameters: additional ones of the policy.
        per_batch: frames.
        batches: that count.
        warm_up: batches before those.
    """

    library: str
    own: bool
    host: str
    scheme: str
    env: str
    parameters: int
    per_batch: int
    batches: int
    warm_up: int


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


class Pixels(gym.Env[Any, Any]):
    """Observes 84x84x4 bytes that are new at each step, and costs no other processor time."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self._frames = np.random.default_rng(0).integers(0, 255, (16, 84, 84, 4), np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """See :class:`gymnasium.Env`."""
        super().reset(seed=seed)
        self._step = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        """See :class:`gymnasium.Env`."""
        self._step += 1
        return self._frames[self._step % 16], 1.0, self._step >= 500, False, {}


class Policy(nn.Module):
    """A small policy. Its first parameter and its last are the version, and go with each action."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._pixels = task.env == "pixels"
        self.first = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(196 if self._pixels else 4, 64), nn.Tanh(), nn.Linear(64, 2))
        share = max(1, task.parameters // 50)
        self.ballast = nn.ParameterList(torch.zeros(share) for _ in range(50 if task.parameters else 0))
        self.last = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """The action, and the marks: the first parameter before it and the last after it."""
        first = self.first.detach().clone()
        seen = observation[..., ::12, ::12, :].flatten(-3).float() / 255 if self._pixels else observation
        action = self.net(seen).argmax(-1)
        marks = torch.stack([first, self.last.detach().clone()])
        return action, marks.expand(*action.shape, 2).clone()


class _Make:
    """Makes a policy or an environment, in a worker."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def policy(self) -> Any:
        return TensorDictModule(Policy(self._task), in_keys=["observation"], out_keys=["action", "marks"])

    def gymnasium(self) -> Any:
        return Pixels() if self._task.env == "pixels" else gym.make("CartPole-v1")

    def torchrl(self) -> Any:
        wrapper = importlib.import_module("torchrl.envs").GymWrapper
        return wrapper(self.gymnasium(), categorical_action_encoding=True)


def _count(marks: Tensor, claimed: Tensor) -> Count:
    return int((marks != claimed[..., None]).any(-1).sum()), claimed.numel()


def _count_batch(batch: Any) -> Count:
    return _count(batch["marks"], batch["next", "policy_version"])


class _Tally:
    """Counts and times what a turn does."""

    def __init__(self, task: Task, policy: Any) -> None:
        self._task, self._policy = task, policy
        self._number = self._wrong = self._total = self._memory = 0
        self._seconds: list[float] = []
        self._begun = self._started = time.perf_counter()
        self._first = self._sampling = 0.0

    def arrived(self, count: Count) -> None:
        """A batch: count its frames, and change the policy."""
        self._number += 1
        if self._number == 1:
            self._first = time.perf_counter() - self._begun
        self._wrong += count[0]
        self._total += count[1]
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


class _Collector:
    """A collector of several workers."""

    def __init__(self, task: Task, scheme: Any, policy: Any) -> None:
        collectors: Any = importlib.import_module("torchrl.collectors")
        makers = [_Make(task).torchrl] * WORKERS
        common: dict[str, Any] = {
            "frames_per_batch": task.per_batch,
            "total_frames": task.per_batch * (task.batches + task.warm_up + 1),
            "weight_sync_schemes": {"policy": scheme},
        }
        if task.host in ("sync", "async"):
            make = collectors.MultiSyncCollector if task.host == "sync" else collectors.MultiAsyncCollector
            self._collector = make(makers, policy, track_policy_version=True, **common)
            return
        far: Any = importlib.import_module("torchrl.collectors.distributed")
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "ray": (far.RayCollector, {"remote_configs": {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}}),
            "rpc": (far.RPCCollector, {"launcher": "mp"}),
            "distributed": (far.DistributedCollector, {"launcher": "mp", "backend": "gloo"}),
        }
        make, more = kinds[task.host]
        common |= {
            "collector_class": collectors.Collector,
            "sync": False,
            "collector_kwargs": {"track_policy_version": True},
        }
        self._collector = make(makers, policy, **more, **common)

    def batches(self) -> Iterator[Count]:
        for batch in self._collector:
            yield _count_batch(batch)

    def update(self) -> None:
        self._collector.update_policy_weights_()

    def close(self) -> None:
        self._collector.shutdown()


class _Evaluator:
    """An evaluator with a process of its own, which it updates by itself before each evaluation. Its frames
    claim nothing, so that only torn ones are counted."""

    def __init__(self, task: Task, scheme: Any, policy: Any, tally: _Tally) -> None:
        collectors: Any = importlib.import_module("torchrl.collectors")
        update = collectors.MultiSyncCollector.update_policy_weights_

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            with tally.timed():
                return update(*args, **kwargs)

        collectors.MultiSyncCollector.update_policy_weights_ = timed_update
        self._policy = policy
        self._found: list[Count] = []
        self._evaluator = collectors.Evaluator(
            _Make(task).torchrl,
            policy_factory=_Make(task).policy,
            num_trajectories=max(1, task.per_batch // 10),
            max_steps=200,
            backend="process",
            weight_sync_schemes={"policy": scheme},
            metrics_fn=self._look,
        )

    def _look(self, batch: Any) -> dict[str, float]:
        mask, marks = batch["collector", "mask"], batch["marks"]
        torn = (marks[..., 0] != marks[..., 1]) & mask.view(marks.shape[:-1])
        self._found.append((int(torn.sum()), int(mask.sum())))
        return {}

    def batches(self) -> Iterator[Count]:
        while True:
            self._evaluator.evaluate(weights=self._policy)
            yield self._found[-1]

    def close(self) -> None:
        self._evaluator.shutdown()


class _Process:
    """A single collector, or an inference server, in a process that receives by a scheme."""

    def __init__(self, task: Task, scheme: Any, policy: Any) -> None:
        self._scheme, self._policy = scheme, policy
        context = multiprocessing.get_context("spawn")
        scheme.init_on_sender(model_id="policy", model=policy, devices=[torch.device("cpu")], ctx=context)
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_act, args=(task, scheme, theirs), daemon=True)
        self._process.start()
        theirs.close()
        scheme.connect()

    def batches(self) -> Iterator[Count]:
        while self._conn.poll(_DEADLINE):
            yield self._conn.recv()

    def update(self) -> None:
        self._scheme.send(weights=self._policy)

    def close(self) -> None:
        self._conn.close()
        self._process.join(_DEADLINE)
        self._scheme.shutdown()


def _act(task: Task, scheme: Any, conn: Connection[Count, Any]) -> None:
    warnings.simplefilter("ignore")
    try:
        for count in (_serve if task.host == "server" else _collect)(task, scheme):
            conn.send(count)
    except OSError:  # the trainer has closed its end
        os._exit(0)


def _collect(task: Task, scheme: Any) -> Iterator[Count]:
    collector = importlib.import_module("torchrl.collectors").Collector(
        _Make(task).torchrl,
        _Make(task).policy(),
        frames_per_batch=task.per_batch,
        total_frames=-1,
        weight_recv_schemes={"policy": scheme},
        worker_idx=0,
        track_policy_version=True,
    )
    for batch in collector:
        yield _count_batch(batch)


def _serve(task: Task, scheme: Any) -> Iterator[Count]:
    servers: Any = importlib.import_module("torchrl.modules.inference_server")
    server = servers.InferenceServer(_Make(task).policy(), servers.ThreadingTransport(), weight_sync=scheme)
    server.start()
    client = server.client()
    request = TensorDict({"observation": torch.randn(4)}, [])
    while True:
        answers = [client(request) for _ in range(task.per_batch)]
        marks = torch.stack([answer["marks"] for answer in answers])
        yield _count(marks, torch.stack([answer["policy_version"] for answer in answers]).view(-1))


async def _take_own_turn(task: Task, policy: Any) -> Turn:
    """aiosync's collector, with an event loop."""
    collectors: Any = importlib.import_module("aiosync.collectors")
    makers = [_Make(task).gymnasium] * WORKERS
    tally = _Tally(task, policy)
    async with collectors.MultiCollector(
        makers,
        policy,
        sync=task.host == "sync",
        frames_per_batch=task.per_batch,
        total_frames=-1,
        track_policy_version=True,
        timeout=_DEADLINE,
    ) as collector:
        async for batch in collector:
            tally.arrived(_count(batch["marks"], batch["policy_version"]))
            with tally.timed():
                await collector.update_policy_weights_()
            if tally.ended():
                break
        return tally.turn()


def _take_turn(task: Task, policy: Any) -> Turn:
    """torchrl's collectors, with a scheme of either library."""
    importlib.import_module("torchrl.collectors")
    peers: Any = importlib.import_module("torchrl.weight_update")
    library = importlib.import_module("aiosync.sync") if task.library == "aiosync" else peers
    # torchrl has no scheme for some: its queues stand beside those.
    make = getattr(library, f"{_CLASSES[task.scheme]}WeightSyncScheme", peers.MultiProcessWeightSyncScheme)
    with ray_cluster(store=2 << 30) if task.host == "ray" else contextlib.nullcontext():
        tally = _Tally(task, policy)
        host: _Collector | _Evaluator | _Process
        match task.host:
            case "evaluator":
                host = _Evaluator(task, make(), policy, tally)
            case "single" | "server":
                host = _Process(task, make(), policy)
            case _:
                host = _Collector(task, make(), policy)
        for count in host.batches():
            tally.arrived(count)
            if not isinstance(host, _Evaluator):
                with tally.timed():
                    host.update()
            if tally.ended():
                break
        turn = tally.turn()
        host.close()
    return turn


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _task = Task(**json.loads(sys.argv[1]))
    _policy = _Make(_task).policy()
    if _task.own and _task.library == "aiosync":
        _turn = uvloop.run(_take_own_turn(_task, _policy))
    else:
        _turn = _take_turn(_task, _policy)
    sys.stdout.write(f"\n{json.dumps(asdict(_turn))}\n")
    sys.stdout.flush()
    os._exit(0)  # torchrl's threads and processes of torch.distributed would hold up the exit
