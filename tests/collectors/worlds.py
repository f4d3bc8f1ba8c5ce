"""Environments and policies that say what was done to them. Imported by workers too."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np

from tests.kit import marked

__all__ = ["AsyncCounting", "AsyncUnready", "Counting", "Failing", "Odd", "Unready", "make_policy"]


class Counting(gym.Env[Any, Any]):
    """Observes (its name, the episode, the step, the seed); an episode ends after ``length`` steps."""

    def __init__(self, name: int = 0, length: int = 7) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.name = name
        self.length = length
        self.episode = -1
        self.count = 0
        self.seed = -1

    def _observation(self) -> Any:
        return np.array([self.name, self.episode, self.count, self.seed], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """The next episode; the first one, if there is a seed."""
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode += 1
        self.count = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        """One more; the reward is the action."""
        assert isinstance(action, int | np.integer), f"an action of type {type(action)}"
        self.count += 1
        return self._observation(), float(action), self.count >= self.length, False, {}


class AsyncCounting:
    """The same, with a wait in each step."""

    def __init__(self, name: int = 0, length: int = 7, seconds: float = 0.0) -> None:
        self._env = Counting(name, length)
        self._seconds = seconds
        self.action_space = self._env.action_space
        self.closed = False

    async def reset(self, *, seed: int | None = None) -> Any:
        """See :class:`Counting`."""
        await asyncio.sleep(self._seconds)
        return self._env.reset(seed=seed)

    async def step(self, action: Any) -> Any:
        """See :class:`Counting`."""
        await asyncio.sleep(self._seconds)
        return self._env.step(action)


class Unready(Counting):
    """Fails in the next ``failures`` resets."""

    failures = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """See :class:`Counting`."""
        if self.failures:
            self.failures -= 1
            raise Odd("in reset", 1)
        return super().reset(seed=seed)


class AsyncUnready(AsyncCounting):
    """The same, with coroutines."""

    failures = 0

    async def reset(self, *, seed: int | None = None) -> Any:
        """See :class:`Unready`."""
        if self.failures:
            self.failures -= 1
            raise Odd("in reset", 1)
        return await super().reset(seed=seed)


class Odd(Exception):
    """An error of the environment's own, which takes more than its message."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.number = number


class Failing(Counting):
    """Fails in a phase: ``init``, ``reset`` or ``step``, in one of several ways, and then in ``close``."""

    def __init__(self, phase: str, how: str = "raise", name: int = 0) -> None:
        super().__init__(name)
        self.phase, self.how = phase, how
        self._reach("init")

    def _reach(self, phase: str) -> None:
        if phase != self.phase:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "exit":
            os._exit(3)
        more = "x" * 2_000_000 if self.how == "at length" else ""
        raise Odd(f"in {phase}{more}", 13)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """See :class:`Counting`."""
        self._reach("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        """See :class:`Counting`."""
        if self.count == 3:
            self._reach("step")
        return super().step(action)

    def close(self) -> None:
        """See :class:`Counting`."""
        super().close()
        raise RuntimeError("an error of close(), which must not hide the first one")


def make_policy() -> Any:
    """A policy of version 0."""
    return marked.make_policy(actions=3)
