"""Environments and policies that do what is allowed and rare: no frame is wrong, no error is lost."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from aiosync import InvalidArgumentError
from aiosync.collectors import Collector, MultiCollector
from tests.collectors.kit import ListReplayBuffer, check, collecting
from tests.collectors.worlds import AsyncCounting, Counting
from tests.kit.clock import PATIENCE, within

OPTIONS: dict[str, Any] = {"timeout": PATIENCE}


def choose_none(observation: Tensor) -> Tensor:
    """Always the first action."""
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class Viewed(Counting):
    """Observes memory in a layout that torch cannot view."""

    def __init__(self, view: Callable[[Any], Any]) -> None:
        super().__init__()
        self._view = view

    def _observation(self) -> Any:
        return self._view(super()._observation())


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda found: found[::-1][::-1].copy()[::-1],
    "every other": lambda found: np.repeat(found[::-1], 2)[::2],
    "transposed": lambda found: np.stack([found[::-1]] * 2, 1).T[0],
    "other byte order": lambda found: found[::-1].astype(">f4"),
    "in a structure": lambda found: np.array(
        [(each, 0) for each in found[::-1]], np.dtype([("it", "<f4"), ("_", "<i1")])
    )["it"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [None, choose_none], ids=["random", "policy"])
async def test_layouts_of_observations(layout: str, policy: Any) -> None:
    env = functools.partial(Viewed, LAYOUTS[layout])
    async with Collector(env, policy, frames_per_batch=16, **OPTIONS) as collector:
        batch = await anext(collector)
    reversed_ = {key: batch[key].flip(-1) for key in ("observation", ("next", "observation"))}
    check(batch.clone().update(reversed_))


class Writing(nn.Module):
    """Changes its input."""

    def forward(self, observation: Tensor) -> Tensor:
        """Return the first action."""
        observation.mul_(0).sub_(1)
        return choose_none(observation)


class Stateful(Counting):
    """Observes its own state, and continues from it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = np.zeros(4, np.float32)

    def _observation(self) -> Any:
        self.state[:] = self.name, self.episode, self.count, self.seed
        return self.state

    def step(self, action: Any) -> Any:
        """See :class:`Counting`."""
        assert self.state[2] == self.count
        return super().step(action)


@pytest.mark.parametrize("as_module", [False, True])
async def test_a_policy_that_writes_into_its_input(as_module: bool) -> None:
    policy: Any = Writing()
    if as_module:
        policy = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    async with Collector(Stateful, policy, frames_per_batch=16, **OPTIONS) as collector:
        check(await anext(collector))


class Choosing(nn.Module):
    """Returns what it was given, and counts its calls."""

    def __init__(self, answer: Callable[[int], Any]) -> None:
        super().__init__()
        self.calls = 0
        self._answer = answer

    def forward(self, observation: Tensor) -> Any:
        """Return the answer."""
        self.calls += 1
        return self._answer(self.calls)


def _key_error(call: int) -> Any:
    if call == 3:
        raise KeyError("an error of the policy")
    return torch.tensor(0), torch.tensor(float(call))


async def test_a_key_error_of_a_policy_is_its_own() -> None:
    module = Choosing(_key_error)
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action", "call"])
    async with Collector(Counting, policy, frames_per_batch=6, **OPTIONS) as collector:
        with pytest.raises(KeyError, match="an error of the policy"):
            await anext(collector)


ANSWERS: dict[str, Callable[[int], Any]] = {
    "a number": lambda call: (torch.tensor(0), float(call)),
    "a tuple of more": lambda call: (torch.tensor(0), torch.tensor(float(call)), None),
    "a dict": lambda call: {"action": torch.tensor(0), "call": torch.tensor(float(call))},
    "tensors": lambda call: (torch.tensor(0), torch.tensor(float(call))),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_policy_is_called_once_per_frame(answer: str) -> None:
    policy = TensorDictModule(Choosing(ANSWERS[answer]), in_keys=["observation"], out_keys=["action", "call"])
    async with Collector(Counting, policy, frames_per_batch=6, track_policy_version=False) as collector:
        if answer == "a tuple of more":
            with pytest.raises(RuntimeError, match="out_keys"):
                await anext(collector)
            return
        batch = await anext(collector)
    assert batch["call"].view(-1).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("use_buffers", [None, False])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 5])
