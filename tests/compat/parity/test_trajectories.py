"""Whole trajectories: the same lines with torchrl's collectors and ours."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchrl")

import torch
from torchrl import collectors as theirs
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv

from aiosync.errors import OptionConflictError
from aiosync.sync import collectors as ours

LIMIT = 7
"""Steps of each episode: its environment has this limit, so that episodes of a seed are the same."""


def make_env() -> Any:
    """CartPole, which random actions end after 7 steps at the latest."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True, max_episode_steps=LIMIT)


def check_trajectory(frames: Any) -> None:
    """That it has one number, and ends with its last frame."""
    assert frames["collector", "traj_ids"].unique().numel() == 1
    done = frames["next", "done"].view(-1)
    assert done[-1] and not done[:-1].any()


OPTIONS: Any = {"frames_per_batch": 20, "total_frames": 200}


@pytest.mark.parametrize("library", [theirs, ours], ids=["torchrl", "aiosync"])
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_batches_of_trajectories(library: Any, kind: str) -> None:
    collector = getattr(library, kind)(
        [make_env] * 2, None, trajs_per_batch=3, traj_format="padded", **OPTIONS
    )
    count = 0
    for batch in collector:
        count += 1
        assert batch.shape[0] == 3 and batch.shape[1] <= LIMIT
        mask = batch["collector", "mask"]
        assert mask.any(0).all()
        for row, valid in zip(batch.unbind(0), mask, strict=True):
            check_trajectory(row[valid])
            assert not row["observation"][~valid].any()
    collector.shutdown()
    assert count >= 200 // LIMIT // 3 - 2


@pytest.mark.parametrize("library", [theirs, ours], ids=["torchrl", "aiosync"])
def test_one_trajectory_after_the_other(library: Any) -> None:
    collector = library.MultiSyncCollector(
        [make_env] * 2, None, trajs_per_batch=2, traj_format="cat", **OPTIONS
    )
    for batch in collector:
        assert batch.batch_dims == 1 and ("collector", "mask") not in batch.keys(True)
        ends = batch["next", "done"].view(-1).nonzero().view(-1)
        assert len(ends) == 2 and ends[-1] == len(batch) - 1
        for part in batch.split([int(ends[0]) + 1, int(ends[1] - ends[0])]):
            check_trajectory(part)
    collector.shutdown()


@pytest.mark.parametrize("library", [theirs, ours], ids=["torchrl", "aiosync"])
def test_a_replay_buffer_gets_whole_trajectories(library: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=8)
    collector = library.MultiSyncCollector(
        [make_env] * 2, None, replay_buffer=buffer, trajs_per_batch=3, trajs_per_write=1, **OPTIONS
    )
    assert all(batch is None for batch in collector)
    collector.shutdown()
    assert 200 - 2 * LIMIT <= len(buffer) <= 200
    frames = buffer[:]
    numbers, lengths = frames["collector", "traj_ids"].unique_consecutive(return_counts=True)
    assert numbers.numel() == numbers.unique().numel()
    for part in frames.split(lengths.tolist()):
        check_trajectory(part)


def test_a_reset_drops_what_has_begun() -> None:
    with ours.MultiSyncCollector(
        [make_env] * 2, None, trajs_per_batch=1, traj_format="cat", frames_per_batch=8
    ) as collector:
        first = next(collector)
        check_trajectory(first)
        collector.reset()
        for _ in range(4):
            check_trajectory(next(collector))
        collector.reset([True, False])
        for _ in range(4):
            check_trajectory(next(collector))
        state = collector.state_dict()
        collector.load_state_dict(state)
        check_trajectory(next(collector))


def test_the_last_trajectories_are_returned() -> None:
    with ours.Collector(
        make_env, None, trajs_per_batch=1, traj_format="cat", frames_per_batch=100, total_frames=100
    ) as collector:
        trajectories = list(collector)
    assert len(trajectories) >= 100 // LIMIT - 1
    assert sum(len(each) for each in trajectories) > 100 - LIMIT
    assert all(torch.equal(each["next", "done"].view(-1)[-1], torch.tensor(True)) for each in trajectories)


@pytest.mark.parametrize(
    "wrong",
    [
        {"trajs_per_batch": 0},
        {"traj_format": "square", "trajs_per_batch": 1},
        {"traj_format": "cat"},
        {"trajs_per_batch": 1, "split_trajs": True},
        {"trajs_per_batch": 1, "reset_when_done": False},
    ],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))) as caught:
        ours.MultiSyncCollector([make_env], None, **wrong)
    assert isinstance(caught.value, OptionConflictError) or len(wrong) < 2 or "traj_format" in wrong
