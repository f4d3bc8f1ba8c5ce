"""Actors become workers, and what moves their weights."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiosync import (
    InvalidArgumentError,
    NotConnectedError,
    NotInitializedError,
    RemoteApplyError,
    WorkerLostError,
)
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.transfer import object_store as stored
from aiosync.transports.ray import object_store as ray_objects
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.models import Uniform, fill
from tests.ray.actors import AsyncHolder, Collector, Holder, Module, Roller
from tests.ray.hosts import keep, start, start_or_reuse

ray = pytest.importorskip("ray")

LARGE = 1 << 18
PLANES: dict[str, dict[str, Any]] = {
    "near": {"share_memory": True},
    "object_store": {},
    "tcp": {"data_plane": "tcp"},
    "distributed": {"data_plane": "distributed"},
}
"""As on the driver's node; and as on others."""


REUSED = Holder, AsyncHolder, Collector
"""Those whose attributes are all of their state."""


@asynccontextmanager
async def sender_to(
    kind: type[Any] = Holder, count: int = 2, size: int = 16, max_restarts: int = 0, **options: Any
) -> AsyncIterator[tuple[RayWeightSyncScheme, Uniform, list[Any]]]:
    """A connected sender, and actors."""
    reused = kind in REUSED and not max_restarts
    if reused:
        actors = start_or_reuse(kind, count, size)
    else:
        actors = start(kind, count, size, max_restarts=max_restarts)
    model = Uniform(size=size)
    scheme = RayWeightSyncScheme(timeout=PATIENCE, **{"share_memory": False, **options})
    scheme.init_on_sender(model_id="policy", model=model, actors=actors)
    try:
        await within(scheme.connect())
        yield scheme, model, actors
    except BaseException:
        reused = False
        raise
    finally:
        await within(scheme.aclose())
        if reused:
            keep(kind, actors)
        else:
            for actor in actors:
                ray.kill(actor)


async def values(actors: list[Any]) -> list[float]:
    return list(await within(asyncio.gather(*(actor.value.remote() for actor in actors))))


@pytest.mark.parametrize(
    ("kind", "plane", "size"),
    [
        (Holder, "object_store", 16),
        *((kind, plane, LARGE) for kind in (Holder, AsyncHolder) for plane in PLANES),
    ],
)
async def test_actors_have_what_was_sent(kind: type[Any], plane: str, size: int) -> None:
    async with sender_to(kind, size=size, **PLANES[plane]) as (scheme, model, actors):
        assert await values(actors) == [0, 0]
        for version in (1, 2, 3):
            fill(model, version)
            assert (await scheme.send()).ok
            assert await values(actors) == [version] * 2


async def test_objects_that_ray_moves_with_nixl() -> None:
    pytest.importorskip("nixl", reason="NVIDIA's nixl is not installed")
    actors = [ray.remote(num_cpus=0, enable_tensor_transport=True)(Holder).remote(LARGE) for _ in range(2)]
    model = Uniform(size=LARGE)
    scheme = RayWeightSyncScheme(timeout=PATIENCE, share_memory=False, tensor_transport="nixl")
    scheme.init_on_sender(model_id="policy", model=model, actors=actors)
    async with scheme:
        for version in (1, 2, 3):
            fill(model, version)
            assert (await scheme.send()).ok
            assert await values(actors) == [version] * 2
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize("given", ["source_model", "remote_collectors", "actor_refs"])
async def test_other_names_of_actors_and_models(given: str) -> None:
    actors, model = start_or_reuse(Holder, 2, 16), Uniform(size=16)
    fill(model, 5)
    context = SimpleNamespace(policy=model, num_collectors=2, **{given: actors})
    scheme = RayWeightSyncScheme("state_dict", timeout=PATIENCE)
    if given == "source_model":
        scheme.init_on_sender("policy", actors=actors, source_model=model, num_collectors=2)
    else:
        scheme.init_on_sender("policy", context)
    async with scheme:
        assert await values(actors) == [5, 5]
    keep(Holder, actors)


