"""Environments of every kind, stepped by collectors."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from aiosync import InvalidArgumentError
from aiosync.collectors import Collector, adapt, env
from aiosync.collectors.batch_buffers import Part
from aiosync.collectors.batch_memory import BatchJoiner
from aiosync.collectors.env import Fields, Key, Nested, assemble, unflatten
from tests.collectors.kit import collecting
from tests.collectors.worlds import AsyncCounting, Counting, make_policy

LENGTHS = (3, 5)


def make_vector(mode: str) -> Any:
    """Two environments whose episodes have different lengths."""
    envs = [functools.partial(Counting, name, length) for name, length in enumerate(LENGTHS)]
    return SyncVectorEnv(envs, autoreset_mode=AutoresetMode[mode])


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
async def test_vector_environments(mode: str) -> None:
    make = functools.partial(make_vector, mode)
    async with collecting([make], make_policy(), frames_per_batch=64, cat_results=-1) as collector:
        batch = await anext(collector)
        assert batch.batch_size == (2, 32)
        assert (batch["marks"] == 0).all()
        for row, length in zip(batch.unbind(0), LENGTHS, strict=True):
            if mode == "NEXT_STEP":
                skipped = ~row["collector", "mask"]
                assert skipped[length :: length + 1].all()
                assert skipped.sum() == 32 // (length + 1)
                row = row[~skipped]
            then, after = row["observation"][:, 2], row["next", "observation"][:, 2]
            steps = torch.arange(len(row)) % length
            assert torch.equal(then, steps.float())
            assert torch.equal(after, steps + 1.0), "the last observation of an episode is its own"
            assert torch.equal(row["next", "done"].view(-1), steps + 1 == length)
            assert torch.equal(row["observation"][:, 1], (torch.arange(len(row)) // length).float())
            ids = row["collector", "traj_ids"]
            assert torch.equal(ids[1:] != ids[:-1], steps[1:] == 0)


async def test_an_episode_of_a_vector_environment_cannot_be_cut() -> None:
    with pytest.raises(InvalidArgumentError, match=r"AutoresetMode\.DISABLED"):
        async with collecting([functools.partial(make_vector, "NEXT_STEP")], max_frames_per_traj=2):
            pass
    make = functools.partial(make_vector, "DISABLED")
    async with collecting([make], max_frames_per_traj=2, cat_results=-1) as collector:
        batch = await anext(collector)
        assert torch.equal(batch["next", "truncated"], batch["next", "step_count"] == 2)


def make_torchrl() -> Any:
    """torchrl's CartPole, with transforms."""
    from torchrl.envs import GymEnv, RewardScaling, StepCounter, TransformedEnv

    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter(10))
    return env.append_transform(RewardScaling(0.0, 3.0))


def make_cartpole() -> Any:
    """Gymnasium's."""
    return gym.make("CartPole-v1")


