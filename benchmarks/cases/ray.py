"""``aiosync bench ray``: aiosync's Ray schemes beside torchrl's, in one cluster and in turn.

All times are until the new weights are in the models of the actors, which are idle otherwise. torchrl's
schemes are used as its collectors and its ``RayModuleTransform`` use them. aiosync's actors view the driver's
memory, as they do on its node; with ``--apart`` they are sent everything through the object store, as those
on other nodes. A version is put there once, whatever the number of actors. The table has what the store
holds: before, at most while versions follow each other, and after all was released.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from itertools import product
from typing import Annotated, Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

import aiosync
from aiosync._demo import ray_cluster
from benchmarks.harness import options
from benchmarks.harness.meters import summary, ticking, times
from benchmarks.harness.models import MODELS, build_model, fill
from benchmarks.harness.results import Stall
from benchmarks.harness.tables import Row, report

SCHEMES = options.Names(("actors", "modules"))

WARM_UP = 4  # sends until the pages of slots and store have been touched
SENDS = 100  # that follow each other, beside a ticker, before the store is looked at again
MODEL_ID = "policy"
LIMIT = 300.0


class _Holder:
    """Holds a policy: in torchrl's words, a remote collector."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self.policy = build_model(MODELS[model])
        self.scheme: Any = None

    def register(self, scheme: Any, worker_idx: int) -> None:
        """Receive by torchrl's scheme."""
        self.worker_idx = worker_idx
        self.scheme = scheme
        scheme.init_on_receiver(model_id=MODEL_ID, context=self, worker_idx=worker_idx)

    def _connect_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.connect(worker_idx=self.worker_idx)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.receive()


class _Collectors:
    """Torchrl's scheme finds its actors here."""

    def __init__(self, actors: list[Any], policy: nn.Module) -> None:
        self.remote_collectors = actors
        self.policy = policy
        self.num_workers = len(actors)


class _Filler(nn.Module):
    """A module for torchrl's transform. Nothing is computed with it."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = build_model(MODELS[model])
        self.in_keys, self.out_keys = ["observation"], ["action"]

    def forward(self, tensordict: Any) -> Any:
        return tensordict


class _Pair(NamedTuple):
    """aiosync's scheme and torchrl's, for the same model, and their actors."""

    model: nn.Module
    ours: Any
    theirs: Any
    weights: Any  # what torchrl's scheme sends
    actors: list[Any]


def _actors(ray: Any, name: str, count: int, given: dict[str, Any]) -> _Pair:
    model = build_model(MODELS[name])
    ours, theirs = ([ray.remote(num_cpus=0)(_Holder).remote(name) for _ in range(count)] for _ in range(2))
    peer = importlib.import_module("torchrl.weight_update").RayWeightSyncScheme()
    peer.kept = _Collectors(theirs, model)  # it has a weak reference
    peer.init_on_sender(model_id=MODEL_ID, context=peer.kept)
    ray.get([actor.register.remote(peer, index) for index, actor in enumerate(theirs)])
    peer._manage_receiver_connect = True
    peer.connect()
    scheme = aiosync.RayWeightSyncScheme(**given)
    scheme.init_on_sender(model_id=MODEL_ID, model=model, actors=ours)
    return _Pair(model, scheme, peer, model, [*ours, *theirs])


def _modules(name: str, count: int, given: dict[str, Any]) -> _Pair:
    make = importlib.import_module("torchrl.envs.transforms.module").RayModuleTransform
    peer = importlib.import_module("torchrl.weight_update").RayModuleTransformScheme()
    theirs = make(module=_Filler(name), num_cpus=0, weight_sync_scheme=peer)
    ours = [make(module=_Filler(name), num_cpus=0) for _ in range(count)]
    model = _Filler(name)
    scheme = aiosync.RayModuleTransformScheme(**given)
    scheme.init_on_sender(model=model, actors=ours)
    actors = [transform._actor for transform in (*ours, theirs)]
    return _Pair(model, scheme, peer, TensorDict.from_module(model).data, actors)


def _used(ray: Any) -> int:
    """MiB in the store, as Ray itself says, about a second later."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return int((total["object_store_memory"] - free.get("object_store_memory", 0)) / (1 << 20) + 0.5)


async def _settled(ray: Any, expected: int) -> int:
    """MiB in the store once that is ``expected``, or after 20 s: Ray releases objects a little later."""
    for _ in range(100):
        if _used(ray) == expected:
            break
        await asyncio.sleep(0.2)
    return _used(ray)


async def _measure(ray: Any, scheme: str, name: str, count: int, rounds: int, apart: bool) -> Row:
    """Both in turn; then sends beside a ticker, and what the store holds."""
    given: dict[str, Any] = {"timeout": LIMIT, "share_memory": not apart}
    base, held = _used(ray), 0
    pair = _modules(name, count, given) if scheme == "modules" else _actors(ray, name, count, given)
    await pair.ours.connect()
    ours: list[float] = []
    theirs: list[float] = []
    for version in range(WARM_UP + rounds):
        fill(pair.model, float(version))
        begun = time.perf_counter()
        await pair.ours.send()
        ended = time.perf_counter()
        pair.theirs.send(weights=pair.weights)
        ours.append(ended - begun)
        theirs.append(time.perf_counter() - ended)
    async with ticking() as late:
        for sent in range(SENDS):
            await pair.ours.send()
            if apart and sent % 10 == 0:
                held = max(held, await asyncio.to_thread(_used, ray))
    nbytes = sum(p.nbytes for p in pair.model.parameters())
    held = max(held, await _settled(ray, base + apart * round(nbytes / (1 << 20))))
    await pair.ours.aclose()
    pair.theirs.shutdown()
    for actor in pair.actors:
        ray.kill(actor)
    sends, peers = summary(ours[WARM_UP:]), summary(theirs[WARM_UP:])
    return {
        "actors of": scheme,
        "model": f"{name}, {nbytes / 4e6:.3g} M",
        "count": count,
        "aiosync, ms": sends,
        "torchrl, ms": peers,
        "times": times(peers, sends),
        "stall p99, ms": Stall(summary(late)),
        "store before, MiB": base,
        "at most, MiB": held,
        "after, MiB": await _settled(ray, base),
    }


def run(
    models: options.Models = options.ALL_MODELS,
    workers: options.Workers = options.UP_TO_FOUR,
    schemes: Annotated[options.Names, options.names_of(SCHEMES)] = SCHEMES,
    rounds: options.Rounds = 0,
    apart: options.Apart = False,
    json: options.Json = None,
) -> None:
    """Ray actors, and models inside them, beside torchrl's schemes."""
    how = ", as if on other nodes" if apart else ""
    title = "aiosync beside torchrl on Ray: milliseconds, median (least - most)" + how
    with report(title, "ray", json) as rows:
        for scheme, name, count in product(schemes, models, workers):
            if scheme == "modules" and count > 1:
                continue  # torchrl's transform is one
            with ray_cluster(store=6 << 30):
                ray: Any = importlib.import_module("ray")
                timed = rounds or MODELS[name].rounds
                rows.append(asyncio.run(_measure(ray, scheme, name, count, timed, apart)))
