"""Drawn environments, policies and calls: frames that are written directly are those of the general way.

The same policy acts once as a module of the observation, whose frames are written directly where they can be,
and once as a module of a TensorDict, whose frames never are.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn

from aiosync.collectors.adapters import adapt
from aiosync.collectors.batch_buffers import BatchBuffer, BatchBuffers
from aiosync.collectors.batch_config import BatchConfig
from aiosync.collectors.command_pipe import Collect
from aiosync.collectors.config import PolicyConfig, WorkerDevices
from aiosync.collectors.direct_frames import GymnasiumFrames
from aiosync.collectors.partial_batch import PartialBatch
from aiosync.collectors.policy import Acting, adapt_policy
from aiosync.collectors.rollout import Rollout
from aiosync.collectors.turns import NextTurn

Mode = Literal["", "NEXT_STEP", "SAME_STEP", "DISABLED"]
SEEN = ["", "one memory", "float64", "read-only", "reversed", "tensor", "int16", "shorter"]
ENDS = ["", "numpy", "float", "none", "0-d", "two", "vector reward", "text"]
KINDS = ["", "int32", "one-hot", "bool", "one memory"]
SCORES = ["", "float32", "bfloat16 in turns", "float64 in turns"]
CALLS = ["collect", "collect", "version", "reset", "seeded reset", "restart", "state", "load", "end early"]


@dataclass(frozen=True)
class World:
    """An environment. Its unusual answers begin with a step."""

    mode: Mode  # "": no vector environment
    lengths: Sequence[int]  # of the episodes, in turn
    seen: str  # the kind of its observations
    ends: str  # the kind of its rewards and flags
    since: int


@dataclass(frozen=True)
class Mind:
    """A policy. In every other period of calls it returns unusual fields."""

    kind: str
    scores: str  # fields beside the action
    period: int
    writes: bool  # into its input
    keys: bool  # it is a TensorDictModule


class Drawn(gym.Env[Any, Any]):
    """Observes what has happened so far, and writes down its actions."""

    def __init__(self, world: World, row: int, actions: list[Any]) -> None:
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self._world, self._row, self._actions = world, row, actions
        self._memory = np.zeros(4, np.float32)
        self._episode, self._steps, self._sum = -1, 0, 0

    def _seen(self) -> Any:
        value = 1000 * self._row + 100 * self._episode + 10 * self._count + self._sum % 7
        seen = np.arange(4, dtype=np.float32) + value
        kind = self._world.seen
        if self._world.mode or self._steps < self._world.since:
            return seen
        if kind == "one memory":
            self._memory[:] = seen
            return self._memory
        if kind == "read-only":
            seen.flags.writeable = False
        kinds: dict[str, Any] = {
            "float64": seen.astype(np.float64),
            "reversed": seen[::-1].copy()[::-1],
            "tensor": torch.from_numpy(seen.copy()),
            "int16": seen.astype(np.int16),
            "shorter": seen[:-1],
        }
        return kinds.get(kind, seen)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin the next episode, or the first one."""
        self._episode = 0 if seed is not None else self._episode + 1
        self._count = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        """Take a step."""
        self._actions.append((self._row, type(action), np.array(action).dtype, np.array(action).tolist()))
        self._steps, self._count = self._steps + 1, self._count + 1
        self._sum += int(action)
        lengths = self._world.lengths
        ends = self._count >= lengths[self._episode % len(lengths)]
        over, cut = ends and self._episode % 2 == 0, ends and self._episode % 2 == 1
        answer: tuple[Any, Any, Any] = float(self._sum), over, cut
        if not self._world.mode and self._steps >= self._world.since:
            answer = self._unusual(*answer)
        return self._seen(), *answer, {}

    def _unusual(self, reward: float, over: bool, cut: bool) -> tuple[Any, Any, Any]:
        kinds: dict[str, tuple[Any, Any, Any]] = {
            "numpy": (np.float64(reward), np.bool_(over), np.bool_(cut)),
            "float": (reward, float(over), float(cut)),
            "none": (reward, over or None, cut or None),
            "0-d": (np.array(reward), np.array(over), np.array(cut)),
            "two": (int(reward), 2 * over, cut),
            "vector reward": (np.array([reward]), over, cut),
            "text": ("much", over, cut),
        }
        return kinds.get(self._world.ends, (reward, over, cut))


