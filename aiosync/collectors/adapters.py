"""Find the adapter for an environment."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from aiosync.collectors.env import Env
from aiosync.collectors.gymnasium_env import AsyncEnv, GymnasiumEnv, VectorEnv
from aiosync.collectors.tensordict_env import TensorDictEnv
from aiosync.errors import InvalidArgumentError, OptionConflictError


def adapt(env: Any, device: torch.device | None = None) -> Env:
    """Return the adapter for ``env``.

    Args:
        env: a Gymnasium environment or vector environment, a torchrl environment, or any object with ``async
            def reset()`` and ``async def step(action)`` that return what Gymnasium's return.
        device: the device of the tensors that the adapter returns; a torchrl environment is moved to it.
            None: no tensor is moved.

    Raises:
        InvalidArgumentError: ``env`` has no ``reset()`` and ``step()``.
    """
    if isinstance(env, Env):
        return env
    if not is_env(env):
        raise InvalidArgumentError(
            f"create_env_fn returned {type(env).__name__}: expected an environment with reset() and step()"
        )
    if inspect.iscoroutinefunction(env.step):
        return AsyncEnv(env, device)
    if _has(env, "action_keys") and _has(env, "batch_size"):
        return TensorDictEnv(env, device)
    if _has(env, "num_envs") and _has(env, "single_action_space"):
        return VectorEnv(env, device)
    return GymnasiumEnv(env, device)


def _has(env: Any, name: str) -> bool:
    """Whether ``env`` or its class has this attribute, or says so in ``dir()``. Properties and
    ``__getattr__`` do not run."""
    # Not dir(env) or vars(env): in Python 3.11 and 3.12 they give the object a dict of its own, and each
    # access to its attributes takes longer from then on: 2 % of a step of eight small environments.
    kind: Any = type(env)
    if name in dir(kind):
        return True
    own = kind.__dir__ is object.__dir__ and kind.__getattribute__ is object.__getattribute__
    if not own or env.__class__ is not kind:  # a proxy of another object, perhaps
        return name in dir(env)
    try:
        object.__getattribute__(env, name)
    except AttributeError:
        return False
    return True


def is_env(given: Any) -> bool:
    """Whether this is an environment, and not a function that makes one."""
    made = callable(getattr(given, "reset", None)) and callable(getattr(given, "step", None))
    return made and not isinstance(given, type)


def env_factory(given: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that returns an environment. ``given``: the environment, of which each worker process
    gets a copy; or a function of ``arguments`` that returns one.

    Raises:
        InvalidArgumentError: there are arguments for an environment that exists already.
    """
    if not is_env(given):
        return functools.partial(given, **arguments)
    if arguments and not hasattr(given, "update_kwargs"):
        raise OptionConflictError(
            f"create_env_kwargs={dict(arguments)!r}: create_env_fn is an environment already, of type "
            f"{type(given).__name__}: give a function that makes one with these arguments"
        )
    return functools.partial(_updated, given, arguments)


def _updated(env: Any, arguments: Mapping[str, Any]) -> Any:
    if arguments:
        env.update_kwargs(dict(arguments))  # the arguments of the environments that it makes
    return env
