"""``aiosync bench network``, ``distributed`` and ``ray``: schemes that also work between machines.

All times are until the new weights are in the workers' models. torchrl's schemes are used as its collectors
and its ``RayModuleTransform`` use them; the bare contenders are in :mod:`benchmarks.contenders.bare`.

aiosync's workers view the sender's memory, as they do on one machine; ``--apart`` sends them everything
through process groups or Ray's object store, as between machines. With ``--acting`` workers roll out a small
policy as fast as they can, on their event loop or, torchrl's, in their main thread; the other contenders'
workers are stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch._C._distributed_c10d import TCPStore

import aiosync
from aiosync._demo import ray_cluster
from benchmarks.contenders import MODEL_ID, Setup
from benchmarks.harness import options
from benchmarks.harness.comparison import compare, measure, take_turns
from benchmarks.harness.meters import spread, summary, ticking, times
from benchmarks.harness.model_specs import MODELS, ModelSpec
from benchmarks.harness.models import build_model, fill, sizes
from benchmarks.harness.results import Row, Stall, report, say

SIZES = options.Numbers((256, 1024))
LINKS = options.Names(("tcp", "unix", "tls"))
SCHEMES = options.Names(("distributed", "rpc"))
RAY_SCHEMES = options.Names(("actors", "modules"))
WARM_UP = 2  # turns that do not count
DEADLINE = 300.0
STALL_SENDS, SUSPENDED_SENDS = 5, 8
STALL_SECONDS = 3.0  # for so long sends follow each other beside tickers: a percentile takes many ticks
RAY_WARM_UP = 4  # sends until the pages of slots and store have been touched
RAY_SENDS = 100  # that follow each other, beside a ticker, before the store is looked at again


def network(
    mib: Annotated[options.Numbers, options.numbers("Model sizes in MiB.")] = SIZES,
    workers: options.Workers = options.UP_TO_FOUR,
    links: Annotated[options.Names, options.names_of(LINKS)] = LINKS,
    rounds: Annotated[int, typer.Option(min=1, help="Timed sends of each.")] = 9,
    json: options.Json = None,
) -> None:
    """TCP, Unix sockets and TLS beside one blocking socket."""
    title = "aiosync over sockets, beside one blocking socket: milliseconds, median (least - most)"
    with report(title, "network", json) as rows:
        for link, size, count in product(links, mib, workers):
            say(f"--- {link}, {size} MiB, workers: {count}")
            with tempfile.TemporaryDirectory(prefix="aiosync-bench-") as folder:
                rows.append(asyncio.run(_measure_link(link, size, count, rounds, Path(folder))))


async def _measure_link(link: str, mib: int, workers: int, rounds: int, folder: Path) -> Row:
    tls = _certificates(folder) if link == "tls" else None
    unix, model = link == "unix", ModelSpec(f"{mib} MiB", mib=mib)
    given: dict[str, Any] = {"address": f"unix://{folder}/ours" if unix else "tcp://127.0.0.1:0", "tls": tls}
    ours = Setup("aiosync", "tcp", model, workers, ("still",), options=given)
    given = {"address": f"{folder}/bare" if unix else ("127.0.0.1", 0), "tls": tls}
    blocking = Setup("sockets", link, model, 1, ("still",), options=given)
    async with compare(DEADLINE, ours, blocking) as entries:
        await take_turns(entries, rounds, warm_up=WARM_UP)
        # After the turns: tickers would take processor time from one side of the comparison only.
        await measure("stall", entries[:1], sends=STALL_SENDS)
        await measure("counters", entries[:1])
        if workers > 1:
            await measure("suspended", entries[:1], sends=SUSPENDED_SENDS)
    case, limit = (entry.finish() for entry in entries)
    faster, stopped = times(limit.send, case.send), case.suspended
    return {
        "link": link, "MiB": mib, "workers": workers,
        "send, ms": case.outcome,
        "blocking, ms": limit.outcome,
        "ratio": workers * faster if faster else None,  # of bytes per second to all workers
        "stall p99, ms": case.stall,
        "slots, models": case.counters.get("memory", 0) / (mib << 20),
        "one stopped: slots, models": stopped["memory"] / (mib << 20) if stopped else None,
        "one stopped: send, ms": stopped.get("send"),
    }  # fmt: skip


def _certificates(folder: Path) -> aiosync.TLSConfig:
    """Certificates for localhost, in ``folder``."""
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    return aiosync.TLSConfig(str(folder / "own.pem"), cafile=str(folder / "ca.pem"))


def distributed(
    models: options.Models = options.ALL_MODELS,
    workers: options.Workers = options.UP_TO_FOUR,
    schemes: Annotated[options.Names, options.names_of(SCHEMES)] = SCHEMES,
    rounds: options.Rounds = 0,
    acting: Annotated[bool, typer.Option("--acting", help="Workers roll out meanwhile.")] = False,
    apart: options.Apart = False,
    json: options.Json = None,
) -> None:
    """torch.distributed and torch RPC, beside torchrl's schemes and bare gloo."""
    how = (", workers act" if acting else ", workers are idle") + (", as if apart" if apart else "")
    title = "aiosync beside torchrl and one bare gloo send: milliseconds, median (least - most)" + how
    with report(title, "distributed", json) as rows:
        for scheme, model, count in product(schemes, models, workers):
            say(f"--- {scheme}, {model}, workers: {count}")
            # One send in a turn, also of the tiny model: each contender's wake-up counts.
            spec = replace(MODELS[model], turn=1)
            base = Setup("", scheme, spec, count, ("known",), options={"share_memory": not apart})
            rows.append(asyncio.run(_measure_groups(base, rounds or MODELS[model].rounds, acting)))