class Acts(nn.Module):
    """The policy as a module of the observation; notes what it gets."""

    def __init__(self, mind: Mind, rows: tuple[int, ...]) -> None:
        super().__init__()
        self._mind, self._rows = mind, rows
        self._memory = torch.zeros(rows, dtype=torch.int64)
        self.calls = 0
        self.got: list[Tensor] = []

    def act(self, observation: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        self.got.append(observation.clone())
        unusual = self.calls // self._mind.period % 2 == 1
        value = observation.reshape(*self._rows, -1).double().sum(-1) * 1.7 + self.calls
        action, kind = value.long() % 3, self._mind.kind
        if kind == "one memory":
            action = self._memory.copy_(action)
        elif unusual:
            kinds = {
                "int32": action.int(),
                "one-hot": nn.functional.one_hot(action, 3),
                "bool": action > 0,
            }
            action = kinds.get(kind, action)
        if self._mind.writes:
            observation.add_(1)
        if not self._mind.scores:
            return (action,)
        dtype = getattr(torch, self._mind.scores.split()[0])
        turns = "turns" in self._mind.scores
        scores = torch.full((*self._rows, 2), float(self.calls))
        return action, scores.to(dtype) if unusual or not turns else scores

    def forward(self, observation: Tensor) -> Any:
        """Return the action, and scores."""
        found = self.act(observation)
        return found if len(found) > 1 else found[0]


class ActsOnTensorDict(Acts):
    """The same, with a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add the action, and scores."""
        for key, value in zip(("action", "scores"), self.act(tensordict["observation"]), strict=False):
            tensordict.set(key, value)
        return tensordict


class Run:
    """One rollout: what its environment and its policy got, and the batches."""

    def __init__(self, world: World, mind: Mind, config: BatchConfig, *, directly: bool) -> None:
        self.actions: list[Any] = []
        make = [functools.partial(Drawn, world, row, self.actions) for row in range(2)]
        mode = AutoresetMode[world.mode] if world.mode else None
        env = adapt(make[0]() if mode is None else SyncVectorEnv(make, autoreset_mode=mode), None)
        env.env.action_space.seed(3)
        self.policy = (Acts if directly else ActsOnTensorDict)(mind, env.shape)
        keys = ["action", "scores"][: 1 + bool(mind.scores)]
        by_keys = directly and (mind.keys or bool(mind.scores))
        given = TensorDictModule(self.policy, ["observation"], keys) if by_keys else self.policy
        actor = adapt_policy(given, PolicyConfig(), WorkerDevices(), env)
        acting, self.version = Acting(InteractionType.RANDOM), 0
        direct = not config.step_limit and not config.compact_obs
        self._rollout = Rollout(0, env, actor, acting, config, 1, 3, lambda: self.version, direct)
        self._buffers = BatchBuffers(None, len(env.shape), env.nested, env.device)
        self._env, self._config = env, config
        self._saved: dict[str, Any] | None = None
        self.found: list[Any] = []
        self.error = ""

    async def play(self, batches: Sequence[tuple[int, bool, Sequence[str]]]) -> None:
        """Collect batches of so many steps, some of random actions, with calls in between."""
        torch.manual_seed(0)
        try:
            for number, (steps, at_random, calls) in enumerate(batches):
                width = max(1, 2 * len(self._env.shape))
                batch = PartialBatch(Collect(number, steps * width, at_random), self._buffers, width)
                for call in calls:
                    await self._call(call, batch)
                while batch.has_room:
                    await self._rollout.collect(batch, NextTurn(math.inf, math.inf))
                self._close(batch)
        except Exception as exc:  # noqa: BLE001 - it is compared
            self.error = f"{type(exc).__name__}: {exc}"

    async def _call(self, call: str, batch: PartialBatch) -> None:
        rollout = self._rollout
        if call == "collect" and batch.has_room:
            await rollout.collect(batch, NextTurn(0.0, 0.0))  # one frame
        elif call == "version":
            self.version += 1
        elif call.endswith("reset"):
            await rollout.reset(7 if "seeded" in call else None)
        elif call == "restart":
            await rollout.restart(50)
        elif call == "state":
            self._saved = state = await rollout.state()
            state["env"] = None  # a new episode begins when it is loaded
            self.found.append(
                {str(key): value for key, value in copy.deepcopy(state).items() if key != "env"}
            )
        elif call == "load" and self._saved is not None:
            await rollout.load_state(self._saved)
        elif call == "end early":
            batch.end_early()

    def _close(self, batch: PartialBatch) -> None:
        ends = self._env.truncated if self._config.set_truncated else ()
        batch.close(truncate=[key for pair in ends for key in pair])
        memory = self._buffers[batch.buffer]
        assert isinstance(memory, BatchBuffer)
        data = memory.part(batch.steps, self._env.shape).data.clone()
        self.found.append({"data": data, "lengths": batch.lengths, "cut": self._rollout.take_cut()})
        memory.segment.buffer.fill_(0xA5)  # nothing of it may be in a later batch
        self._buffers.release([batch.buffer])


def same(one: Any, other: Any) -> bool:
    """Whether these are equal, with types and dtypes."""
    if isinstance(one, TensorDictBase):
        keys = set(one.keys(True, True))
        return keys == set(other.keys(True, True)) and all(same(one[key], other[key]) for key in keys)
    if isinstance(one, Tensor | np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


worlds = st.builds(
    World,
    mode=st.sampled_from(["", "", "NEXT_STEP", "SAME_STEP", "DISABLED"]),
    lengths=st.lists(st.sampled_from([1, 2, 3, 5, 8, 1000]), min_size=1, max_size=3),
    seen=st.sampled_from(SEEN),
    ends=st.sampled_from(ENDS),
    since=st.sampled_from([0, 5, 7, 17]),
)
minds = st.builds(
    Mind,
    kind=st.sampled_from(KINDS),
    scores=st.sampled_from(SCORES),
    period=st.sampled_from([1, 5, 6, 7, 1000]),
    writes=st.booleans(),
    keys=st.booleans(),
)
configs = st.builds(
    BatchConfig,
    reset_at_each_iter=st.booleans(),
    set_truncated=st.booleans(),
    trajs_per_batch=st.sampled_from([None, 3]),
)
batches = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 5, 6, 6, 7]), st.booleans(), st.lists(st.sampled_from(CALLS), max_size=5)
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=300)
@given(world=worlds, mind=minds, config=configs, batches=batches)
async def test_directly_as_in_the_general_way(
    world: World, mind: Mind, config: BatchConfig, batches: list[tuple[int, bool, list[str]]]
) -> None:
    general, direct = (Run(world, mind, config, directly=directly) for directly in (False, True))
    await general.play(batches)
    await direct.play(batches)
    assert direct.error == general.error
    assert direct.actions == general.actions
    assert same(direct.policy.got, general.policy.got)
    assert same(direct.found, general.found)


