"""torchrl's environments in asyncio collectors: states, several in a worker, and what cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import SerialEnv, TicTacToeEnv

from aiosync import InvalidArgumentError
from aiosync.collectors import Collector
from tests.collectors.kit import ListReplayBuffer, collecting
from tests.kit.clock import PATIENCE, within
from tests.kit.torchrl_envs import AGENTS, Growing, Masked, Steps, Team, act, make_policy

OPTIONS: dict[str, Any] = {"frames_per_batch": 8, "timeout": PATIENCE, "track_policy_version": False}


def _last() -> Any:
    return TensorDictModule(lambda it: it[-1:], in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize(
    ("make", "prefix"), [(Steps, ()), (Team, ("agents",)), (partial(Team, (2,)), ("agents",))]
)
async def test_a_state_is_continued(make: Any, prefix: tuple[str, ...], limit: int) -> None:
    options: dict[str, Any] = {**OPTIONS, "max_frames_per_traj": limit}
    async with Collector(make, make_policy(*prefix), **options) as collector:
        await anext(collector)
        state = await collector.state_dict()
        expected = await anext(collector)
    async with Collector(make, make_policy(*prefix), **options) as collector:
        await collector.load_state_dict(state)
        found = await anext(collector)
    assert (found == expected).all()
    assert set(found.keys(True)) == set(expected.keys(True))
    if prefix:
        assert found["agents"].batch_size == (*found.batch_size, AGENTS)


def _check_counts(batches: list[Any]) -> None:
    """That each frame of a :class:`Steps` follows the one before it, and episodes begin at 0."""
    frames: Any = torch.cat(batches, -1)
    for row in frames.unbind(0):
        then, after = row["observation"], row["next", "observation"]
        done = row["next", "done"].view(-1)[:-1]
        assert torch.equal(then[1:][~done], after[:-1][~done])
        assert (then[1:][done][:, 1] == 0).all()
        assert torch.equal(row["collector", "traj_ids"].diff() != 0, done)


async def test_environments_that_share_memory_are_restored() -> None:
    async with Collector(lambda: SerialEnv(2, Steps), make_policy(), **OPTIONS) as collector:
        batches = [(await anext(collector)).clone()]
        state = await collector.state_dict()
        expected = [(await anext(collector)).clone() for _ in range(3)]
        await collector.load_state_dict(state)
        found = [(await anext(collector)).clone() for _ in range(3)]
    _check_counts(batches + expected)
    for one, other in zip(expected, found, strict=True):
        assert (one == other).all()


async def test_several_that_change_size_in_a_worker() -> None:
    replay = ListReplayBuffer()
    async with collecting([Growing] * 2, _last(), envs_per_worker=2, cat_results=-1) as collector:
        batch = await within(anext(collector))
    assert isinstance(batch, LazyStackedTensorDict)
    sizes = [step["observation"].shape[0] for step in batch.unbind(0)]
    assert sizes == [1, 2, 3, 4, 1] * 4  # in order of time, one environment after the other
    async with collecting(
        [Growing] * 2, _last(), sync=False, replay_buffer=replay, extend_buffer=False
    ) as it:
        await within(anext(it))
    assert [item["observation"].shape[0] for item in replay.items] == [1, 2, 3, 4] * 5


async def test_one_that_changes_size_needs_no_buffers() -> None:
    async with Collector(Growing, _last(), use_buffers=True, **OPTIONS) as collector:
        with pytest.raises(InvalidArgumentError, match=r"observation.*use_buffers=False"):
            await anext(collector)


async def test_workers_get_copies_of_an_environment() -> None:
    env = Steps((2,))
    async with collecting([env, env], make_policy(), frames_per_batch=16) as collector:
        batch = await within(anext(collector))
    assert batch.batch_size == (2, 2, 4)
    assert torch.equal(batch["observation"][0], batch["observation"][1])
    assert torch.equal(batch["action"], act(batch["observation"]))
    assert env.episode.unique().tolist() == [-1]


def _is_legal(batch: Any) -> bool:
    """Whether each action is one that the mask in the same frame allows."""
    mask = batch["mask"] if "mask" in batch.keys() else batch["rules", "mask"]
    action = batch["action"].long()
    return bool(mask.gather(-1, action.view(*mask.shape[:-1], 1)).all())


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("make", [TicTacToeEnv, Masked, partial(Masked, (2,))])
async def test_random_actions_are_those_that_a_mask_allows(make: Any, limit: int) -> None:
    options: dict[str, Any] = {**OPTIONS, "frames_per_batch": 40, "max_frames_per_traj": limit}
    async with Collector(make, **options) as collector:
        assert _is_legal(await anext(collector))
        state = await collector.state_dict()
        assert _is_legal(await anext(collector))
        await collector.load_state_dict(state)
        assert _is_legal(await anext(collector))