async def test_no_forward_pass_is_torn() -> None:
    async with sender_to(count=1, size=LARGE) as (scheme, model, actors):
        passing = asyncio.wrap_future(actors[0].torn.remote(2000).future())
        version = 0
        while not passing.done():
            version += 1
            fill(model, version)
            await scheme.send(wait=False)
            await asyncio.sleep(0)
        assert await passing == 0
        assert version > 3


async def test_collectors_are_told_and_may_refuse() -> None:
    async with sender_to(Collector) as (scheme, model, actors):
        fill(model, 13)
        with pytest.raises(RemoteApplyError, match="thirteen is refused") as caught:
            await scheme.send()
        assert caught.value.remote_type == "ArithmeticError"
        assert await values(actors) == [0, 0]
        fill(model, 2)
        assert (await scheme.send()).ok
        assert await actors[0].heard.remote() == [0, 2]


async def test_a_killed_actor() -> None:
    async with sender_to() as (scheme, model, actors):
        os.kill(await actors[1].pid.remote(), signal.SIGKILL)
        fill(model, 1)
        with pytest.raises(WorkerLostError, match="worker 1 lost"):
            await scheme.send()
        assert await values(actors[:1]) == [1]


async def test_an_actor_that_ray_starts_again() -> None:
    async with sender_to(max_restarts=1) as (scheme, model, actors):
        os.kill(await actors[1].pid.remote(), signal.SIGKILL)
        fill(model, 1)
        with pytest.raises(WorkerLostError, match="worker 1 lost"):
            await scheme.send()
        await eventually(lambda: scheme.workers[1].version == 1, "it is back, with the newest version")
        fill(model, 2)
        assert (await scheme.send()).ok
        assert await values(actors) == [2, 2]