async def _measure_groups(base: Setup, rounds: int, acting: bool) -> Row:
    setups: list[Setup] = []
    stores: list[Any] = []  # each ends with its last reference
    with tempfile.TemporaryDirectory(prefix="aiosync-bench-") as folder:
        for name in ("aiosync", "torchrl", "gloo"):
            extras = {"rpc": f"{folder}/{name}"} if base.scheme == "rpc" and name != "gloo" else {}
            if name != "aiosync":
                stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
                extras["port"] = stores[-1].port
            workers = 1 if name == "gloo" else base.workers
            setups.append(replace(base, contender=name, workers=workers, extras=extras))
        async with compare(DEADLINE, *setups) as entries:
            if acting:
                await measure("acting", entries[:2])
            await take_turns(entries, rounds, warm_up=WARM_UP, alone=acting)
            await measure("stall", entries[:1], seconds=STALL_SECONDS)
    case, other, gloo = (entry.finish() for entry in entries)
    return {
        "scheme": base.scheme, "model": _with_size(base.model), "workers": base.workers,
        "aiosync, ms": case.outcome,
        "torchrl, ms": other.outcome,
        "times": times(other.send, case.send),
        "gloo, ms": gloo.outcome,
        "of gloo": times(gloo.send, case.send),
        "stall p99, ms": case.stall,
    }  # fmt: skip


def _with_size(spec: ModelSpec) -> str:
    return f"{spec.name}, {sizes(spec)['params'] / 1e6:.3g} M"


