"""Frames that are written directly are those that are written with all their fields."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from aiosync import InvalidArgumentError
from aiosync.collectors import Collector, MultiCollector, turns
from aiosync.collectors.direct_frames import DirectFrames, GymnasiumFrames, Run, TensorDictFrames
from tests.collectors.worlds import Counting
from tests.kit.clock import PATIENCE

ROWS = 3


class Habit(Counting):
    """A :class:`Counting` whose answers are of an unusual kind. Its observation depends on the actions."""

    def __init__(self, habit: str = "", length: int = 7, since: int = 0) -> None:
        super().__init__(length=length)
        self._habit = habit
        self._since = since  # the step of the first unusual answer
        self._memory = np.zeros(4, np.float32)
        self._sum = self._steps = 0

    def step(self, action: Any) -> Any:
        """See :class:`Counting`."""
        self._sum += int(action)
        self._steps += 1
        seen, reward, over, cut, info = super().step(int(action))
        seen[0] = self._sum % 5
        if self._steps < self._since:
            return seen, reward, over, cut, info
        if self._habit == "float64":
            seen = seen.astype(np.float64)
        elif self._habit == "read-only":
            seen.flags.writeable = False
        elif self._habit == "one memory":
            self._memory[:] = seen
            seen = self._memory
        elif self._habit == "numbers":
            reward, over, cut = np.int64(reward), np.bool_(over), 0
        elif self._habit == "float flags":
            over, cut = float(over), float(cut)
        elif self._habit == "tensors":
            seen = torch.from_numpy(seen)
        elif self._habit == "other shape":
            seen = seen[:3]
        elif self._habit == "none":
            return None, reward, over, cut, info
        elif self._habit == "no number":
            reward = "much"
        elif self._habit == "one None" and self._steps == self._since:
            return None
        elif self._habit == "six items":
            return seen, reward, over, cut, info, "more"
        elif self._habit == "list":
            return [seen, reward, over, cut, info]
        return seen, reward, over, cut, info


class Net(nn.Module):
    """Chooses by the observation."""

    def __init__(self, actions: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(4, actions, bias=False)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(4 * actions).view(actions, 4).sin())

    def forward(self, observation: Tensor) -> Tensor:
        """Return one action per row."""
        action: Tensor = self.net(observation).argmax(-1)
        return action


class NetOfTensorDict(Net):
    """The same, for which a frame's fields are put into a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action."""
        return tensordict.set("action", super().forward(tensordict["observation"]))


def _vector(mode: AutoresetMode) -> gym.vector.VectorEnv[Any, Any, Any]:
    return SyncVectorEnv(
        [functools.partial(Habit, length=3 + row) for row in range(ROWS)], autoreset_mode=mode
    )


ENVS_OF_ROWS = tuple(AutoresetMode.__members__)
ENVS: dict[str, Any] = {
    **{mode.name: functools.partial(_vector, mode) for mode in AutoresetMode},
    "single": Habit,
    **{
        name: functools.partial(Habit, name)
        for name in ("float64", "read-only", "one memory", "numbers", "list", "six items")
    },
    "six items later": functools.partial(Habit, "six items", since=4),
    "float flags": functools.partial(Habit, "float flags"),
    "tensors": functools.partial(Habit, "tensors", since=4),
}
IN_THE_GENERAL_WAY = ("tensors", "float flags", "six items", "six items later")
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no tags": {"track_policy_version": False},
    "new episodes": {"reset_at_each_iter": True},
    "no reset": {"reset_when_done": False, "set_truncated": True},
    "several frames": {"frames_per_batch": 1},
}


