"""``aiosync bench --ray``: aiosync's Ray schemes beside torchrl's, in one cluster and in turn.

All times are until the new weights are in the models of the actors, which are idle otherwise. torchrl's
schemes are used as its collectors and its ``RayModuleTransform`` use them. aiosync's actors view the driver's
memory, as they do on its node; with ``--apart`` they are sent everything through the object store, as those
on other nodes. A version is put there once, whatever the number of actors: what the store says of itself is
shown: before, at most while versions follow each other, and after all was let go of.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from torch import nn

import aiosync
from aiosync._demo import ray_cluster
from benchmarks.links import save
from benchmarks.meters import Spread, spread, ticking
from benchmarks.models import MODELS, build_model, fill

__all__ = ["KINDS", "run"]

KINDS = ("actors", "modules")

WARM_UP = 4
"""Sends until the pages of slots and store have been touched."""

SENDS = 100
"""That follow each other, beside a ticker, before it is looked whether the store is as it was."""

MODEL_ID = "policy"
LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; times in milliseconds.

    Attributes:
        aiosync, torchrl: a send to all actors.
        stall: how late a 1 ms ticker beside aiosync's sends was.
        base, held, after: MiB in the store before, at most while versions follow each other, and after.
    """

    kind: str
    model: str
    actors: int
    parameters: int
    aiosync: Spread
    torchrl: Spread
    stall: Spread
    base: int
    pending: int
    after: int


class Holder:
    """Has a policy; by torchrl's words, a remote collector."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self.policy = build_model(MODELS[model])
        self.scheme: Any = None

    def ready(self) -> None:
        """It is."""

    def register(self, scheme: Any, worker_idx: int) -> None:
        """Be a receiver of torchrl's."""
        self.worker_idx = worker_idx
        self.scheme = scheme
        scheme.init_on_receiver(model_id=MODEL_ID, context=self, worker_idx=worker_idx)

    def _connect_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.connect(worker_idx=self.worker_idx)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        self.scheme.receive()


@dataclass(frozen=True, eq=False)
class _Collectors:
    """What torchrl's scheme knows its actors by."""

    remote_collectors: list[Any]
    policy: nn.Module

    @property
    def num_workers(self) -> int:
        """How many."""
        return len(self.remote_collectors)


class _Filler(nn.Module):
    """Nothing is computed with it."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = build_model(MODELS[model])
        self.in_keys, self.out_keys = ["observation"], ["action"]

    def forward(self, tensordict: Any) -> Any:
        return tensordict


def _used(ray: Any) -> int:
    """MiB in the store, as Ray itself says, about a second later."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return int((total["object_store_memory"] - free.get("object_store_memory", 0)) / (1 << 20) + 0.5)


async def _settled(ray: Any, expected: int) -> int:
    """The same, when it is as expected, or has not become so: Ray lets go a little later."""
    found = _used(ray)
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            while found != expected:
                await asyncio.sleep(0.2)
                found = _used(ray)
    return found


def _their_scheme(ray: Any, model: nn.Module, name: str, count: int) -> tuple[Any, list[Any]]:
    library: Any = importlib.import_module("torchrl.weight_update")
    actors = [ray.remote(num_cpus=0)(Holder).remote(name) for _ in range(count)]
    scheme = library.RayWeightSyncScheme()
    context = _Collectors(actors, model)
    scheme.init_on_sender(model_id=MODEL_ID, context=context)
    scheme.kept = context  # it has a weak reference
    ray.get([actor.register.remote(scheme, index) for index, actor in enumerate(actors)])
    scheme._manage_receiver_connect = True
    scheme.connect()
    return scheme, actors


async def _actors(ray: Any, name: str, count: int, rounds: int, apart: bool) -> Figures:
    model = build_model(MODELS[name])
    base = _used(ray)
    theirs, their_actors = await asyncio.to_thread(_their_scheme, ray, model, name, count)
    our_actors = [ray.remote(num_cpus=0)(Holder).remote(name) for _ in range(count)]
    ours = aiosync.RayWeightSyncScheme(timeout=LIMIT, share_memory=not apart)
    ours.init_on_sender(model_id=MODEL_ID, model=model, actors=our_actors)
    await ours.connect()
    return await _race(
        ray, ("actors", name), model, ours, theirs, {"weights": model}, rounds, base, apart,
        [*our_actors, *their_actors],
    )  # fmt: skip