async def test_more_environments_than_frames(frames: int, each: bool, use_buffers: bool | None) -> None:
    env = functools.partial(AsyncCounting, length=3, seconds=0.001)
    options = {"envs_per_worker": 4, "reset_at_each_iter": each, "use_buffers": use_buffers, **OPTIONS}
    hooked: list[int] = []
    async with Collector(
        env,
        choose_none,
        frames_per_batch=frames,
        total_frames=20,
        pre_collect_hook=lambda: hooked.append(1),
        **options,
    ) as collector:
        batches = [batch async for batch in collector]
    assert [batch.batch_size for batch in batches] == [(frames,)] * (20 // frames)
    assert all(batch["next", "reward"].shape == (frames, 1) for batch in batches)
    assert len(hooked) == len(batches)


class Raising(Counting):
    """Raises in its third step."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    def step(self, action: Any) -> Any:
        """See :class:`Counting`."""
        if self.count == 3:
            raise self._error("of the environment")
        return super().step(action)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Collector, StopAsyncIteration),
        (Collector, StopIteration),
        (Collector, asyncio.CancelledError),
        (Collector, TimeoutError),
        (MultiCollector, StopAsyncIteration),  # the error travels
        (MultiCollector, asyncio.CancelledError),
    ],
)
async def test_errors_that_steer_a_loop_are_errors(kind: Any, error: type[BaseException]) -> None:
    env = functools.partial(Raising, error)
    options = {"frames_per_batch": 10, "total_frames": 40, **OPTIONS}
    expected = TimeoutError if error is TimeoutError else RuntimeError
    async with kind([env] if kind is MultiCollector else env, choose_none, **options) as collector:
        with pytest.raises(expected, match=f"{error.__name__}|of the environment"):
            async for _ in collector:
                pass


async def test_a_postproc_that_would_end_the_iteration() -> None:
    def postproc(batch: Any) -> Any:
        raise StopAsyncIteration("of the hook")

    async with Collector(Counting, choose_none, postproc=postproc, **OPTIONS) as collector:
        with pytest.raises(RuntimeError, match="of the hook"):
            await anext(collector)


def make_rows(mode: AutoresetMode) -> Any:
    """Environments whose episodes have 3 and 7 steps."""
    envs = [functools.partial(Counting, name, length) for name, length in enumerate((3, 7))]
    return SyncVectorEnv(envs, autoreset_mode=mode)


@pytest.mark.parametrize("policy", [None, choose_none], ids=["random", "policy"])
@pytest.mark.parametrize("limit", [2, 3, 5, 9])
async def test_a_limit_where_episodes_begin_in_the_same_step(limit: int, policy: Any) -> None:
    make = functools.partial(make_rows, AutoresetMode.SAME_STEP)
    options = {"frames_per_batch": 64, "max_frames_per_traj": limit, **OPTIONS}
    async with Collector(make, policy, **options) as collector:
        batches: Any = torch.cat([await anext(collector) for _ in range(2)], -1)
    for row, length in zip(batches.unbind(0), (3, 7), strict=True):
        check(row)
        ends = min(length, limit)
        assert torch.equal(row["next", "step_count"].view(-1) == ends, row["next", "done"].view(-1))
        assert torch.equal(row["step_count"].view(-1), row["observation"][:, 2].long())


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
async def test_environments_that_cannot_stay_at_their_end(mode: AutoresetMode) -> None:
    with pytest.raises(InvalidArgumentError, match=r"reset_when_done=False.*AutoresetMode\.DISABLED"):
        async with Collector(functools.partial(make_rows, mode), reset_when_done=False, **OPTIONS):
            pass


class Named(gym.Env[Any, Any]):
    """Observes a dictionary with one entry."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, name: str) -> None:
        self._observed = {name: np.zeros(1, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        return self._observed, {}

    def step(self, action: Any) -> Any:
        """Stay."""
        return self._observed, 0.0, False, False, {}


@pytest.mark.parametrize("name", ["action", "reward", "next", "done", "collector", "policy_version"])
async def test_observations_named_as_other_fields(name: str) -> None:
    async with Collector(functools.partial(Named, name), **OPTIONS) as collector:
        with pytest.raises(InvalidArgumentError, match=f"entry '{name}'.*rename it"):
            await anext(collector)


@pytest.mark.parametrize("space", [gym.spaces.Dict(a=gym.spaces.Discrete(2)), gym.spaces.Tuple([])])
async def test_random_actions_of_spaces_without_arrays(space: Any) -> None:
    env = Named("it")
    env.action_space = space
    async with Collector(env, **OPTIONS) as collector:
        with pytest.raises(InvalidArgumentError, match="give a policy"):
            await anext(collector)


async def test_an_action_that_is_no_whole_number() -> None:
    async with Collector(Counting, lambda observation: torch.tensor(1.9), **OPTIONS) as collector:
        with pytest.raises(InvalidArgumentError, match=r"whole numbers below 3.*1\.89"):
            await anext(collector)
    async with Collector(Counting, lambda observation: torch.tensor(1.0), **OPTIONS) as collector:
        batch = await anext(collector)
    assert (batch["next", "reward"] == 1).all()


@pytest.mark.parametrize("sync", [True, False])
async def test_batches_are_contiguous(sync: bool) -> None:
    make = functools.partial(make_rows, AutoresetMode.DISABLED)
    async with Collector(make, choose_none, frames_per_batch=16, **OPTIONS) as collector:
        batches = [await anext(collector)]
    for envs_per_worker in (1, 2):
        options = {"sync": sync, "envs_per_worker": envs_per_worker, "frames_per_batch": 16}
        async with collecting([make] * 2, choose_none, **options) as collector:
            batches += [await within(anext(collector)) for _ in range(2)]
    for batch in batches:
        flat = batch.view(-1)
        assert all(value.is_contiguous() for value in batch.values(True, True))
        rows = flat["next", "observation"].view(*batch.shape, -1)
        assert torch.equal(rows, batch["next", "observation"])


async def test_workers_have_the_default_dtype_of_their_collector() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        async with collecting([Counting], choose_none) as collector:
            batch = await within(anext(collector))
    finally:
        torch.set_default_dtype(before)
    assert batch["next", "reward"].dtype is torch.float64


def make_same_rows() -> Any:
    """Two environments whose episodes end together; the step after an end is skipped."""
    return SyncVectorEnv([Counting] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize(
    "options", [{"split_trajs": True}, {"replay_buffer": True}, {"trajs_per_batch": 2}], ids=str
)
async def test_batches_of_which_all_steps_are_skipped(options: dict[str, Any]) -> None:
    replay = ListReplayBuffer()
    if "replay_buffer" in options:
        options = {"replay_buffer": replay}
    given = {"frames_per_batch": 2, "total_frames": 64, **OPTIONS, **options}
    async with Collector(make_same_rows, choose_none, **given) as collector:
        batches = [batch async for batch in collector]
    if "split_trajs" in options:
        replay.frames = [row[0] for batch in batches for row in batch]
        assert [len(batch) for batch in batches] == ([2] * 7 + [0]) * 4
    if "trajs_per_batch" in options:
        replay.frames = [frame for batch in batches for row in batch for frame in row]
    counts = [int(frame["observation"][2]) for frame in replay.frames]
    assert sorted(counts) == sorted([*range(7)] * 8)
