"""Adapters that give every kind of policy one interface: fields in, fields out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import (
    CudaGraphModule,
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor, nn

from aiosync.collectors.config import PolicyConfig
from aiosync.collectors.devices import WorkerDevices
from aiosync.collectors.fields import Fields
from aiosync.errors import InvalidArgumentError

__all__ = ["PolicyAdapter", "adapt_policy"]


class PolicyAdapter(ABC):
    """Calls a policy."""

    @abstractmethod
    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        """Call the policy and return the fields that it adds: ``"action"`` at least.

        Args:
            step: the observations and the other fields, each of shape ``(*shape, ...)``.
            shape: the batch shape: the environments that step together.

        Raises:
            Exception: what the policy raises.
        """


class _TensorDictPolicy(PolicyAdapter):
    """A policy that takes a TensorDict and returns one."""

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self._policy = policy

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        data = TensorDict({}, batch_size=torch.Size(shape))
        for key, value in step.items():
            data.set(key, value)
        result = self._policy(data)
        if not is_tensor_collection(result):
            raise InvalidArgumentError(f"the policy returned {type(result).__name__}, expected a TensorDict")
        leaves = result.items(include_nested=True, leaves_only=True)
        return {key: value for key, value in leaves if key not in step or value is not step[key]}


class _KeyedPolicy(PolicyAdapter):
    """A TensorDictModule that is called without a TensorDict: its module gets the tensors of its ``in_keys``
    and returns those of its ``out_keys``. For a small module a TensorDict costs several times the call
    itself."""

    def __init__(self, policy: TensorDictModule) -> None:
        self._policy = policy
        self._fallback = _TensorDictPolicy(policy)
        self._direct = True

    @staticmethod
    def can_call(policy: Any) -> bool:
        """Return whether a call of this policy does nothing but call its module."""
        if type(policy) is not TensorDictModule or policy.method is not None:
            return False
        return not (policy._forward_hooks or policy._forward_pre_hooks or policy._kwargs)

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        if not self._direct:
            return self._fallback.act(step, shape)
        keys, dims = self._policy.out_keys, len(shape)
        try:
            result = self._policy.module(*[step[key] for key in self._policy.in_keys])
        except KeyError:
            return self._fall_back(step, shape)
        result = result if isinstance(result, tuple) else (result,)
        plain = len(result) == len(keys) and all(isinstance(value, Tensor) for value in result)
        if not plain or any(value.shape[:dims] != shape for value in result):
            return self._fall_back(step, shape)
        return {key: value for key, value in zip(keys, result, strict=True) if key != "_"}

    def _fall_back(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        """Call the policy with a TensorDict, from now on: it is no simple module, or it is wrong and raises
        its own error."""
        self._direct = False
        return self._fallback.act(step, shape)


class _TensorPolicy(PolicyAdapter):
    """A module or function of the observation, or of several observations in their order."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        observed = [value for key, value in step.items() if key not in _NOT_OBSERVED]
        action = self._policy(*observed)
        if isinstance(action, tuple):
            action = action[0]
        if not isinstance(action, Tensor):
            action = torch.as_tensor(action)
        return {"action": action}


_NOT_OBSERVED = {"done", "terminated", "truncated", "step_count"}


class _ExploringPolicy(PolicyAdapter):
    """Calls another adapter with an interaction type and without gradients."""

    def __init__(self, adapter: PolicyAdapter, exploration: InteractionType) -> None:
        self._inner = adapter
        self._exploration = exploration

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        with torch.no_grad(), set_interaction_type(self._exploration):
            return self._inner.act(step, shape)


class _PolicyOnDevice(PolicyAdapter):
    """Calls another adapter on a device.

    Args:
        adapter: the other adapter.
        device: the device of its policy.
        sync: copy asynchronously and synchronize the device after the call; otherwise each copy is
            synchronous.
    """

    def __init__(self, adapter: PolicyAdapter, device: torch.device, *, sync: bool) -> None:
        self._inner = adapter
        self._device = device
        self._sync = sync and device.type == "cuda"

    def act(self, step: Fields, shape: tuple[int, ...]) -> Fields:
        there = {key: value.to(self._device, non_blocking=self._sync) for key, value in step.items()}
        result = self._inner.act(there, shape)
        if self._sync:
            torch.cuda.synchronize(self._device)
        return result


def adapt_policy(
    policy: Any, config: PolicyConfig, devices: WorkerDevices, *, sync: bool = True
) -> PolicyAdapter:
    """Return the adapter for ``policy``.

    Args:
        policy: a TensorDictModule; or a callable with one parameter that is annotated as a TensorDict or
            named ``tensordict`` or ``td``; or a module or function of the observation's tensors.
        config: how the policy acts.
        devices: the worker's devices.
        sync: synchronize a CUDA device after each call.

    Raises:
        InvalidArgumentError: ``policy`` is not callable.
    """
    if not callable(policy):
        raise InvalidArgumentError(f"policy: expected a callable, got {type(policy).__name__}")
    of_tensordicts = (
        config.trust_policy or isinstance(policy, TensorDictModuleBase) or _takes_tensordict(policy)
    )
    called = _optimized(policy, config)
    adapter: PolicyAdapter
    if called is policy and _KeyedPolicy.can_call(policy):
        adapter = _KeyedPolicy(policy)
    else:
        adapter = _TensorDictPolicy(called) if of_tensordicts else _TensorPolicy(called)
    adapter = _ExploringPolicy(adapter, config.exploration_type)
    return adapter if devices.policy is None else _PolicyOnDevice(adapter, devices.policy, sync=sync)


def _optimized(policy: Callable[..., Any], config: PolicyConfig) -> Callable[..., Any]:
    """Return the policy compiled or captured, as the options say."""
    called = policy
    if config.compile_policy is not False:
        called = torch.compile(called, **_options(config.compile_policy))
    if config.cudagraph_policy is not False:
        called = CudaGraphModule(called, **_options(config.cudagraph_policy))
    return called


def _options(given: bool | Mapping[str, Any]) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {}


def _takes_tensordict(policy: Callable[..., Any]) -> bool:
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in function
        return False
    if len(parameters) != 1:
        return False
    (parameter,) = parameters
    annotated = parameter.annotation
    if isinstance(annotated, type) and issubclass(annotated, TensorDictBase):
        return True
    return parameter.name in ("tensordict", "td") or "TensorDict" in str(annotated)