async def _modules(ray: Any, name: str, count: int, rounds: int, apart: bool) -> Figures:
    library: Any = importlib.import_module("torchrl.weight_update")
    transforms: Any = importlib.import_module("torchrl.envs.transforms.module")
    model = _Filler(name)
    base = _used(ray)

    def make(scheme: Any = None) -> Any:
        more = {} if scheme is None else {"weight_sync_scheme": scheme}
        return transforms.RayModuleTransform(module=_Filler(name), num_cpus=0, **more)

    theirs = library.RayModuleTransformScheme()
    their_transform = await asyncio.to_thread(make, theirs)
    our_transforms = [await asyncio.to_thread(make) for _ in range(count)]
    ours = aiosync.RayModuleTransformScheme(timeout=LIMIT, share_memory=not apart)
    ours.init_on_sender(model=model, actors=our_transforms)
    await ours.connect()
    weights = TensorDict.from_module(model).data
    return await _race(
        ray, ("modules", name), model, ours, theirs, {"weights": weights}, rounds, base, apart,
        [transform._actor for transform in (*our_transforms, their_transform)],
    )  # fmt: skip


async def _race(
    ray: Any, what: tuple[str, str], model: nn.Module, ours: Any, theirs: Any,
    given: dict[str, Any], rounds: int, base: int, apart: bool,
    actors: list[Any],
) -> Figures:  # fmt: skip
    times: dict[str, list[float]] = {"aiosync": [], "torchrl": []}
    for version in range(WARM_UP + rounds):
        fill(model, float(version))
        begun = time.perf_counter()
        await ours.send()
        times["aiosync"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        theirs.send(**given)
        times["torchrl"].append(time.perf_counter() - begun)
    pending = 0
    async with ticking() as stalls:
        for sent in range(SENDS):
            await ours.send()
            if apart and sent % 10 == 0:
                pending = max(pending, await asyncio.to_thread(_used, ray))
    nbytes = sum(p.nbytes for p in model.parameters())
    pending = max(pending, await _settled(ray, base + apart * round(nbytes / (1 << 20))))
    count = len(ours.workers)
    await ours.aclose()
    theirs.shutdown()
    for actor in actors:
        ray.kill(actor)
    ours_ms, theirs_ms = (_of(times[contender][WARM_UP:]) for contender in ("aiosync", "torchrl"))
    after = await _settled(ray, base)
    return Figures(*what, count, nbytes // 4, ours_ms, theirs_ms, _of(stalls), base, pending, after)


def _of(samples: list[float]) -> Spread:
    found = spread(samples)
    assert found is not None
    return found


def run(
    kinds: Sequence[str],
    models: Sequence[str],
    actors: list[int],
    rounds: int,
    out: Path | None,
    *,
    apart: bool,
) -> None:
    """Measure, print a table, write JSON.

    Args:
        kinds: of :data:`KINDS`.
        models: names of :data:`~benchmarks.models.MODELS`.
        actors: how many, each; torchrl's transform is one.
        rounds: timed sends of each contender; 0: as suits the model.
        out: where the JSON goes.
        apart: whether aiosync uses the object store also for actors on this node.
    """
    how = ", as if on other nodes" if apart else ""
    table = Table(title="aiosync beside torchrl on Ray (medians; least and most)" + how)
    columns = "actors of", "model", "count", "aiosync, ms", "torchrl, ms", "times", "stall p99, ms"
    for column in (*columns, "store before", "at most", "after"):
        table.add_column(column, justify="right")
    found = []
    try:
        for kind, name, count in itertools.product(kinds, models, actors):
            if kind == "modules" and count > 1:
                continue
            measure = _actors if kind == "actors" else _modules
            with ray_cluster(store=6 << 30):
                ray: Any = importlib.import_module("ray")
                figures = asyncio.run(measure(ray, name, count, rounds or MODELS[name].rounds, apart))
            found.append(asdict(figures))
            ours, theirs = figures.aiosync, figures.torchrl
            table.add_row(
                kind,
                f"{name}, {figures.parameters / 1e6:.3g} M",
                str(count),
                *(f"{x.median:.3g} ({x.min:.3g}-{x.max:.3g})" for x in (ours, theirs)),
                f"{theirs.median / ours.median:.1f}",
                f"{figures.stall.p99:.1f}",
                *(f"{mib} MiB" for mib in (figures.base, figures.pending, figures.after)),
            )
    finally:  # many actors of a large model may be more than the machine has memory for
        Console().print(table)
        save(out, "ray", found)