async def test_frames_written_directly_have_the_version_that_acted() -> None:
    world, mind = World("NEXT_STEP", [3], "", "", 0), Mind("", "float32", 1000, True, True)
    played = Run(world, mind, BatchConfig(), directly=True)
    await played.play([(6, False, []), (6, False, ["collect", "version", "collect", "collect", "version"])])
    assert not played.error
    first, second = (batch["data"]["policy_version"][0].tolist() for batch in played.found)
    assert first == [0] * 6
    assert second == [0, 1, 1, 2, 2, 2]


async def test_frames_of_these_are_written_directly(monkeypatch: Any) -> None:
    """Otherwise the test before this one would compare nothing."""
    lengths: list[int] = []
    run = GymnasiumFrames.run

    def count(self: GymnasiumFrames, policy: Any, place: int, end: int, turn: Any) -> Any:
        done = run(self, policy, place, end, turn)
        lengths.append(done.end - place)
        return done

    monkeypatch.setattr(GymnasiumFrames, "run", count)
    world, mind = World("NEXT_STEP", [3], "", "", 0), Mind("", "float32", 1000, True, True)
    played = Run(world, mind, BatchConfig(), directly=True)
    await played.play([(6, False, [])] * 4)
    assert not played.error
    assert sum(lengths) == 4 * 6 - 1  # all but the first frame
