"""A collector leaves the attributes of an environment as Python has laid them out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from torch import Tensor

from aiosync.collectors import Collector
from aiosync.collectors.adapters import adapt
from aiosync.collectors.direct_frames import GymnasiumFrames
from aiosync.collectors.gymnasium_env import GymnasiumEnv, VectorEnv
from tests.collectors.test_direct_frames import count_frames
from tests.collectors.worlds import Counting

FRAMES = 64


def has_own_dict(given: Any) -> bool:
    """Whether the object's attributes are in a dict of their own. Python 3.11 keeps them in the object until
    something, as ``vars()`` and ``dir()`` do, asks for the dict; each access takes longer from then on.
    After this function it has one."""
    before = gc.get_referents(given)
    return any(each is given.__dict__ for each in before)


def first_action(observation: Tensor) -> Tensor:
    """A policy."""
    return observation[..., 0].long() * 0


def test_the_probe_sees_what_asks_for_the_dict() -> None:
    asks: list[Callable[[Any], Any]] = [vars, dir]
    for ask in asks:
        env = SyncVectorEnv([Counting] * 2)
        assert not has_own_dict(env)
        env = SyncVectorEnv([Counting] * 2)
        ask(env)
        assert has_own_dict(env)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: SyncVectorEnv([Counting] * 2), id="vector"),
        pytest.param(Counting, id="one environment"),
        pytest.param(lambda: gym.wrappers.TimeLimit(Counting(), 5), id="wrapper"),
    ],
)
async def test_environment_gets_no_dict_of_its_own(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = count_frames(GymnasiumFrames, monkeypatch)
    made: list[Any] = []

    def environment() -> Any:
        made.append(make())
        return made[0]

    async with Collector(environment, first_action, frames_per_batch=16, total_frames=FRAMES) as collector:
        await collector.set_seed(0)
        async for _ in collector:
            pass
        assert len(made) == 1
        assert sum(written) > 0
        assert not has_own_dict(made[0])  # before close(), which may do anything


class Proxy(gym.Env[Any, Any]):
    """An environment that has an answer to every name, and properties that may not be read."""

    action_space = gym.spaces.Discrete(2)

    def _refuse(self) -> Any:
        raise AssertionError("a property ran")

    action_keys, num_envs = property(_refuse), property(_refuse)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: name


class Listing:
    """A proxy that says in ``dir()`` what the other object has."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)

    def __dir__(self) -> Any:
        return dir(self._other)


class Pretending:
    """A proxy that says that it is of the other object's class."""

    def __init__(self, other: Any) -> None:
        self._other = other

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


class Forwarding:
    """A proxy whose every attribute is the other object's."""

    def __init__(self, other: Any) -> None:
        object.__setattr__(self, "_other", other)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_other"), name)


@pytest.mark.parametrize("of", [Listing, Pretending, Forwarding, weakref.proxy])
def test_a_proxy_is_of_the_kind_of_the_other_object(of: Callable[[Any], Any]) -> None:
    vector, single = VectorWrapper(SyncVectorEnv([Counting] * 2)), Counting()
    assert type(adapt(of(vector))) is VectorEnv
    assert type(adapt(of(single))) is GymnasiumEnv


def test_the_kind_of_an_environment_is_found_without_running_its_code() -> None:
    assert type(adapt(Proxy())) is GymnasiumEnv
    assert type(adapt(SyncVectorEnv([Counting] * 2))) is VectorEnv
