"""``trajs_per_batch`` returns whole trajectories, whatever happens between two batches."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from aiosync.collectors import Collector, MultiCollector
from tests.collectors.kit import ListReplayBuffer, collecting, pid_of, workers_of
from tests.collectors.worlds import AsyncCounting, Counting, make_policy
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.marked import mark

LENGTHS = (5, 3, 11)
"""Steps of the episodes of the environment with this name."""

OPTIONS: dict[str, Any] = {"trajs_per_batch": 1, "traj_format": "cat", "timeout": PATIENCE}


def make_rows(mode: AutoresetMode) -> Any:
    """Three environments that step together."""
    envs = [functools.partial(Counting, name, length) for name, length in enumerate(LENGTHS)]
    return SyncVectorEnv(envs, autoreset_mode=mode)


ENVS: dict[str, tuple[Callable[[], Any], int]] = {
    "one": (functools.partial(Counting, 2, LENGTHS[2]), 1),
    "several": (functools.partial(AsyncCounting, 2, LENGTHS[2]), 3),
    **{mode.value: (functools.partial(make_rows, mode), 1) for mode in AutoresetMode},
}


def check(frames: Any) -> None:
    """That a trajectory has all steps of its episode, in order."""
    observed = frames["observation"]
    assert observed[:, :2].unique(dim=0).shape[0] == 1, "one episode of one environment"
    assert frames["collector", "traj_ids"].unique().numel() == 1
    assert observed[:, 2].tolist() == list(range(LENGTHS[int(observed[0, 0])]))
    assert frames["next", "done"].view(-1).tolist() == [False] * (len(frames) - 1) + [True]


async def _apply(collector: MultiCollector, name: str, draw: random.Random) -> None:
    """Call one of the methods that change what comes next."""
    if name == "reset":
        await collector.reset()
    elif name == "partial reset":
        await collector.reset([draw.random() < 0.5 for _ in range(collector.num_workers)])
    elif name == "seed":
        await collector.set_seed(draw.randrange(100))
    elif name == "update":
        await collector.update_policy_weights_()
    else:
        async with collector.pause():
            state = await collector.state_dict()
        if name == "load later":
            await within(anext(collector))
        await collector.load_state_dict(state)


@pytest.mark.parametrize("frames", [1, 3, 20])
@pytest.mark.parametrize("env", ENVS)
async def test_any_order_of_calls(env: str, frames: int) -> None:
    make, each = ENVS[env]
    calls = ["next"] * 4 + ["reset", "seed", "update", "load", "load later"]
    for seed in range(4):
        draw = random.Random(seed)
        options = {"envs_per_worker": each, "frames_per_batch": frames, **OPTIONS}
        async with Collector(make, make_policy(), **options) as collector:
            for _ in range(40):
                if (name := draw.choice(calls)) == "next":
                    check(await within(anext(collector)))
                else:
                    await _apply(collector, name, draw)


@pytest.mark.parametrize("sync", [True, False])
async def test_any_order_of_calls_of_processes(sync: bool) -> None:
    envs = [ENVS["one"][0], ENVS["SameStep"][0]]
    calls = ["next"] * 4 + ["reset", "partial reset", "seed", "update", "load", "load later"]
    options = {"sync": sync, "max_staleness": None if sync else 1, "frames_per_batch": 6, **OPTIONS}
    if sync:
        envs = envs[:1] * 2
    async with collecting(envs, make_policy(), **options) as collector:
        draw = random.Random(1)
        for _ in range(60):
            if (name := draw.choice(calls)) == "next":
                check(await within(anext(collector)))
            else:
                await within(_apply(collector, name, draw))


@pytest.mark.parametrize("env", ENVS)
async def test_a_restored_collector_returns_the_same_trajectories(env: str) -> None:
    make, each = ENVS[env]
    options = {"envs_per_worker": each, "frames_per_batch": 7, **OPTIONS}
    async with Collector(make, make_policy(), **options) as collector:
        for _ in range(3):
            await anext(collector)
        state = await collector.state_dict()
        expected = [await anext(collector) for _ in range(5)]
    async with Collector(make, make_policy(), **options) as collector:
        await anext(collector)
        await collector.load_state_dict(state)
        found = [await anext(collector) for _ in range(5)]
    for one, other in zip(expected, found, strict=True):
        for key in ("observation", "action", ("collector", "traj_ids")):
            assert torch.equal(one[key], other[key])


@pytest.mark.parametrize("env", ENVS)
async def test_no_frame_is_lost(env: str) -> None:
    make, each = ENVS[env]
    options = {"envs_per_worker": each, "frames_per_batch": 6, "total_frames": 300, **OPTIONS}
    async with Collector(make, make_policy(), **options) as collector:
        trajectories = [trajectory async for trajectory in collector]
    for trajectory in trajectories:
        check(trajectory)
    by_env: dict[int, list[int]] = {}
    for trajectory in trajectories:
        name, episode = trajectory["observation"][0, :2].int().tolist()
        by_env.setdefault(name, []).append(episode)
    if env != "several":  # which all have the same name
        assert all(episodes == list(range(len(episodes))) for episodes in by_env.values())
    counted = sum(map(len, trajectories))
    skipped = sum(map(len, by_env.values())) if env == "NextStep" else 0
    assert counted + skipped > 300 - 3 * (max(LENGTHS) + 1)


async def test_a_worker_that_dies() -> None:
    replay, envs = ListReplayBuffer(), [ENVS["one"][0]] * 2
    options = {**OPTIONS, "restart_workers": 3, "frames_per_batch": 4, "replay_buffer": replay}
    async with collecting(envs, make_policy(), sync=False, **options) as collector:
        await collector.start()
        for _ in range(2):
            os.kill(pid_of(collector, 1) or 0, signal.SIGKILL)
            lost = workers_of(collector)[1]
            await eventually(lambda: workers_of(collector)[1] is not lost, "it is replaced")  # noqa: B023
            await eventually(lambda: workers_of(collector)[1].frames > lost.frames, "it collects")  # noqa: B023
        assembler = collector._assembler
        assert assembler is not None and len(assembler.state_dict()["running"]) <= 2
    frames: Any = torch.stack(replay.frames)
    for number in frames["collector", "traj_ids"].unique():
        check(frames[frames["collector", "traj_ids"] == number])


async def test_trajectories_that_are_too_old_are_dropped() -> None:
    """A worker's batch has several: those that were not taken are older at the next call."""
    policy = make_policy()
    options: dict[str, Any] = {"sync": False, "max_staleness": 1, "trajs_per_batch": 1}
    async with collecting([Counting] * 2, policy, frames_per_batch=70, **options) as collector:
        for version in range(1, 20):
            batch = await within(anext(collector))
            assert batch["policy_version"][batch["collector", "mask"]].min() >= collector.policy_version - 1
            mark(policy, version)
            await collector.update_policy_weights_()
