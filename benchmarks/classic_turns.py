"""One turn inside torchrl: a collector, an evaluator or an inference server, with our scheme or torchrl's.

It is run as a process of its own. Whatever acts hands over its batches, each checked against the version that
it claims; the trainer updates after each.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from aiosync._demo import ray_cluster

__all__ = ["CASES", "Turn"]

CASES = {
    "sync": ("shared", "process", "tcp"),
    "async": ("shared", "process", "tcp"),
    "single": ("shared", "process", "tcp"),
    "evaluator": ("shared", "process", "tcp"),
    "server": ("shared", "process", "tcp"),
    "distributed": ("distributed",),
    "rpc": ("rpc",),
    "ray": ("ray",),
}
"""What acts -> schemes. What torchrl has no scheme for is measured beside its queues."""

_CLASSES = {
    "shared": "SharedMem",
    "process": "MultiProcess",
    "tcp": "TCP",
    "distributed": "Distributed",
    "rpc": "RPC",
    "ray": "Ray",
}
_WARM_UP = 5
_DEADLINE = 60.0

Count: TypeAlias = tuple[int, int]
"""Frames whose weights were not those of the version that they claim, of how many."""


class _Policy(nn.Module):
    """A small policy that says which version acts, and carries as many parameters as asked for."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        share = max(1, parameters // 50)
        self.ballast = nn.ParameterList(torch.zeros(share) for _ in range(50 if parameters else 0))
        self.last = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """The action; and the first and the last parameter, before and after."""
        first = self.first.detach().clone()
        action = self.net(observation).argmax(-1)
        marks = torch.stack([first, self.last.detach().clone()])
        return action, marks.expand(*observation.shape[:-1], 2).clone()


def _make_env() -> Any:
    envs: Any = importlib.import_module("torchrl.envs")
    return envs.GymEnv("CartPole-v1", categorical_action_encoding=True)


class _PolicyFactory:
    def __init__(self, parameters: int) -> None:
        self.parameters = parameters

    def __call__(self) -> Any:
        modules: Any = importlib.import_module("tensordict.nn")
        policy = _Policy(self.parameters)
        return modules.TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "marks"])


def _count(marks: Tensor, claimed: Tensor) -> Count:
    return int((marks != claimed[..., None]).any(-1).sum()), claimed.numel()


@dataclass(frozen=True)
class _Case:
    """What a turn is about."""

    kind: str
    scheme: Any
    parameters: int
    frames: int

    def policy(self) -> Any:
        """A new one."""
        return _PolicyFactory(self.parameters)()


