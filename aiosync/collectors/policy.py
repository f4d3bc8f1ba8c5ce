"""Adapters that give every kind of policy one interface: fields in, fields out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any

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
from aiosync.collectors.env import (
    Env,
    Fields,
    Key,
    Value,
    Values,
    as_tensor,
    as_tensors,
    flatten,
    unflatten,
)
from aiosync.errors import InvalidArgumentError
from aiosync.weights.devices import undisturbed


class Actor(ABC):
    """Calls a policy."""

    @abstractmethod
    def __call__(self, step: Values) -> Fields:
        """Call the policy with the observations and the other fields. Returns the fields that the policy
        adds: the actions at least. Raises what the policy raises."""


class ObservationActor(Actor):
    """Calls a policy that may need nothing but ``"observation"``.

    Attributes:
        call: calls the policy with that tensor, and returns what the policy returns. None: it needs more.
    """

    call: Callable[[Tensor], Any] | None = None

    @abstractmethod
    def fields_of(self, result: Any, observation: Value) -> Fields:
        """Return the fields in what :attr:`call` returned for this observation."""


_NOT_OBSERVED = {"done", "terminated", "truncated", "step_count"}


def adapt_policy(
    policy: Any, config: PolicyConfig, devices: WorkerDevices, env: Env, *, sync: bool = True
) -> Actor:
    """Return the adapter for ``policy``: a TensorDictModule; or a callable with one parameter that is
    annotated as a TensorDict or named ``tensordict`` or ``td``; or a module or function of the observation's
    tensors. ``env``: what it acts in. ``sync``: synchronize a CUDA device after each call."""
    if not callable(policy):
        raise InvalidArgumentError(f"policy: expected a callable, got {type(policy).__name__}")
    called = _optimized(policy, config)
    if called is policy and _only_calls_its_module(policy):
        actor: Actor = _OfKeys(policy, env)
    elif _is_trusted(policy, config) or isinstance(policy, TensorDictModuleBase) or _takes_tensordict(policy):
        actor = _OfTensorDict(called, env)
    else:
        actor = _OfTensors(called, env)
    device = devices.policy
    if device is None or (device.type == "cpu" and env.device in (None, device)):
        return actor
    return _OnDevice(actor, device, sync and device.type == "cuda")


class Acting:
    """The context to call a policy in: without gradients, and with this interaction type. It can be entered
    again once it was left."""

    def __init__(self, exploration: InteractionType) -> None:
        self._exploring = set_interaction_type(exploration)
        self._had_gradients = True

    def __enter__(self) -> None:
        self._had_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # a rollout enters it often: a third of the time of torch.no_grad()
        self._exploring.__enter__()

    def __exit__(self, *_: object) -> None:
        self._exploring.__exit__(None, None, None)
        torch.set_grad_enabled(self._had_gradients)


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
        (config.cudagraph_options, _Captured),
    ):
        if options is not None:
            called = wrap(called, **options)
    return called


class _Captured:
    """Calls a policy as a CUDA graph. No thread of this package uses the device while it is captured."""

    def __init__(self, policy: Callable[..., Any], **options: Any) -> None:
        self._module = CudaGraphModule(policy, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.counter >= self._module._warmup:
            return self._module(*args, **kwargs)
        with undisturbed():
            return self._module(*args, **kwargs)


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


class _OfTensorDict(Actor):
    """Calls a policy that takes a TensorDict and returns one."""

    def __init__(self, policy: Callable[..., Any], env: Env) -> None:
        self._policy = policy
        self._env = env

    def __call__(self, step: Values) -> Fields:
        given = as_tensors(step)
        result = self._policy(unflatten(given, self._env.shape, self._env.nested))
        if not is_tensor_collection(result):
            raise InvalidArgumentError(f"the policy returned {type(result).__name__}, expected a TensorDict")
        return {key: value for key, value in flatten(result).items() if given.get(key) is not value}


class _OfKeys(ObservationActor):
    """Calls a TensorDictModule without a TensorDict, which would cost several times a small module's call:
    the module gets the tensors of ``in_keys`` and returns those of ``out_keys``."""

    def __init__(self, policy: TensorDictModule, env: Env) -> None:
        self._policy = policy
        self._env, self._shape = env, env.shape
        self._by_tensordict = _OfTensorDict(policy, env)
        self.call = policy.module if list(policy.in_keys) == ["observation"] else None
        self._plain = True  # the module returns a tensor per key

    def __call__(self, step: Values) -> Fields:
        if not self._plain:
            return self._by_tensordict(step)
        try:
            given = [as_tensor(step[key]) for key in self._policy.in_keys]
        except KeyError:  # the TensorDictModule has its own error
            return self._by_tensordict(step)
        return self._fields(self._policy.module(*given), step)

    def fields_of(self, result: Any, observation: Value) -> Fields:
        return self._fields(result, {"observation": observation})

    def _fields(self, result: Any, step: Values) -> Fields:
        policy, dims = self._policy, len(self._shape)
        values, keys = result if isinstance(result, tuple) else (result,), policy.out_keys
        plain = len(values) == len(keys) and all(isinstance(value, Tensor) for value in values)
        if plain and all(value.shape[:dims] == self._shape for value in values):
            return {key: value for key, value in zip(keys, values, strict=True) if key != "_"}
        self._plain, self.call = False, None
        # The module is not called again: it may count its calls, or draw random numbers.
        known = TensorDictModule(lambda *_: result, in_keys=policy.in_keys, out_keys=keys)
        return _OfTensorDict(known, self._env)(step)


class _OfTensors(ObservationActor):
    """Calls a module or function of the observation, or of several observations in their order."""

    def __init__(self, policy: Callable[..., Any], env: Env) -> None:
        self._policy = self.call = policy
        self._action_keys = env.action_keys
        self._given = env.observation_keys  # None: all but the ends
        self._seen: Set[Key] = set()
        self._keys: Sequence[Key] = env.observation_keys or ()

    def __call__(self, step: Values) -> Fields:
        if self._given is None and step.keys() != self._seen:
            self._seen = set(step)
            self._keys = [key for key in step if _name(key) not in _NOT_OBSERVED]
        return self._fields(self._policy(*[as_tensor(step[key]) for key in self._keys]))

    def fields_of(self, result: Any, observation: Value) -> Fields:
        return self._fields(result)

    def _fields(self, action: Any) -> Fields:
        actions = action if isinstance(action, tuple) else (action,)
        pairs = zip(self._action_keys, actions, strict=False)  # what it returns beside actions is dropped
        return {key: value if isinstance(value, Tensor) else torch.as_tensor(value) for key, value in pairs}


def _name(key: Key) -> str:
    return key if isinstance(key, str) else key[-1]


class _OnDevice(ObservationActor):
    """Calls an actor on a device. With ``sync`` copies are asynchronous, and the CUDA device is synchronized
    after the call; otherwise each copy is synchronous."""

    def __init__(self, actor: Actor, device: torch.device, sync: bool) -> None:
        self._actor = actor
        self._device = device
        self._sync = sync
        if isinstance(actor, ObservationActor) and actor.call is not None:
            self.call = lambda observation: self({"observation": observation})

    def __call__(self, step: Values) -> Fields:
        device, sync = self._device, self._sync
        given: Values = {key: as_tensor(v).to(device, non_blocking=sync) for key, v in step.items()}
        result = self._actor(given)
        if sync:
            torch.cuda.synchronize(device)
        return result

    def fields_of(self, result: Any, observation: Value) -> Fields:
        fields: Fields = result
        return fields
