"""Adapters that give every kind of policy one interface: fields in, fields out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import (
    CudaGraphModule,
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor, nn

from aiosync.collectors.config import PolicyConfig, WorkerDevices
from aiosync.collectors.env import Env, Fields, Key, Nested, unflatten
from aiosync.errors import InvalidArgumentError

Act: TypeAlias = Callable[[Fields, tuple[int, ...]], Fields]
"""Calls a policy with the observations and the other fields, and with their batch shape: the environments
that step together. Returns the fields that the policy adds: the actions at least. Raises what the policy
raises."""

_NOT_OBSERVED = {"done", "terminated", "truncated", "step_count"}


def adapt_policy(
    policy: Any, config: PolicyConfig, devices: WorkerDevices, env: Env, *, sync: bool = True
) -> Act:
    """Return the adapter for ``policy``: a TensorDictModule; or a callable with one parameter that is
    annotated as a TensorDict or named ``tensordict`` or ``td``; or a module or function of the observation's
    tensors. ``env``: what it acts in. ``sync``: synchronize a CUDA device after each call."""
    if not callable(policy):
        raise InvalidArgumentError(f"policy: expected a callable, got {type(policy).__name__}")
    called = _optimized(policy, config)
    if called is policy and _only_calls_its_module(policy):
        act: Act = _of_keys(policy, env.nested)
    elif _is_trusted(policy, config) or isinstance(policy, TensorDictModuleBase) or _takes_tensordict(policy):
        act = partial(_with_tensordict, called, env.nested)
    else:
        act = partial(_with_tensors, called, env)
    act = partial(_exploring, act, config.exploration_type)
    device = devices.policy
    return act if device is None else partial(_on_device, act, device, sync and device.type == "cuda")


def to_device(policy: nn.Module, device: torch.device) -> None:
    """Move a policy in place. Weights that have not arrived stay on ``meta``."""
    if any(tensor.is_meta for tensor in (*policy.parameters(), *policy.buffers())):
        policy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        policy.to(device)


def _optimized(policy: Callable[..., Any], config: PolicyConfig) -> Callable[..., Any]:
    """Return the policy compiled or captured, as the options say."""
    called = policy
    for options, wrap in (
        (config.compile_options, torch.compile),
        (config.cudagraph_options, CudaGraphModule),
    ):
        if options is not None:
            called = wrap(called, **options)
    return called


def _is_trusted(policy: Any, config: PolicyConfig) -> bool:
    """Return whether the policy takes and returns TensorDicts, whatever its signature says."""
    trust = config.trust_policy
    return isinstance(policy, CudaGraphModule) if trust is None else trust


def _only_calls_its_module(policy: Any) -> bool:
    """Return whether a call of this policy is a call of its module, and nothing else."""
    plain = type(policy) is TensorDictModule and policy.method is None
    return plain and not (policy._forward_hooks or policy._forward_pre_hooks or policy._kwargs)


def _takes_tensordict(policy: Callable[..., Any]) -> bool:
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in function
        return False
    if len(parameters) != 1:
        return False
    annotated = parameters[0].annotation
    if isinstance(annotated, type) and issubclass(annotated, TensorDictBase):
        return True
    return parameters[0].name in ("tensordict", "td") or "TensorDict" in str(annotated)


def _with_tensordict(
    policy: Callable[..., Any], nested: Nested, step: Fields, shape: tuple[int, ...]
) -> Fields:
    """Call a policy that takes a TensorDict and returns one."""
    result = policy(unflatten(step, shape, nested))
    if not is_tensor_collection(result):
        raise InvalidArgumentError(f"the policy returned {type(result).__name__}, expected a TensorDict")
    leaves = result.items(include_nested=True, leaves_only=True)
    return {key: value for key, value in leaves if key not in step or value is not step[key]}


def _of_keys(policy: TensorDictModule, nested: Nested) -> Act:
    """Adapt a TensorDictModule without a TensorDict, which would cost several times a small module's call:
    the module gets the tensors of ``in_keys`` and returns those of ``out_keys``."""
    direct = True

    def act(step: Fields, shape: tuple[int, ...]) -> Fields:
        nonlocal direct
        if direct:
            keys, dims = policy.out_keys, len(shape)
            try:
                result = policy.module(*[step[key] for key in policy.in_keys])
            except KeyError:
                result = None
            result = result if isinstance(result, tuple) else (result,)
            plain = len(result) == len(keys) and all(isinstance(value, Tensor) for value in result)
            if plain and all(value.shape[:dims] == shape for value in result):
                return {key: value for key, value in zip(keys, result, strict=True) if key != "_"}
            # It is no simple module, or it is wrong and raises its own error.
            direct = False
        return _with_tensordict(policy, nested, step, shape)

    return act


def _with_tensors(policy: Callable[..., Any], env: Env, step: Fields, shape: tuple[int, ...]) -> Fields:
    """Call a module or function of the observation, or of several observations in their order."""
    keys = step if env.observation_keys is None else env.observation_keys
    action = policy(*[step[key] for key in keys if _name(key) not in _NOT_OBSERVED])
    actions = action if isinstance(action, tuple) else (action,)
    pairs = zip(env.action_keys, actions, strict=False)  # what the policy returns beside actions is dropped
    return {key: value if isinstance(value, Tensor) else torch.as_tensor(value) for key, value in pairs}


def _name(key: Key) -> str:
    return key if isinstance(key, str) else key[-1]


def _exploring(act: Act, exploration: InteractionType, step: Fields, shape: tuple[int, ...]) -> Fields:
    """Call ``act`` with an interaction type and without gradients."""
    with torch.no_grad(), set_interaction_type(exploration):
        return act(step, shape)


def _on_device(act: Act, device: torch.device, sync: bool, step: Fields, shape: tuple[int, ...]) -> Fields:
    """Call ``act`` on a device. With ``sync`` copies are asynchronous, and the CUDA device is synchronized
    after the call; otherwise each copy is synchronous."""
    result = act({key: value.to(device, non_blocking=sync) for key, value in step.items()}, shape)
    if sync:
        torch.cuda.synchronize(device)
    return result
