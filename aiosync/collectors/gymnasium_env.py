"""The adapters for Gymnasium's environments, and for those that have coroutines instead of its methods."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiosync.collectors.batch_config import BatchConfig
from aiosync.collectors.env import (
    ENDS,
    Env,
    Values,
    as_array,
    as_tensor,
    call_env,
    default_float,
    value_of,
)
from aiosync.errors import InvalidArgumentError

_TAKEN = {*ENDS, "action", "reward", "next", "collector", "policy_version"}
"""Names at the root of a frame that observations cannot have."""


def _observation_fields(found: object, key: tuple[str, ...] = ()) -> Values:
    """Return the leaves of an observation. Entry ``i`` of a tuple has the tuple's name and ``_i``."""
    if isinstance(found, Mapping):
        entries = [((*key, name), value) for name, value in found.items()]
    elif isinstance(found, tuple):
        *outer, last = key or ("observation",)
        entries = [((*outer, f"{last}_{i}"), value) for i, value in enumerate(found)]
    else:
        name = key if len(key) > 1 else key[0] if key else "observation"
        return {name: value_of(found)}
    return {name: leaf for key, value in entries for name, leaf in _observation_fields(value, key).items()}


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value)


def _flags_of(value: Any) -> np.ndarray[Any, Any]:
    """Return booleans as a column."""
    found: np.ndarray[Any, Any] = _numbers(value).astype(np.bool_, copy=False)[..., None]
    return found


def copied(found: Any) -> Any:
    """Return what an environment's ``step`` returned, with a copy of the observation."""
    observed, *others = found
    return observed.copy() if type(observed) is np.ndarray else copy.deepcopy(observed), *others


_FALSE, _TRUE = np.array([False]), np.array([True])


def _is_replaced(env: Any, name: str) -> bool:
    """Whether the object has another method of this name than its class."""
    # Not vars(env): see adapters._has().
    return getattr(getattr(env, name, None), "__func__", None) is not getattr(type(env), name, None)


def _end_fields(terminated: Any, truncated: Any, shape: tuple[int, ...]) -> Values:
    if not shape:  # shared constants: the fields of a frame are never written into
        over, cut = _TRUE if terminated else _FALSE, _TRUE if truncated else _FALSE
        return {"done": over if terminated else cut, "terminated": over, "truncated": cut}
    over, cut = _flags_of(terminated), _flags_of(truncated)
    return {"done": over | cut, "terminated": over, "truncated": cut}


class GymnasiumEnv(Env):
    """A single Gymnasium environment."""

    def __init__(self, env: Any, device: torch.device | None = None) -> None:
        self.env = env
        self.device = device
        self._seed: int | None = None
        self._choices: int | None = None  # how many actions a Discrete space has
        space = getattr(env, "single_action_space", None) or getattr(env, "action_space", None)
        if space is not None and type(space).__name__ == "Discrete":
            self._choices = int(space.n)

    async def reset(self) -> Values:
        return self._reset_fields(call_env(self.env.reset, **self._pop_seed()))

    async def step(self, step: Values) -> Values:
        return self.fields_of(call_env(self.act, step))

    def act(self, step: Values) -> Any:
        """Take the action in ``step``. Returns what the environment returns."""
        return self.env.step(self._given(as_array(step["action"])))

    def stop_copying(self) -> bool:
        """Let the environment return the same memory at each step, if that is faster. Returns whether it
        does: then what it returned last has to be copied, by :func:`copied`, before :meth:`copy_again`."""
        return False

    def copy_again(self) -> None:
        """End what :meth:`stop_copying` has begun."""

    def observed(self, current: Values) -> Tensor:
        """Return a copy of the observation: all that some policies need of what the next step begins with.
        They may write into it."""
        return as_tensor(current["observation"]).clone()

    def fields_of(self, found: Any) -> Values:
        """Return the fields in what the environment's ``step`` returned."""
        return self._step_fields(found)

    def set_seed(self, seed: int) -> None:
        self._seed = seed
        space = getattr(self.env, "action_space", None)
        if space is not None:
            space.seed(seed)

    def random_action(self, current: Values) -> Values:
        action = self.env.action_space.sample()
        found = np.array(action) if isinstance(action, np.ndarray | np.generic | int | float) else None
        if found is None:
            raise InvalidArgumentError(
                f"a random action of {self.env.action_space}: expected a space of arrays or numbers, as Box, "
                "Discrete, MultiDiscrete and MultiBinary are: give a policy, or wrap the environment"
            )
        return {"action": found}

    def _pop_seed(self) -> dict[str, int]:
        seed, self._seed = self._seed, None
        return {} if seed is None else {"seed": seed}

    def given(self, like: np.ndarray[Any, Any]) -> Callable[[np.ndarray[Any, Any]], Any]:
        """Return what makes the environment's action from an array with the shape and dtype of ``like``."""
        whole = self._choices is not None and like.shape == self.shape and like.dtype.kind in "iu"
        if self._choices is None or (whole and self.shape):
            return np.ndarray.copy
        item: Callable[[np.ndarray[Any, Any]], Any] = np.ndarray.item  # in less time than a lambda
        return item if whole else self._given

    def _given(self, action: np.ndarray[Any, Any]) -> Any:
        if self._choices is not None:
            if action.ndim == len(self.shape) + 1 and action.shape[-1] == self._choices:
                action = action.argmax(-1)
            elif action.dtype.kind == "f" and (action % 1 != 0).any():
                raise InvalidArgumentError(
                    f"action: expected whole numbers below {self._choices}, or one-hot rows, got {action}"
                )
            if not self.shape:
                return int(action.item())
        # A copy: a policy may return the same memory each time, its own parameters or its input. The
        # environment may write into its action, or keep it.
        return action.copy()

    def _reset_fields(self, found: Any) -> Values:
        observation = found[0] if isinstance(found, tuple) and len(found) == 2 else found
        fields = _observation_fields(observation)
        for key in fields:
            if (name := key if isinstance(key, str) else key[0]) in _TAKEN:
                raise InvalidArgumentError(
                    f"the environment's observation has an entry {name!r}: expected other names than "
                    f"{', '.join(sorted(_TAKEN))}, which are other fields of a frame: rename it in a wrapper"
                )
        none: Values = {name: np.zeros((*self.shape, 1), np.bool_) for name in ENDS}
        return self._to_device(fields | none)

    def _step_fields(self, found: Any) -> Values:
        observation, reward, terminated, truncated, *_ = found
        fields = _observation_fields(observation)
        fields["reward"] = default_float(_numbers(reward))[..., None]
        return self._to_device(fields | _end_fields(terminated, truncated, self.shape))

    def _to_device(self, fields: Values) -> Values:
        if self.device is None:
            return fields
        return {key: as_tensor(value).to(self.device) for key, value in fields.items()}