def ray(
    models: options.Models = options.ALL_MODELS,
    workers: options.Workers = options.UP_TO_FOUR,
    schemes: Annotated[options.Names, options.names_of(RAY_SCHEMES)] = RAY_SCHEMES,
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
                timed = rounds or MODELS[name].rounds
                rows.append(asyncio.run(_measure_actors(scheme, MODELS[name], count, timed, apart)))


async def _measure_actors(kind: str, spec: ModelSpec, count: int, rounds: int, apart: bool) -> Row:
    """Both in turn; then sends beside a ticker, and what the store holds: before, at most, and after."""
    before = held = _store_used()
    make = _modules if kind == "modules" else _actors
    model, scheme, peer, weights, actors = make(spec, count, timeout=DEADLINE, share_memory=not apart)
    await scheme.connect()
    seconds: list[tuple[float, float]] = []
    for version in range(RAY_WARM_UP + rounds):
        fill(model, float(version))
        begun = time.perf_counter()
        await scheme.send()
        ended = time.perf_counter()
        peer.send(weights=weights)
        seconds.append((ended - begun, time.perf_counter() - ended))
    async with ticking() as late:
        for sent in range(RAY_SENDS):
            await scheme.send()
            if apart and sent % 10 == 0:
                held = max(held, await asyncio.to_thread(_store_used))
    # A version is put there once, whatever the number of actors.
    held = max(held, await _settled(before + apart * round(sizes(spec)["nbytes"] / (1 << 20))))
    await scheme.aclose()
    peer.shutdown()
    for actor in actors:
        importlib.import_module("ray").kill(actor)
    ours, theirs = (summary(each) for each in zip(*seconds[RAY_WARM_UP:], strict=True))
    return {
        "actors of": kind, "model": _with_size(spec), "count": count,
        "aiosync, ms": ours,
        "torchrl, ms": theirs,
        "times": times(theirs, ours),
        "stall p99, ms": Stall(spread(late)),
        "store before, MiB": before, "at most, MiB": held, "after, MiB": await _settled(before),
    }  # fmt: skip


def _actors(spec: ModelSpec, count: int, **given: Any) -> Any:
    """A model, aiosync's scheme and torchrl's for it, what torchrl's sends, and the actors of both."""
    from benchmarks.contenders.torchrl import Holder

    ray: Any = importlib.import_module("ray")
    ours, theirs = ([ray.remote(num_cpus=0)(Holder).remote(spec) for _ in range(count)] for _ in range(2))
    holder: Any = Holder(build_model(spec))
    holder.remote_collectors, holder.num_workers = theirs, count
    peer = importlib.import_module("torchrl.weight_update").RayWeightSyncScheme()
    peer.kept = holder  # it has a weak reference
    peer.init_on_sender(model_id=MODEL_ID, context=holder)
    ray.get([actor.register.remote(peer, index) for index, actor in enumerate(theirs)])
    peer._manage_receiver_connect = True
    peer.connect()
    scheme = aiosync.RayWeightSyncScheme(**given)
    scheme.init_on_sender(model_id=MODEL_ID, model=holder.policy, actors=ours)
    return holder.policy, scheme, peer, holder.policy, [*ours, *theirs]


def _modules(spec: ModelSpec, count: int, **given: Any) -> Any:
    make = importlib.import_module("torchrl.envs.transforms.module").RayModuleTransform
    peer = importlib.import_module("torchrl.weight_update").RayModuleTransformScheme()
    keys = ["observation"], ["action"]
    theirs = make(module=TensorDictModule(build_model(spec), *keys), num_cpus=0, weight_sync_scheme=peer)
    ours = [make(module=TensorDictModule(build_model(spec), *keys), num_cpus=0) for _ in range(count)]
    model = TensorDictModule(build_model(spec), *keys)
    scheme = aiosync.RayModuleTransformScheme(**given)
    scheme.init_on_sender(model=model, actors=ours)
    actors = [transform._actor for transform in (*ours, theirs)]
    return model, scheme, peer, TensorDict.from_module(model).data, actors


def _store_used() -> int:
    """MiB in the store, as Ray itself says, about a second later."""
    ray: Any = importlib.import_module("ray")
    total, free = ray.cluster_resources(), ray.available_resources()
    return int((total["object_store_memory"] - free.get("object_store_memory", 0)) / (1 << 20) + 0.5)


async def _settled(expected: int) -> int:
    """MiB in the store once that is ``expected``, or after 20 s: Ray releases objects a little later."""
    for _ in range(100):
        if _store_used() == expected:
            break
        await asyncio.sleep(0.2)
    return _store_used()