def count_frames(kind: type[DirectFrames], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames were written at a time, by frames of this kind."""
    written: list[int] = []
    run = kind.run

    def counting(frames: Any, policy: Any, place: int, *more: Any) -> Run:
        done = run(frames, policy, place, *more)
        written.append(done.end + done.begun - place)
        return done

    monkeypatch.setattr(kind, "run", counting)
    return written


async def _batches(env: Any, policy: Any, *, interrupted: bool = False, **options: Any) -> list[Any]:
    given = {"frames_per_batch": 30, "timeout": PATIENCE} | options
    found = []
    async with Collector(env, policy, **given) as collector:
        await collector.set_seed(0)
        for number in range(4):
            found.append((await anext(collector)).clone())
            if interrupted and number == 1:
                await collector.reset()
            if number == 2:
                await collector.update_policy_weights_()
    return found


def _assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.batch_size == other.batch_size
        keys = set(one.keys(True, True))
        assert keys == set(other.keys(True, True))
        for key in keys:
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize(
    ("env", "options"),
    # Gymnasium's vector environments take no step after the end of an episode.
    [(env, name) for env in ENVS for name in OPTIONS if name != "no reset" or env not in ENVS_OF_ROWS],
)
async def test_frames_are_those_of_a_policy_that_takes_tensordicts(env: str, options: str) -> None:
    expected = await _batches(ENVS[env], NetOfTensorDict(), **OPTIONS[options])
    _assert_same(await _batches(ENVS[env], Net(), **OPTIONS[options]), expected)
    module = TensorDictModule(Net(), in_keys=["observation"], out_keys=["action"])
    _assert_same(await _batches(ENVS[env], module, **OPTIONS[options]), expected)


@pytest.mark.parametrize("env", [name for name in ENVS if name not in IN_THE_GENERAL_WAY])
async def test_most_frames_are_written_directly(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = count_frames(GymnasiumFrames, monkeypatch)
    (first, *_) = await _batches(ENVS[env], Net())
    assert sum(written) > 0.3 * 4 * first.shape[-1]


@pytest.mark.parametrize("since", [2, 9])
async def test_a_step_that_returns_nothing_is_an_error(since: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other steps of the batch were taken before the event loop had a turn."""
    monkeypatch.setattr(turns, "_OFTEN", 0.0)
    with pytest.raises(TypeError, match="None"):
        await _batches(functools.partial(Habit, "one None", since=since), Net())


def _seen_copy(vector: Any) -> list[bool]:
    """What ``vector.copy`` is at each step of its first environment."""
    found: list[bool] = []
    step = vector.envs[0].step

    def watched(action: Any) -> Any:
        found.append(vector.copy)
        return step(action)

    vector.envs[0].step = watched
    return found


@pytest.mark.parametrize("mode", list(AutoresetMode))
async def test_only_what_leaves_a_run_is_copied_by_the_environment(
    mode: AutoresetMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector: Any = _vector(mode)
    seen, shared = _seen_copy(vector), []
    run = GymnasiumFrames.run

    def watched(frames: Any, *given: Any) -> Run:
        done = run(frames, *given)
        shared.append(np.shares_memory(done.found[0], vector._observations) or not vector.copy)
        return done

    monkeypatch.setattr(GymnasiumFrames, "run", watched)
    await _batches(vector, Net())
    assert seen.count(False) > 0.3 * len(seen)
    assert shared
    assert not any(shared)


class OtherVector(SyncVectorEnv):
    """May keep what it returns."""


@pytest.mark.parametrize("how", ["subclass", "replaced step", "made without copies"])
async def test_the_other_vector_environments_are_left_as_they_are(how: str) -> None:
    makes = [functools.partial(Habit, length=3 + row) for row in range(ROWS)]
    vector: Any = (OtherVector if how == "subclass" else SyncVectorEnv)(
        makes, copy=how != "made without copies"
    )
    seen = _seen_copy(vector)
    if how == "replaced step":
        vector.step = functools.partial(SyncVectorEnv.step, vector)
    await _batches(vector, Net())
    assert set(seen) == {how != "made without copies"}
    assert vector.copy is (how != "made without copies")


async def test_an_environment_copies_again_after_an_error() -> None:
    vector: Any = _vector(AutoresetMode.NEXT_STEP)
    step = vector.envs[0].step

    def fails(action: Any) -> Any:
        if not vector.copy:
            raise ValueError("no")
        return step(action)

    vector.envs[0].step = fails
    with pytest.raises(ValueError, match="no"):
        await _batches(vector, Net())
    assert vector.copy is True


def _torchrl(make: str) -> Any:
    envs = pytest.importorskip("torchrl.envs")
    env = envs.GymEnv("CartPole-v1", categorical_action_encoding=True)
    if make == "transformed":
        transforms = envs.Compose(envs.DoubleToFloat(), envs.RewardScaling(0.0, 2.0))
        return envs.TransformedEnv(env, transforms)
    return env


class Twice(TensorDictModule):  # type: ignore[misc]
    """Changes the observation before it chooses."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action."""
        tensordict.set("observation", tensordict["observation"] * 2)
        return super().forward(tensordict)


@pytest.mark.parametrize("options", [*sorted(OPTIONS.keys() - {"no reset"}), "random"])
@pytest.mark.parametrize("policy", [TensorDictModule, Twice])
@pytest.mark.parametrize("env", ["plain", "transformed"])
async def test_frames_of_torchrls_environments(
    env: str, policy: Any, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = OPTIONS.get(options, {"init_random_frames": 40})
    written = count_frames(TensorDictFrames, monkeypatch)
    batches = []
    for limit in (None, 10**6):  # a limit of the episodes' length adds fields, which are written one by one
        module = policy(Net(2), in_keys=["observation"], out_keys=["action"])
        torch.manual_seed(0)
        batches.append(await _batches(lambda: _torchrl(env), module, max_frames_per_traj=limit, **given))
    expected = env == "plain" and policy is TensorDictModule and options != "several frames"
    assert bool(written) is expected
    for batch in batches[1]:
        for key in ("step_count", ("next", "step_count")):
            batch.pop(key)
    _assert_same(*batches)


@pytest.mark.parametrize("env", [*ENVS_OF_ROWS, "single"])
async def test_a_reset_between_two_frames(env: str) -> None:
    expected = await _batches(ENVS[env], NetOfTensorDict(), interrupted=True)
    _assert_same(await _batches(ENVS[env], Net(), interrupted=True), expected)


@pytest.mark.parametrize(
    ("habit", "error", "message"),
    [("other shape", InvalidArgumentError, "'observation'"), ("no number", ValueError, "much")],
)
async def test_an_answer_of_another_kind_is_an_error(
    habit: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await _batches(functools.partial(Habit, habit, since=5), Net())


async def test_an_error_of_the_environment_is_its_own() -> None:
    class Nested(Habit):
        def step(self, action: Any) -> Any:
            if self.count == 3:
                waiting = asyncio.sleep(0)
                try:
                    asyncio.run(waiting)
                finally:
                    waiting.close()
            return super().step(action)

    with pytest.raises(InvalidArgumentError, match="starts an event loop"):
        await _batches(Nested, Net())


class Pushed(gym.Env[Any, Any]):
    """Observes one memory, which its actions change, and writes into its action."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = gym.spaces.Box(-9, 9, (2,), np.float32)
        self._memory = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin at the same place."""
        self._memory[:] = 1, -1
        self._count = 0
        return self._memory, {}

    def step(self, action: Any) -> Any:
        """Move."""
        self._count += 1
        self._memory[:] = self._memory / 2 + action
        reward = float(action[0])
        action[:] = 77
        return self._memory, reward, self._count >= 4, False, {}


class Returning(nn.Module):
    """Returns its parameter, the same memory each time, or its input."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self.weight = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.memory = torch.zeros(2)

    def forward(self, observation: Tensor) -> Tensor:
        """Return the action."""
        if self._what == "memory":
            return self.memory.copy_(observation * self.weight.detach())
        if self._what == "gradients":
            return observation.clone().requires_grad_()
        return self.weight if self._what == "parameter" else observation


class ReturningTensorDict(Returning):
    """The same, with a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action."""
        return tensordict.set("action", super().forward(tensordict["observation"]))


@pytest.mark.parametrize("takes", ["tensors", "tensordict"])
@pytest.mark.parametrize("what", ["parameter", "memory", "input", "gradients"])
async def test_memory_of_policy_and_environment_is_not_confused(what: str, takes: str) -> None:
    policy = Returning(what) if takes == "tensors" else ReturningTensorDict(what)
    frames: Any = torch.cat(await _batches(Pushed, policy, frames_per_batch=6), -1)
    there = torch.tensor([1.0, -1.0])
    for step in range(frames.numel()):
        frame = frames[step]
        action = {"parameter": torch.tensor([0.5, 0.25]), "memory": there * torch.tensor([0.5, 0.25])}
        assert torch.equal(frame["observation"], there)
        assert torch.equal(frame["action"], action.get(what, there))
        assert frame["next", "reward"].item() == frame["action"][0].item()
        there = there / 2 + frame["action"]
        assert torch.equal(frame["next", "observation"], there)
        if frame["next", "done"]:
            there = torch.tensor([1.0, -1.0])


class Growing(gym.Env[Any, Any]):
    """Observes one number more in each episode, and later in another dtype."""

    def __init__(self) -> None:
        self.action_space = gym.spaces.Discrete(2)
        self._episode = 0

    def _seen(self) -> Any:
        return np.full(self._episode, self._count, np.float32 if self._episode < 4 else np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        self._episode += 1
        self._count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        """Take one more step."""
        self._count += 1
        return self._seen(), 1.0, False, False, {}


class Changing(nn.Module):
    """Returns other fields in each batch of 5 frames."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action, and sometimes more."""
        batch, self.calls = self.calls // 5, self.calls + 1
        tensordict.set("action", torch.tensor(1, dtype=torch.int32 if batch == 2 else torch.int64))
        if batch not in (1, 2):
            return tensordict
        extra = torch.tensor([float(self.calls)], dtype=torch.bfloat16 if batch == 2 else torch.float32)
        return tensordict.set("extra", extra)


@pytest.mark.parametrize("multi", [False, True], ids=["here", "worker"])
async def test_batches_whose_fields_differ_from_those_of_the_batch_before(multi: bool) -> None:
    options: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 30, "timeout": PATIENCE}
    made: Any = MultiCollector([Growing], Changing(), **options) if multi else None
    made = made or Collector(Growing, Changing(), **options)
    kinds, extra = [], list[float]()
    async with made as collector:
        async for batch in collector:
            kinds.append((batch["action"].dtype, "extra" in batch.keys()))
            extra += batch["extra"].flatten().tolist() if "extra" in batch.keys() else []
    usual = torch.int64, False
    assert kinds == [usual, (torch.int64, True), (torch.int32, True), usual, usual, usual]
    assert extra == [float(call) for call in range(6, 16)]


async def test_batches_whose_observations_differ_from_those_of_the_batch_before() -> None:
    def policy(observation: Tensor) -> Tensor:
        return torch.tensor(1)

    options: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 30, "reset_at_each_iter": True}
    async with Collector(Growing, policy, **options) as collector:
        seen = [batch async for batch in collector]
    for number, batch in enumerate(seen, 1):
        expected = torch.arange(6).reshape(6, 1).expand(6, number)
        assert torch.equal(batch["observation"], expected[:5].to(batch["observation"].dtype))
        assert torch.equal(batch["next", "observation"], expected[1:].to(batch["observation"].dtype))
    assert [batch["observation"].dtype for batch in seen] == [torch.float32] * 3 + [torch.int64] * 3


class Turning(nn.Module):
    """Chooses as :class:`Net` does; from a call on, the action is of another kind."""

    def __init__(self, habit: str, since: int) -> None:
        super().__init__()
        self.choose = Net()
        self._habit, self._since, self._calls = habit, since, 0

    def act(self, observation: Tensor) -> Tensor:
        self._calls += 1
        action: Tensor = self.choose(observation)
        if self._calls < self._since or self._habit not in ("int32", "one-hot"):
            return action
        return action.to(torch.int32) if self._habit == "int32" else nn.functional.one_hot(action, 3)

    def forward(self, observation: Tensor) -> Tensor:
        """Return one action per row."""
        return self.act(observation)


class TurningTensorDict(Turning):
    """The same, with a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action."""
        return tensordict.set("action", self.act(tensordict["observation"]))


async def _outcome(env: Any, policy: nn.Module, **more: Any) -> tuple[list[Any], str]:
    """The batches of 6 frames, and the error that ends them."""
    found: list[Any] = []
    options: dict[str, Any] = {"frames_per_batch": 6, "timeout": PATIENCE, **more}
    torch.manual_seed(0)
    try:
        async with Collector(env, policy, **options) as collector:
            await collector.set_seed(0)
            while len(found) < 5:
                found.append((await anext(collector)).clone())
    except Exception as exc:  # noqa: BLE001 - it is compared
        return found, f"{type(exc).__name__}: {exc}"
    return found, ""


@pytest.mark.parametrize("since", [4, 7, 8, 13, 14])  # batches begin with steps 7, 13, ...
@pytest.mark.parametrize("habit", ["int32", "one-hot", "tensors", "other shape", "no number"])
async def test_what_changes_in_the_middle_or_at_the_start_of_a_batch(habit: str, since: int) -> None:
    env = functools.partial(Habit, habit, length=4, since=since)
    expected, error = await _outcome(env, TurningTensorDict(habit, since))
    found, message = await _outcome(env, Turning(habit, since))
    _assert_same(found, expected)
    assert message == error
    assert bool(error) is (habit != "tensors" and (since % 6 != 1 or habit in ("other shape", "no number")))


class Scoring(nn.Module):
    """Chooses as :class:`Net` does, with scores, which from a call on are of another dtype; writes into its
    input."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.choose = Net()
        self._since, self._calls = since, 0

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        self._calls += 1
        action = self.choose(observation)
        scores = self.choose.net(observation)
        observation.add_(100)
        return action, scores.to(torch.bfloat16) if self._calls >= self._since else scores

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions and scores."""
        return self.act(observation)


class ScoringTensorDict(Scoring):
    """The same, with a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add actions and scores."""
        action, scores = self.act(tensordict["observation"].clone())
        return tensordict.set("action", action).set("scores", scores)


@pytest.mark.parametrize("random", [-1, 6, 12])
@pytest.mark.parametrize("since", [1, 4, 7, 13])  # batches begin with calls 1, 7, 13
async def test_a_policy_returns_a_dtype_that_numpy_does_not_have(since: int, random: int) -> None:
    module = TensorDictModule(Scoring(since), in_keys=["observation"], out_keys=["action", "scores"])
    expected, error = await _outcome(Habit, ScoringTensorDict(since), init_random_frames=random)
    found, message = await _outcome(Habit, module, init_random_frames=random)
    _assert_same(found, expected)
    assert message == error
    assert bool(error) is (since == 4)


@pytest.mark.parametrize("habit", ["int32", "one-hot", ""])
async def test_a_policy_writes_into_its_input_and_other_fields_begin(habit: str) -> None:
    class Writing(Turning):
        def forward(self, observation: Tensor) -> Tensor:
            action = self.act(observation)
            observation.add_(100)
            return action

    expected, _ = await _outcome(Habit, TurningTensorDict(habit, 1), init_random_frames=6)
    found, _ = await _outcome(Habit, Writing(habit, 1), init_random_frames=6)
    assert len(found) == 5
    _assert_same(found, expected)


async def test_an_observation_that_is_none_is_an_error_of_its_own() -> None:
    env = functools.partial(Habit, "none", since=5)
    with pytest.raises(TypeError, match="object"):
        await _batches(env, Net())