def used() -> float:
    """Bytes in the object store, as Ray says about a second later."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return float(total["object_store_memory"] - free.get("object_store_memory", 0))


async def test_killed_during_a_send() -> None:
    async with sender_to(count=3, size=LARGE, max_restarts=1) as (scheme, model, actors):
        for version in (1, 2, 3):
            fill(model, version)
            pid = await actors[1].pid.remote()
            sending = asyncio.create_task(scheme.send())
            await asyncio.sleep(0)
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            try:
                report = await sending
            except WorkerLostError as exc:
                assert exc.workers == (1,)
                assert exc.report is not None
                report = exc.report
            assert time.monotonic() - begun < PATIENCE / 2  # long before the scheme's own deadline
            assert {w for w, r in report.workers.items() if r.status == "applied"} >= {0, 2}
            assert await values([actors[0], actors[2]]) == [version] * 2
            if version == 1:
                await eventually(lambda: scheme.workers[1].version == 1, "it is back")
                continue
            (actors[1],) = start(Holder, 1, LARGE)  # that one does not come back
            assert await within(scheme.add_worker(actors[1], 1)) == 1
            assert await values(actors) == [version] * 3


async def test_an_actor_more() -> None:
    async with sender_to() as (scheme, model, actors):
        fill(model, 1)
        await scheme.send()
        (more,) = start(Holder, 1, 16)
        assert await within(scheme.add_worker(more)) == 2
        assert await values([more]) == [1]
        fill(model, 2)
        report = await scheme.send()
        assert sorted(report.workers) == [0, 1, 2]
        assert await values([*actors, more]) == [2] * 3
        assert (await scheme.send(worker_ids=[2])).ok
        with pytest.raises(InvalidArgumentError, match="worker 2 is connected"):
            await scheme.add_worker(more, 2)
        wrong = ray.remote(num_cpus=0)(Module).remote(Uniform())
        with pytest.raises(RemoteApplyError, match="policy"):
            await scheme.add_worker(wrong)
        fill(model, 3)
        assert sorted((await scheme.send()).workers) == [0, 1, 2]
        ray.kill(more)
        ray.kill(wrong)


@pytest.mark.parametrize("plane", PLANES)
async def test_an_actor_that_is_busy_is_sent_updates_all_the_same(plane: str) -> None:
    async with sender_to(count=1, **PLANES[plane]) as (scheme, model, actors):
        seen = actors[0].watch.remote(3.0)
        for version in (1, 2, 3):
            fill(model, version)
            assert (await within(scheme.send())).ok
        assert await seen == 3


async def test_an_actor_with_the_mixin() -> None:
    async with sender_to(Roller, size=LARGE) as (scheme, model, actors):
        assert await actors[0].version.remote() == 0
        rolling = [asyncio.wrap_future(actor.rollout.remote(100, 3).future()) for actor in actors]
        version = 0
        async with asyncio.timeout(PATIENCE):
            while not all(future.done() for future in rolling):
                version += 1
                fill(model, version)
                await scheme.send()
        for future in rolling:
            assert all(version == before == after for version, before, after in await future)
        assert await actors[0].version.remote() == version
        await scheme.aclose()
        # The model keeps its version, and can still be pinned.
        assert await actors[0].pin.remote() == version


async def test_the_mixin_before_there_is_a_sender() -> None:
    (roller,) = start(Roller, 1, 16)
    assert await roller.version.remote() == -1
    with pytest.raises(NotConnectedError, match="no sender of 'policy'"):
        await roller.pin.remote()
    ray.kill(roller)


async def test_a_sender_that_is_quicker_than_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ray_objects.put

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return quick(*args)

    monkeypatch.setattr(stored, "put", slow)
    async with sender_to(Holder, size=LARGE, sync=False) as (scheme, model, actors):
        until, versions = time.monotonic() + 3.0, set()
        while time.monotonic() < until:
            fill(model, scheme.version + 1)
            await scheme.send()
            versions.add(scheme.workers[0].version)
        assert len(versions) > 2  # and not only the first and the last
        await scheme.wait_ack()
        assert await values(actors) == [scheme.version] * 2


async def test_a_scheme_that_is_used_again() -> None:
    model, actors = Uniform(size=LARGE), start(Roller, 1, LARGE) + start(Holder, 1, LARGE)
    scheme = RayWeightSyncScheme(timeout=PATIENCE)
    for version in range(4):
        fill(model, version)
        scheme.init_on_sender(model=model, actors=actors)
        async with scheme:
            assert await values(actors) == [version] * 2
    for actor in actors:
        ray.kill(actor)


async def test_objects_are_let_go() -> None:
    await eventually(lambda: used() == 0, "the store is empty")
    async with sender_to(size=LARGE) as (scheme, model, actors):
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        for version in range(100):
            fill(model, version)
            assert (await scheme.send()).ok
        await eventually(lambda: used() < 2 * nbytes, "at most the version in service is there")
        assert await values(actors) == [99, 99]
    await eventually(lambda: used() == 0, "the store is empty again")


def test_a_store_that_is_small_for_the_versions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aiosync")
    ray_objects.warn_if_tight(100 << 20)
    assert not caplog.records
    ray_objects.warn_if_tight(200 << 20)
    assert "object_store_memory=1258291200" in caplog.text


def test_an_actor_without_such_a_model() -> None:
    async def run() -> None:
        (actor,) = start(Holder, 1, 16)
        scheme = RayWeightSyncScheme(timeout=PATIENCE)
        scheme.init_on_sender(model_id="critic", model=Uniform(), actors=[actor])
        with pytest.raises(RemoteApplyError, match="critic"):
            await scheme.connect()
        await scheme.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_transport": "rdma"}, "expected 'object_store' or 'nixl'"),
        ({"data_plane": "pigeons"}, "expected 'object_store', 'tcp' or 'distributed'"),
        ({"tensor_transport": "nixl"}, "pip install nixl"),
        ({"tensor_transport": "nixl", "data_plane": "tcp"}, "makes none"),
        ({"backend": "nccl", "data_plane": "tcp"}, "needs data_plane='distributed'"),
        ({"backend": "mpi"}, "expected 'gloo' or 'nccl'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RayWeightSyncScheme(**arguments)


def test_what_is_no_actor() -> None:
    with pytest.raises(InvalidArgumentError, match="expected handles of Ray actors"):
        RayWeightSyncScheme().init_on_sender(model=Uniform(), actors=["worker 0"])


def test_a_worker_that_was_told_nothing() -> None:
    with pytest.raises(NotInitializedError, match="call init_on_sender"):
        RayWeightSyncScheme().create_transport(worker_idx=0)
