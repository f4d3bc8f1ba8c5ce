"""Collectors whose workers are actors."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from aiosync import InvalidArgumentError, NotInitializedError, WorkerLostError
from aiosync.collectors import MultiCollector
from tests.collectors.kit import ENVS, check, workers_of
from tests.collectors.worlds import Counting, Failing, Odd, make_policy
from tests.kit.clock import PATIENCE, eventually
from tests.kit.marked import mark

ray = pytest.importorskip("ray")

OPTIONS: dict[str, Any] = {
    "launcher": "ray",
    "ray_options": {"num_cpus": 0},
    "frames_per_batch": 20,
    "timeout": 2 * PATIENCE,
}


@pytest.mark.parametrize("sync", [True, False])
async def test_the_same_script_on_a_cluster(sync: bool) -> None:
    policy = make_policy()
    async with MultiCollector(ENVS, policy, sync=sync, total_frames=200, **OPTIONS) as collector:
        assert await collector.set_seed(3) == 5
        version = 0
        async for batch in collector:
            check(batch)
            version += 1
            mark(policy, version)
            await collector.update_policy_weights_()
        assert collector.frames == 200
        assert collector.policy_version == version == 10
        assert await collector.getattr_env_all("name") == [0, 1]
        state = await collector.state_dict()
        assert {"worker0", "worker1"} <= state.keys()


async def test_an_actors_own_error_is_raised() -> None:
    with pytest.raises(Odd, match="in step"):
        async with MultiCollector([lambda: Failing("step")], **OPTIONS) as collector:
            await anext(collector)


async def test_a_killed_actor_is_named() -> None:
    async with MultiCollector(ENVS, make_policy(), **OPTIONS) as collector:
        await anext(collector)
        _kill(collector, 1)
        killed = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"worker 1 lost: .*Ray reports"):
            while True:
                await anext(collector)
        assert time.monotonic() - killed < PATIENCE / 2  # long before the collector's own deadline


async def test_a_killed_actor_is_replaced() -> None:
    policy = make_policy()
    async with MultiCollector(ENVS, policy, restart_workers=1, **OPTIONS) as collector:
        await anext(collector)
        mark(policy, 1)
        await collector.update_policy_weights_()
        _kill(collector, 1)
        for _ in range(3):
            batch = await anext(collector)
            check(batch)
        assert batch["policy_version"].unique().tolist() == [1]


def _kill(collector: MultiCollector, worker: int) -> None:
    workers_of(collector)[worker].host.kill()


async def test_nothing_is_left() -> None:
    async with MultiCollector(ENVS, **OPTIONS) as collector:
        await anext(collector)
        handles: list[Any] = [worker.host._handle for worker in workers_of(collector)]  # type: ignore[attr-defined]
    for handle in handles:
        # An actor that Ray is killing may answer a last call.
        await eventually(partial(has_died, handle), "the actor has died")


def has_died(handle: Any) -> bool:
    """Return whether calls of an actor fail because it has died."""
    try:
        ray.get(handle.messages.remote(), timeout=PATIENCE)
    except ray.exceptions.ActorDiedError:
        return True
    return False


async def test_outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(NotInitializedError, match=r"ray.init\(\)"):
        async with MultiCollector([Counting], **OPTIONS):
            pass
    with pytest.raises(InvalidArgumentError, match="launcher"):
        MultiCollector([Counting], launcher="Ray")  # type: ignore[arg-type]