class AsyncEnv(GymnasiumEnv):
    """An environment with ``async def reset`` and ``async def step``."""

    suspends = True

    async def reset(self) -> Values:
        return self._reset_fields(await self.env.reset(**self._pop_seed()))

    async def step(self, step: Values) -> Values:
        return self.fields_of(await self.env.step(self._given(as_array(step["action"]))))

    async def close(self) -> None:
        closing = getattr(self.env, "aclose", None) or getattr(self.env, "close", None)
        if closing is not None and inspect.isawaitable(done := closing()):
            await done


class VectorEnv(GymnasiumEnv):
    """A Gymnasium vector environment, in any autoreset mode."""

    def __init__(self, env: Any, device: torch.device | None = None) -> None:
        super().__init__(env, device)
        self.shape = (int(env.num_envs),)
        mode = getattr(env, "metadata", {}).get("autoreset_mode", "NextStep")
        self._mode = str(getattr(mode, "value", mode))
        self.skips = self._mode == "NextStep"
        # With SAME_STEP: the observations after the last step, and where it has begun the next episode.
        self._after_autoreset: Values = {}
        self._made_copies: Any = True  # what the environment's attribute ``copy`` was
        self._reset_itself = np.zeros(self.shape, np.bool_)

    def configure(self, config: BatchConfig) -> None:
        super().configure(config)
        if not config.reset_when_done and self._mode != "Disabled":
            raise InvalidArgumentError(
                "reset_when_done=False: the environment begins episodes by itself: make it with "
                "AutoresetMode.DISABLED"
            )

    def stop_copying(self) -> bool:
        # These copy their observations, which takes 3 % of the time of eight small environments. Others, and
        # wrappers, may keep what they return.
        env, vector = self.env, sys.modules.get("gymnasium.vector")
        if vector is None or type(env) not in (vector.SyncVectorEnv, vector.AsyncVectorEnv):
            return False
        if not env.copy or _is_replaced(env, "step") or _is_replaced(env, "step_wait"):
            return False
        self._made_copies, env.copy = env.copy, False
        return True

    def copy_again(self) -> None:
        self.env.copy = self._made_copies

    def fields_of(self, found: Any) -> Values:
        after = self._step_fields(found)
        if self._mode != "SameStep":
            return after
        self._reset_itself = as_array(after["done"])[:, 0].copy()
        observed = _observation_fields(found[0])
        self._after_autoreset = {key: after[key] for key in observed}
        if self._reset_itself.any():
            after |= {key: copy.deepcopy(after[key]) for key in observed}
            last = found[4]["final_obs"]
            for row in self._reset_itself.nonzero()[0].tolist():
                for key, value in _observation_fields(last[row]).items():
                    as_tensor(after[key])[row] = as_tensor(value)
        return after

    async def restart(self, after: Values) -> Values:
        if self._mode == "NextStep":
            return self.proceed(after)
        ended = as_array(after["done"])[:, 0]
        if self._mode == "SameStep":
            ended = ended & ~self._reset_itself  # what max_frames_per_traj has ended
            if not ended.any():
                none = np.zeros((*self.shape, 1), np.bool_)
                return self._after_autoreset | self._to_device(dict.fromkeys(ENDS, none))
        return self._reset_fields(call_env(self.env.reset, options={"reset_mask": ended}))
