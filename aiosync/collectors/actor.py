"""A policy as a worker calls it: fields in, fields out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn

from aiosync.collectors.fields import Fields
from aiosync.errors import InvalidArgumentError

__all__ = ["Actor", "actor_of"]


class Actor(ABC):
    """Acts."""

    @abstractmethod
    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        """What the policy adds to what is observed: ``"action"`` at least.

        Args:
            step: the observation and the like, each of shape ``(*shape, ...)``.
            shape: the environments that step together.

        Raises:
            Exception: whatever the policy raises.
        """


class _OfTensorDicts(Actor):
    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self._policy = policy

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        data = TensorDict({}, batch_size=torch.Size(shape))
        for key, value in step.items():
            data.set(key, value)
        found = self._policy(data)
        if not is_tensor_collection(found):
            raise InvalidArgumentError(f"the policy returned {type(found).__name__}, expected a TensorDict")
        leaves = found.items(include_nested=True, leaves_only=True)
        return {key: value for key, value in leaves if key not in step or value is not step[key]}


class _OfTensors(Actor):
    """A module or a function of the observation, or of each of its parts in their order."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        observed = [value for key, value in step.items() if key not in _ENDS]
        action = self._policy(*observed)
        if isinstance(action, tuple):
            action = action[0]
        if not isinstance(action, Tensor):
            action = torch.as_tensor(action)
        return {"action": action}


_ENDS = {"done", "terminated", "truncated", "step_count"}


class _Exploring(Actor):
    """Another one, under an interaction type and without gradients."""

    def __init__(self, actor: Actor, exploration: InteractionType) -> None:
        self._actor = actor
        self._exploration = exploration

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        with torch.no_grad(), set_interaction_type(self._exploration):
            return self._actor.act(step, shape)


def actor_of(policy: Any, exploration: InteractionType, *, trusted: bool = False) -> Actor:
    """What calls ``policy`` as it wants to be called.

    Args:
        policy: a TensorDictModule, or anything whose only parameter is annotated as a TensorDict or named
            ``tensordict`` or ``td``; or a module or function of the observation's tensors.
        exploration: the interaction type that it acts under.
        trusted: it takes and gives TensorDicts.

    Raises:
        InvalidArgumentError: it cannot be called.
    """
    if not callable(policy):
        raise InvalidArgumentError(f"policy: expected something to be called, got {type(policy).__name__}")
    of_tensordicts = trusted or isinstance(policy, TensorDictModuleBase) or _takes_tensordict(policy)
    return _Exploring(_OfTensorDicts(policy) if of_tensordicts else _OfTensors(policy), exploration)


def _takes_tensordict(policy: Callable[..., Any]) -> bool:
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # something built in
        return False
    if len(parameters) != 1:
        return False
    (parameter,) = parameters
    annotated = parameter.annotation
    if isinstance(annotated, type) and issubclass(annotated, TensorDictBase):
        return True
    return parameter.name in ("tensordict", "td") or "TensorDict" in str(annotated)
