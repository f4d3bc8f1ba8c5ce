"""What may be asked of a collector besides batches."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import signal
from typing import Any

import pytest
import torch

from aiosync import (
    InvalidArgumentError,
    MemoryWeightSyncScheme,
    NotConnectedError,
    NotInitializedError,
    WorkerLostError,
)
from aiosync.collectors import MultiCollector
from aiosync.sync import collectors as blocking
from tests.collectors.kit import ENVS, ListReplayBuffer, check, collecting, pids_of
from tests.collectors.worlds import AsyncCounting, make_policy
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.marked import mark


@pytest.mark.parametrize("sync", [True, False])
async def test_a_replay_buffer_is_filled_instead(sync: bool) -> None:
    replay = ListReplayBuffer()
    async with collecting(ENVS, make_policy(), sync=sync, total_frames=60, replay_buffer=replay) as collector:
        assert [batch async for batch in collector] == [None] * 3
        assert (await collector.stats())["batches"] == 3
    assert len(replay.frames) == 60
    assert replay.frames[0].batch_size == ()
    async with collecting(ENVS, total_frames=40, replay_buffer=replay, extend_buffer=False) as collector:
        async for _ in collector:
            pass
    assert [item.shape for item in replay.items] == [()] * 40
    with pytest.raises(InvalidArgumentError, match=r"extend\(\)"):
        MultiCollector(ENVS, replay_buffer=[1].copy)


async def test_started_it_collects_by_itself() -> None:
    replay = ListReplayBuffer()
    policy = make_policy()
    async with collecting(ENVS, policy, sync=False, replay_buffer=replay) as collector:
        await collector.start()
        await eventually(lambda: len(replay.frames) >= 100, "it collects")
        mark(policy, 1)
        await collector.update_policy_weights_()
        before = len(replay.frames)
        await eventually(lambda: len(replay.frames) >= before + 200, "it goes on")
        assert replay.frames[-1]["marks"].tolist() == [1.0, 1.0]
        async with collector.pause():
            settled = len(replay.frames)
            assert collector.is_running()
            await asyncio.sleep(0.2)
            assert len(replay.frames) == settled
        await eventually(lambda: len(replay.frames) >= settled + 100, "it goes on after a pause")
    with pytest.raises(NotInitializedError, match="replay_buffer"):
        async with collecting(ENVS) as collector:
            await collector.start()


async def test_a_pause_always_ends() -> None:
    async with collecting(ENVS, make_policy(), sync=False) as collector:
        await anext(collector)
        with pytest.raises(KeyError):
            async with collector.pause():
                raise KeyError
        for _ in range(5):
            check(await within(anext(collector)))


@pytest.mark.parametrize("sync", [True, False])
async def test_a_killed_worker_comes_back(sync: bool) -> None:
    policy = make_policy()
    options: dict[str, Any] = {"restart_workers": 1, "total_frames": 400}
    ids: set[tuple[int, int, int]] = set()
    async with collecting(ENVS, policy, sync=sync, **options) as collector:
        await collector.set_seed(3)
        number = 0
        async for batch in collector:
            check(batch)
            flat = batch.reshape(-1)
            ids |= {
                (int(i), int(o[0]), int(o[3]))
                for i, o in zip(flat["collector", "traj_ids"], flat["observation"], strict=True)
            }
            number += 1
            mark(policy, number)
            await collector.update_policy_weights_()
            if number == 5:
                os.kill(pids_of(collector)[1], signal.SIGKILL)
        assert collector.frames == 400
    assert {seed for _, _, seed in ids} == {3, 4}
    names = {number: name for number, name, _ in ids}
    assert all(names[number] == name for number, name, _ in ids), "two trajectories have the same number"


async def test_it_does_not_come_back_for_ever() -> None:
    with pytest.raises(WorkerLostError, match=r"worker 0 lost: .*SIGKILL"):
        async with collecting(ENVS, restart_workers=1) as collector:
            for _ in range(3):
                await anext(collector)
                os.kill(pids_of(collector)[0], signal.SIGKILL)


async def test_where_it_stands_can_be_kept() -> None:
    options: dict[str, Any] = {"total_frames": 120, "cat_results": 0}
    async with collecting(ENVS, **options) as collector:
        await collector.set_seed(1)
        await anext(collector)
        state = await collector.state_dict()
        rest = [batch async for batch in collector]
    async with collecting(ENVS, **options) as collector:
        await collector.load_state_dict(state)
        assert collector.frames == 20
        again = [batch async for batch in collector]
    assert (torch.cat(rest) == torch.cat(again)).all()
    with pytest.raises(InvalidArgumentError, match="has 2 workers, and this collector 1"):
        async with collecting(ENVS[:1]) as collector:
            await collector.load_state_dict(state)


async def test_batches_that_are_too_old_are_dropped() -> None:
    policy = make_policy()
    options: dict[str, Any] = {"sync": False, "max_staleness": 1, "total_frames": 200}
    async with collecting(ENVS, policy, **options) as collector:
        version = 0
        async for batch in collector:
            check(batch)
            assert batch["policy_version"].min() >= version - 1
            for _ in range(2):
                version += 1
                mark(policy, version)
                await collector.update_policy_weights_()
            await asyncio.sleep(0.05)
        assert collector.frames == 200


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_collection_can_wait_for_the_trainer(staleness: int) -> None:
    policy = make_policy()
    options: dict[str, Any] = {"sync": False, "max_staleness": staleness, "on_stale": "wait"}
    async with collecting(ENVS, policy, total_frames=200, **options) as collector:
        version = 0
        async for batch in collector:
            check(batch)
            assert batch["policy_version"].min() >= version - staleness
            version += 1
            mark(policy, version)
            await collector.update_policy_weights_()


async def test_several_environments_in_a_worker() -> None:
    policy = make_policy()
    envs = [functools.partial(AsyncCounting, name, seconds=0.01) for name in range(2)]
    options: dict[str, Any] = {"envs_per_worker": 8, "frames_per_batch": 80, "total_frames": 800}
    async with collecting(envs, policy, sync=False, **options) as collector:
        await collector.set_seed(100)
        seen: set[float] = set()
        async for batch in collector:
            seen |= set(batch["observation"][:, 3].tolist())
            for number in batch["collector", "traj_ids"].unique():
                part = batch[batch["collector", "traj_ids"] == number]
                steps = part["observation"][:, 2]
                assert torch.equal(steps, torch.arange(len(steps)) + steps[0])
            assert (batch["marks"] == batch["policy_version"].unsqueeze(-1)).all()
        assert seen == {float(seed) for seed in range(100, 116)} | ({-1.0} & seen)


async def test_trajectories_as_rows() -> None:
    async with collecting(ENVS, split_trajs=True, total_frames=40) as collector:
        async for batch in collector:
            mask = batch["collector", "mask"]
            assert mask.sum() == 20
            assert batch.shape == mask.shape
            for row, valid in zip(batch.unbind(0), mask, strict=True):
                steps = row["observation"][valid][:, 2]
                assert torch.equal(steps, torch.arange(len(steps)) + steps[0])


def test_the_blocking_twin() -> None:
    policy = make_policy()
    options: dict[str, Any] = {"start_method": "forkserver", "timeout": PATIENCE, "frames_per_batch": 20}
    with blocking.MultiSyncCollector(ENVS, policy, total_frames=60, **options) as collector:
        assert collector.set_seed(3) == 5
        for version, batch in enumerate(collector, start=1):
            check(batch)
            assert batch["policy_version"].unique().tolist() == [version - 1]
            mark(policy, version)
            collector.update_policy_weights_()
        assert collector.getattr_env_all("name") == [0, 1]
        assert collector.policy_version == 3
    mark(policy, 0)
    with blocking.MultiAsyncCollector(ENVS, policy, **options) as collector:
        check(next(collector))
        with collector.pause():
            pass
        check(next(collector))


async def test_workers_that_acknowledge_and_workers_that_do_not() -> None:
    policy = make_policy()
    async with collecting(ENVS, policy) as collector:
        assert collector.acknowledged_versions == {0: 0, 1: 0}
        await collector.update_policy_weights_(worker_ids=1)
        assert collector.acknowledged_versions == {0: 0, 1: 1}
        await collector.increment_version()
        assert collector.acknowledged_versions == {0: 1, 1: 2}
        assert collector.policy_version == 2
        assert (await anext(collector))["policy_version"].unique(dim=1).view(-1).tolist() == [1, 2]
        assert await collector.get_distant_attr("policy_version") == [1, 2]
        with pytest.raises(InvalidArgumentError, match="expected 2 entries"):
            await collector.map_fn("reset", [()])
    with pytest.raises(NotConnectedError):
        _ = collector.acknowledged_versions


async def test_a_receiver_is_registered_later() -> None:
    above, below = make_policy(), make_policy()
    scheme = MemoryWeightSyncScheme(timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=above, num_workers=1)
    receiving = copy.copy(scheme)
    mark(above, 5)
    async with collecting(ENVS, below, worker_idx=0) as collector:
        connecting = asyncio.create_task(scheme.connect())
        await collector.register_scheme_receiver({"policy": receiving})
        await connecting
        mark(above, 6)
        await scheme.send()
        assert (await anext(collector))["marks"].unique().tolist() == [6]
        await scheme.aclose()