class _Host(ABC):
    """Who acts.

    Attributes:
        policy: the trainer's.
        seconds: of each update.
    """

    def __init__(self, case: _Case) -> None:
        self.policy = case.policy()
        self.seconds: list[float] = []

    @abstractmethod
    def batches(self) -> Iterator[Count]:
        """What has been acted, batch after batch."""

    def update(self) -> None:
        """The policy has changed."""
        self._timed(self._update)

    def _timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds.append(time.perf_counter() - before)
        return result

    @abstractmethod
    def _update(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """End whatever acts."""


class _Collector(_Host):
    """A collector of several workers."""

    def __init__(self, case: _Case, updates: int) -> None:
        super().__init__(case)
        self._collector = self._make(case, updates)

    def _make(self, case: _Case, updates: int) -> Any:
        collectors: Any = importlib.import_module("torchrl.collectors")
        common = {
            "frames_per_batch": case.frames,
            "total_frames": case.frames * (updates + _WARM_UP + 1),
            "weight_sync_schemes": {"policy": case.scheme},
        }
        if case.kind in ("sync", "async"):
            make = collectors.MultiSyncCollector if case.kind == "sync" else collectors.MultiAsyncCollector
            return make([_make_env] * 2, self.policy, track_policy_version=True, **common)
        far: Any = importlib.import_module("torchrl.collectors.distributed")
        common |= {
            "collector_class": collectors.Collector,
            "sync": False,
            "collector_kwargs": {"track_policy_version": True},
        }
        if case.kind == "ray":
            remote = {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}
            return far.RayCollector([_make_env] * 2, self.policy, remote_configs=remote, **common)
        if case.kind == "rpc":
            return far.RPCCollector([_make_env] * 2, self.policy, launcher="mp", **common)
        return far.DistributedCollector([_make_env] * 2, self.policy, launcher="mp", backend="gloo", **common)

    def batches(self) -> Iterator[Count]:
        """See :class:`_Host`."""
        for batch in self._collector:
            yield _count(batch["marks"], batch["next", "policy_version"])

    def _update(self) -> None:
        self._collector.update_policy_weights_()

    def close(self) -> None:
        """See :class:`_Host`."""
        self._collector.shutdown()


class _Evaluator(_Host):
    """An evaluator with a process of its own, which it updates by itself before each evaluation. Its frames
    claim nothing, so that only torn ones are counted."""

    def __init__(self, case: _Case) -> None:
        super().__init__(case)
        collectors: Any = importlib.import_module("torchrl.collectors")
        make = collectors.MultiSyncCollector
        before = make.update_policy_weights_
        make.update_policy_weights_ = lambda *args, **kwargs: self._timed(before, *args, **kwargs)
        self._found: list[Count] = []
        self._evaluator = collectors.Evaluator(
            _make_env,
            policy_factory=_PolicyFactory(case.parameters),
            num_trajectories=max(1, case.frames // 10),
            max_steps=200,
            backend="process",
            weight_sync_schemes={"policy": case.scheme},
            metrics_fn=self._look,
        )

    def _look(self, batch: Any) -> dict[str, float]:
        mask, marks = batch["collector", "mask"], batch["marks"]
        torn = (marks[..., 0] != marks[..., 1]) & mask.view(marks.shape[:-1])
        self._found.append((int(torn.sum()), int(mask.sum())))
        return {}

    def batches(self) -> Iterator[Count]:
        """See :class:`_Host`."""
        while True:
            self._evaluator.evaluate(weights=self.policy)
            yield self._found[-1]

    def update(self) -> None:
        """See :class:`_Host`; the evaluator does it."""

    def _update(self) -> None: ...

    def close(self) -> None:
        """See :class:`_Host`."""
        self._evaluator.shutdown()


class _Process(_Host):
    """Something in a process of its own that receives by a scheme."""

    def __init__(self, case: _Case) -> None:
        super().__init__(case)
        self._scheme = case.scheme
        context = multiprocessing.get_context("spawn")
        self._scheme.init_on_sender(
            model_id="policy", model=self.policy, devices=[torch.device("cpu")], ctx=context
        )
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_act, args=(case, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._scheme.connect()

    def batches(self) -> Iterator[Count]:
        """See :class:`_Host`."""
        while self._conn.poll(_DEADLINE):
            yield self._conn.recv()

    def _update(self) -> None:
        self._scheme.send(weights=self.policy)

    def close(self) -> None:
        """See :class:`_Host`."""
        self._conn.close()
        self._process.join(_DEADLINE)
        self._scheme.shutdown()


def _act(case: _Case, conn: Connection[Count, Any]) -> None:
    warnings.simplefilter("ignore")
    batches = _serve(case) if case.kind == "server" else _collect(case)
    try:
        for count in batches:
            conn.send(count)
    except OSError:  # the trainer has had enough
        os._exit(0)


def _collect(case: _Case) -> Iterator[Count]:
    collectors: Any = importlib.import_module("torchrl.collectors")
    collector = collectors.Collector(
        _make_env,
        case.policy(),
        frames_per_batch=case.frames,
        total_frames=-1,
        weight_recv_schemes={"policy": case.scheme},
        worker_idx=0,
        track_policy_version=True,
    )
    for batch in collector:
        yield _count(batch["marks"], batch["next", "policy_version"])


def _serve(case: _Case) -> Iterator[Count]:
    servers: Any = importlib.import_module("torchrl.modules.inference_server")
    data: Any = importlib.import_module("tensordict")
    server = servers.InferenceServer(case.policy(), servers.ThreadingTransport(), weight_sync=case.scheme)
    server.start()
    client = server.client()
    request = data.TensorDict({"observation": torch.randn(4)}, [])
    while True:
        answers = [client(request) for _ in range(case.frames)]
        marks = torch.stack([answer["marks"] for answer in answers])
        yield _count(marks, torch.stack([answer["policy_version"] for answer in answers]).view(-1))


@dataclass(frozen=True)
class Turn:
    """What one process found.

    Attributes:
        frames: per second, updates included.
        update: seconds of each update.
        wrong: frames whose weights were not those of the version that they claim, of ``total``.
        total: frames.
    """

    frames: float
    update: list[float]
    wrong: int
    total: int


def _host(case: _Case, updates: int) -> _Host:
    match case.kind:
        case "evaluator":
            return _Evaluator(case)
        case "single" | "server":
            return _Process(case)
    return _Collector(case, updates)


def _take_turn(kind: str, scheme: str, library: str, parameters: int, updates: int, frames: int) -> Turn:
    warnings.simplefilter("ignore")
    peers: Any = importlib.import_module("torchrl.weight_update")
    ours: Any = importlib.import_module("aiosync.sync")
    name = f"{_CLASSES[scheme]}WeightSyncScheme"
    made = getattr(ours if library == "aiosync" else peers, name, peers.MultiProcessWeightSyncScheme)()
    with ray_cluster(store=2 << 30) if kind == "ray" else nullcontext():
        host = _host(_Case(kind, made, parameters, frames), updates)
        wrong = total = begun = 0
        started = 0.0
        for number, count in enumerate(host.batches(), start=1):
            wrong, total = wrong + count[0], total + count[1]
            with torch.no_grad():
                host.policy.module.first.fill_(number)
                host.policy.module.last.fill_(number)
            host.update()
            if number == _WARM_UP:
                started, begun, total, wrong = time.perf_counter(), len(host.seconds), 0, 0
            if number == _WARM_UP + updates:
                break
        taken = time.perf_counter() - started
        host.close()
    return Turn(total / taken, host.seconds[begun:], wrong, total)


if __name__ == "__main__":
    _kind, _scheme, _library, *_numbers = sys.argv[1:]
    _parameters, _updates, _frames = map(int, _numbers)
    _turn = _take_turn(_kind, _scheme, _library, _parameters, _updates, _frames)
    sys.stdout.write(f"\n{json.dumps(asdict(_turn))}\n")
    sys.stdout.flush()
    os._exit(0)  # torchrl's threads and processes of torch.distributed would hold it up