class Steering(torch.nn.Module):
    """Balances a little; takes CartPole's observation."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., 2] > 0).long()


def make_steering() -> Any:
    """A policy."""
    return TensorDictModule(Steering(), in_keys=["observation"], out_keys=["action"])


async def test_torchrls_environments() -> None:
    pytest.importorskip("torchrl")
    options: dict[str, Any] = {"frames_per_batch": 40, "cat_results": 0}
    async with collecting([make_torchrl] * 2, make_steering(), **options) as collector:
        await collector.set_seed(1)
        batch = await anext(collector)
    assert batch["next", "step_count"].max() == 10
    assert torch.equal(batch["next", "truncated"], batch["next", "step_count"] == 10)
    assert (batch["next", "reward"] == 3).all()
    done = batch["next", "done"].view(-1)
    goes_on = ~done[:-1]
    assert torch.equal(
        batch["observation"][1:20][goes_on[:19]], batch["next", "observation"][:19][goes_on[:19]]
    )


async def test_the_same_frames_as_torchrls_collector() -> None:
    collectors = pytest.importorskip("torchrl.collectors")
    theirs = collectors.Collector(
        make_torchrl(),
        make_steering(),
        frames_per_batch=60,
        total_frames=60,
        auto_register_policy_transforms=False,
    )
    theirs.set_seed(7)
    (expected,) = list(theirs)
    theirs.shutdown()
    async with collecting([make_torchrl], make_steering(), frames_per_batch=60, cat_results=0) as collector:
        await collector.set_seed(7)
        found = await anext(collector)
    keys = {key for key in expected.keys(True, True) if key[-1] != "traj_ids"}
    assert keys <= set(found.keys(True, True))
    for key in keys:
        assert found[key].shape == expected[key].shape, key
        assert found[key].dtype == expected[key].dtype, key


class Boxes(gym.Env[Any, Any]):
    """Observes a dictionary, and acts in a box."""

    observation_space = gym.spaces.Dict(
        {"image": gym.spaces.Box(0, 255, (84, 84, 4), np.uint8), "place": gym.spaces.Box(-1, 1, (2,))}
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self) -> None:
        self.place = np.zeros(2)
        self.image = np.zeros((84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """In the middle."""
        super().reset(seed=seed)
        self.image[:] = 0
        return {"image": self.image, "place": self.place}, {}

    def step(self, action: Any) -> Any:
        """The image is changed where it is."""
        assert action.shape == (2,)
        self.image += 1
        return {"image": self.image, "place": self.place}, 1.0, False, False, {}


async def test_dictionaries_and_images() -> None:
    async with collecting([Boxes] * 2, cat_results=-1) as collector:
        batch = await anext(collector)
    assert batch["image"].shape == (20, 84, 84, 4)
    assert batch["image"].dtype is torch.uint8
    assert batch["place"].dtype is torch.float32
    steps = torch.arange(10).repeat(2)
    assert torch.equal(batch["image"][:, 0, 0, 0], steps.byte())
    assert torch.equal(batch["next", "image"][:, 5, 5, 1], (steps + 1).byte())


OBSERVATIONS: dict[str, tuple[Any, set[Any]]] = {
    "one": (0, {"observation"}),
    "tuple": ((0, {"a": 0}), {"observation_0", ("observation_1", "a")}),
    "dict": ({"a": 0, "b": {"c": 0}}, {"a", ("b", "c")}),
    "three levels": ({"a": {"b": {"c": 0, "d": {"e": 0}}}}, {("a", "b", "c"), ("a", "b", "d", "e")}),
    "tuple in dicts": ({"a": {"b": (0, 0)}, "c": (0,)}, {("a", "b_0"), ("a", "b_1"), "c_0"}),
    "named observation": ({"observation": {"a": 0}, "goal": 0}, {("observation", "a"), "goal"}),
}


@pytest.mark.parametrize(("observation", "keys"), OBSERVATIONS.values(), ids=OBSERVATIONS)
async def test_names_of_observations(observation: Any, keys: set[Any]) -> None:
    class Observing(AsyncCounting):
        async def reset(self, *, seed: int | None = None) -> Any:
            return observation, {}

        async def step(self, action: Any) -> Any:
            return observation, 1.0, False, False, {}

    async with Collector(Observing, frames_per_batch=3) as collector:
        batch = await anext(collector)
    others = {"done", "terminated", "truncated"}
    found = set(batch.keys(True, True))
    assert {key for key in found if "next" not in key and "collector" not in key} - others == {
        *keys,
        "action",
        "policy_version",
    }
    after = set(batch["next"].keys(True, True))
    assert after - others == {*keys, "reward", "policy_version"}


def test_what_is_no_environment() -> None:
    with pytest.raises(InvalidArgumentError, match=r"int: expected an environment with reset\(\)"):
        adapt(3)
    env = adapt(AsyncCounting())
    assert adapt(env) is env


@pytest.mark.parametrize("public", [False, True], ids=["without checks", "with public methods only"])
@pytest.mark.parametrize("nested", [{}, {("agents",): (3,), ("next", "agents"): (3,), ("absent",): (2,)}])
def test_a_batch_is_assembled_as_tensordict_would(
    monkeypatch: pytest.MonkeyPatch, nested: Nested, public: bool
) -> None:
    if public:
        monkeypatch.setattr(env, "_new_unchecked", None)
    shapes: dict[Key, tuple[int, ...]] = {
        ("agents", "obs"): (2, 5, 3, 4),
        ("next", "agents", "obs"): (2, 5, 3, 4),
        "done": (2, 5, 1),
        ("next", "done"): (2, 5, 1),
        ("collector", "traj_ids"): (2, 5),
    }
    fields: Fields = {key: torch.rand(shape) for key, shape in shapes.items()}
    made, expected = (make(fields, (2, 5), nested) for make in (assemble, unflatten))
    assert list(made.keys(True)) == list(expected.keys(True))
    for key in made.keys(True):
        one: Any = made.get(key)
        other: Any = expected.get(key)
        if isinstance(one, TensorDict):
            assert one.batch_size == other.batch_size, key
        else:
            assert one is other
    assert (made.batch_size, made.device, made.names) == (expected.batch_size, None, expected.names)
    made["more"] = torch.zeros(2, 5)
    first: Any = made[0]
    both: Any = torch.stack([made, made], 0)
    assert (first.batch_size, both.batch_size) == ((5,), (2, 2, 5))
    with pytest.raises(RuntimeError):
        made["wrong"] = torch.zeros(3)


def test_a_prepared_batch_is_taken_only_if_it_fits() -> None:
    joiner = BatchJoiner("stack")
    fields: Fields = {("agents", "obs"): torch.rand(5, 3, 4), "done": torch.rand(5, 1)}
    part = Part.of(unflatten(fields, (5,), {("agents",): (3,)}))
    both: list[Nested] = [{("agents",): (3,)}, {}]
    for nested in both:
        joiner.prepare(part, 2, {("agents",): (3,)})
        found = joiner.join([part, part], nested)
        agents: Any = found.get("agents")
        assert agents.batch_size == (2, 5, *nested.get(("agents",), ()))
        assert all((found.get(key)[1] == value).all() for key, value in fields.items())
    joiner.prepare(part, 3, {})
    assert joiner.join([part, part], {}).batch_size == (2, 5)
    held = [joiner.join([part, part], {}) for _ in range(3)]
    assert len({each["done"].data_ptr() for each in held}) == 3
