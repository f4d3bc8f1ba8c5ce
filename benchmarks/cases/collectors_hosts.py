"""What a turn of ``aiosync bench collectors`` needs: environments, a policy, torchrl's collectors.

Each frame carries marks of the weights that acted, and the version that it claims to be of.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

__all__ = [
    "DEADLINE", "WORKERS", "Count", "Make", "Task", "TorchrlCollector", "TorchrlEvaluator", "TorchrlProcess",
    "count",
]  # fmt: skip

WORKERS = 2
DEADLINE = 60.0

Count: TypeAlias = tuple[int, int]
"""Frames whose weights were not those of the version that they claim, of how many."""
Timed: TypeAlias = Callable[[], AbstractContextManager[None]]


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


class Make:
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


def count(marks: Tensor, claimed: Tensor) -> Count:
    return int((marks != claimed[..., None]).any(-1).sum()), claimed.numel()


def _count_batch(batch: Any) -> Count:
    return count(batch["marks"], batch["next", "policy_version"])


class TorchrlCollector:
    """A collector of several workers."""

    def __init__(self, task: Task, scheme: Any, policy: Any) -> None:
        collectors: Any = importlib.import_module("torchrl.collectors")
        makers = [Make(task).torchrl] * WORKERS
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


class TorchrlEvaluator:
    """An evaluator with a process of its own, which it updates by itself before each evaluation. Its frames
    claim nothing, so that only torn ones are counted."""

    def __init__(self, task: Task, scheme: Any, policy: Any, timed: Timed) -> None:
        collectors: Any = importlib.import_module("torchrl.collectors")
        update = collectors.MultiSyncCollector.update_policy_weights_

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            with timed():
                return update(*args, **kwargs)

        collectors.MultiSyncCollector.update_policy_weights_ = timed_update
        self._policy = policy
        self._found: list[Count] = []
        self._evaluator = collectors.Evaluator(
            Make(task).torchrl,
            policy_factory=Make(task).policy,
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


class TorchrlProcess:
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
        while self._conn.poll(DEADLINE):
            yield self._conn.recv()

    def update(self) -> None:
        self._scheme.send(weights=self._policy)

    def close(self) -> None:
        self._conn.close()
        self._process.join(DEADLINE)
        self._scheme.shutdown()


def _act(task: Task, scheme: Any, conn: Connection[Count, Any]) -> None:
    warnings.simplefilter("ignore")
    try:
        for found in (_serve if task.host == "server" else _collect)(task, scheme):
            conn.send(found)
    except OSError:  # the trainer has closed its end
        os._exit(0)


def _collect(task: Task, scheme: Any) -> Iterator[Count]:
    collector = importlib.import_module("torchrl.collectors").Collector(
        Make(task).torchrl,
        Make(task).policy(),
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
    server = servers.InferenceServer(Make(task).policy(), servers.ThreadingTransport(), weight_sync=scheme)
    server.start()
    client = server.client()
    request = TensorDict({"observation": torch.randn(4)}, [])
    while True:
        answers = [client(request) for _ in range(task.per_batch)]
        marks = torch.stack([answer["marks"] for answer in answers])
        yield count(marks, torch.stack([answer["policy_version"] for answer in answers]).view(-1))
