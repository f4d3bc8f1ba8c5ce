"""Checks the arguments of ``init_on_sender`` and makes a plan of them: the workers and their devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from aiosync.errors import InvalidArgumentError
from aiosync.weights.resolve import resolve_model
from aiosync.weights.strategy import to_tensordict

CPU = torch.device("cpu")


@dataclass(frozen=True)
class GroupPlan:
    """Workers that read one copy of the weights."""

    workers: tuple[int, ...]  # their indices; empty in an elastic plan
    device: torch.device  # the copy's device
    weights: Any = None  # this group's weights for version 0; None: the plan's


@dataclass(frozen=True)
class SenderPlan:
    """The workers of a sender, and the weights to send by default."""

    groups: tuple[GroupPlan, ...]  # disjoint; together they have every worker
    weights: Any = None  # the weights to send if a call gives none; None: the context's or the groups'
    # Takes (worker, weights as a TensorDict) and returns that worker's weights.
    device_map_fn: Callable[[int, Any], Any] | None = None
    per_worker: bool = False  # each worker has a separate group and may be sent different weights
    elastic: bool = False  # workers are accepted at any time
    made_here: bool = False  # the weights come from a policy that the context's policy_factory has made here
    transient: bool = False  # the non-persistent buffers of modules are sent too

    @cached_property
    def has_weights(self) -> bool:
        """Whether the plan has weights to send."""
        return self.weights is not None or any(group.weights is not None for group in self.groups)

    @cached_property
    def plain(self) -> bool:
        """Whether all workers get the same weights, unchanged."""
        return len(self.groups) == 1 and self.device_map_fn is None

    @property
    def workers(self) -> tuple[int, ...]:
        """Every worker's index, sorted."""
        return tuple(sorted(w for group in self.groups for w in group.workers))


@dataclass(frozen=True)
class SenderArguments:
    """The arguments of ``init_on_sender``, not yet checked."""

    model_id: str | None = None
    context: Any = None
    model: Any = None
    weights: Any = None
    params_map: Mapping[int, Any] | None = None
    devices: Sequence[Any] | None = None
    device_map_fn: Callable[[int, Any], Any] | None = None
    num_workers: int | None = None
    may_be_elastic: bool = False
    extract: Callable[[Any], TensorDictBase] = to_tensordict  # converts a source to what device_map_fn gets
    transient: bool = False  # the context's workers have no values of non-persistent buffers

    @property
    def elastic(self) -> bool:
        """Whether the number of workers is not given and the scheme does not need it."""
        given = (self.params_map, self.devices, self.device_map_fn, self.num_workers)
        return self.may_be_elastic and all(argument is None for argument in given)

    def forbid(self, chosen: str, *forbidden: str) -> None:
        """Raise if a forbidden argument was given together with ``chosen``."""
        given = [name for name in forbidden if self.__dict__[name] is not None]
        if given:
            raise InvalidArgumentError(f"{chosen} cannot be combined with {', '.join(given)}")


def make_plan(args: SenderArguments, *, per_worker: bool) -> SenderPlan:
    """Check the arguments and make a plan of them.

    Raises:
        InvalidArgumentError: arguments that cannot be combined; the message names them.
        AttributeError: ``context`` has nothing at ``model_id``.
    """
    if args.params_map is not None:
        args.forbid("params_map", "context", "model", "weights", "devices", "device_map_fn", "num_workers")
        return _from_params_map(args.params_map)
    if args.context is not None:
        args.forbid("context", "model", "weights", "devices", "device_map_fn")
        return _from_context(args, per_worker)
    if args.model is not None:
        args.forbid("model", "weights")
        if not isinstance(args.model, nn.Module):
            raise InvalidArgumentError(
                f"model: expected an nn.Module, got {type(args.model).__name__} (give tensors as weights=)"
            )
    source = args.model if args.model is not None else args.weights
    if source is None:
        raise InvalidArgumentError(
            "init_on_sender needs params_map=, or context= with model_id=, or model= or weights= with "
            "devices=, device_map_fn= or num_workers="
        )
    if args.elastic:
        return _elastic(source, per_worker)
    if args.device_map_fn is not None:
        args.forbid("device_map_fn", "devices")
        count = _count("num_workers (needed with device_map_fn)", args.num_workers)
        mapped = _mapped_devices(args, source, count)
        return SenderPlan(_groups(mapped, True), source, args.device_map_fn, per_worker=True)
    if args.devices is not None:
        devices = _as_devices(list(args.devices), args.num_workers)
    else:
        devices = [CPU] * _count("devices= or num_workers=", args.num_workers)
    return SenderPlan(_groups(devices, per_worker), source, per_worker=per_worker)


def _elastic(source: Any, per_worker: bool) -> SenderPlan:
    if per_worker:
        raise InvalidArgumentError("per_worker_weights=True needs num_workers=: whose weights would they be?")
    return SenderPlan((GroupPlan((), CPU),), source, elastic=True)


def model_of(context: Any, model_id: str) -> Any:
    """Return the context's model of this name, from its ``get_model`` or at this dotted path.

    A context without it may have the policy as ``_fallback_policy``, or a model's weights from its
    ``get_cached_weights``, as torchrl's contexts do.

    Raises:
        AttributeError: the context has no such model.
    """
    get_model = getattr(context, "get_model", None)
    try:
        found = get_model(model_id) if callable(get_model) else resolve_model(context, model_id)
    except (AttributeError, KeyError, ValueError):
        found = _instead_of_model(context, model_id)
        if found is None:
            raise
    return _instead_of_model(context, model_id) if found is None else found


def _instead_of_model(context: Any, model_id: str) -> Any:
    policy = getattr(context, "_fallback_policy", None) if model_id == "policy" else None
    cached = getattr(context, "get_cached_weights", None)
    return cached(model_id) if policy is None and callable(cached) else policy


def _from_params_map(params_map: Mapping[int, Any]) -> SenderPlan:
    if not isinstance(params_map, Mapping) or not params_map:
        raise InvalidArgumentError("params_map: expected a dict of worker index -> weights")
    groups: dict[Hashable, tuple[list[int], Any]] = {}
    for worker, weights in params_map.items():
        if isinstance(worker, bool) or not isinstance(worker, int) or worker < 0:
            raise InvalidArgumentError(f"params_map: expected worker indices >= 0, got {worker!r}")
        if not isinstance(weights, nn.Module | TensorDictBase | Mapping):
            raise InvalidArgumentError(
                f"params_map[{worker}]: expected a TensorDict, a dict or a module, got "
                f"{type(weights).__name__}"
            )
        groups.setdefault(id(weights), ([], weights))[0].append(worker)
    plans = tuple(GroupPlan(tuple(ws), _device_of(weights), weights) for ws, weights in groups.values())
    return SenderPlan(plans, per_worker=all(len(p.workers) == 1 for p in plans))


def _from_context(args: SenderArguments, per_worker: bool) -> SenderPlan:
    context = args.context
    if args.model_id is None:
        raise InvalidArgumentError("context= needs model_id=, the name of the model on it")
    devices = getattr(context, "policy_device", None)
    count = getattr(context, "num_workers", None)
    if count is None and devices is None and args.elastic:
        return _elastic(None, per_worker)
    if not isinstance(devices, list | tuple):
        count = args.num_workers if count is None else count
        devices = [devices] * _count("the context's num_workers", count)
    targets = _as_devices(devices, count)
    if args.num_workers not in (None, len(targets)):
        raise InvalidArgumentError(
            f"num_workers={args.num_workers}, but the context has {len(targets)} workers"
        )
    if args.model_id == "policy" and _lacks_policy(context):
        return _from_factories(context, targets, per_worker)
    if model_of(context, args.model_id) is None:
        raise InvalidArgumentError(f"the context's {args.model_id!r} is None: there is nothing to send")
    return SenderPlan(_groups(targets, per_worker), per_worker=per_worker, transient=args.transient)


def _lacks_policy(context: Any) -> bool:
    """Whether the context has no policy but may have a ``policy_factory``."""
    try:
        return model_of(context, "policy") is None
    except (AttributeError, ValueError):
        if getattr(context, "policy_factory", None) is None:
            raise
        return True


def _from_factories(context: Any, devices: list[torch.device], per_worker: bool) -> SenderPlan:
    """Make the plan from the models that the context's policy factories return."""
    factories = getattr(context, "policy_factory", None)
    if not isinstance(factories, list | tuple):
        factories = [factories] * len(devices)
    if not factories or any(f is None for f in factories):
        raise InvalidArgumentError("the context has neither a policy nor a policy_factory for each worker")
    if all(f is factories[0] for f in factories):
        return SenderPlan(_groups(devices, per_worker), factories[0](), per_worker=per_worker, made_here=True)
    groups = tuple(GroupPlan((w,), devices[w], make()) for w, make in enumerate(factories))
    return SenderPlan(groups, per_worker=True, made_here=True)


def _groups(devices: Sequence[torch.device], per_worker: bool) -> tuple[GroupPlan, ...]:
    """One group per worker, or per device. ``devices`` has one device per worker."""
    if per_worker:
        return tuple(GroupPlan((w,), device) for w, device in enumerate(devices))
    groups: dict[torch.device, list[int]] = {}
    for worker, device in enumerate(devices):
        groups.setdefault(device, []).append(worker)
    return tuple(GroupPlan(tuple(workers), device) for device, workers in groups.items())


def _as_devices(devices: Sequence[Any], num_workers: int | None) -> list[torch.device]:
    """Each worker's device. The list has one for each, and ``num_workers`` may be given in addition."""
    if not devices or num_workers not in (None, len(devices)):
        raise InvalidArgumentError(
            f"num_workers={num_workers} and {len(devices)} devices: give one device per worker"
        )
    return [_as_device(device) for device in devices]


def _as_device(device: Any) -> torch.device:
    """Return the device of a worker's copy: its CUDA device, or the CPU for any other device."""
    try:
        wanted = CPU if device is None else torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise InvalidArgumentError(f"expected a torch device, got {device!r}") from exc
    return wanted if wanted.type == "cuda" else CPU


def _device_of(weights: Any) -> torch.device:
    """Return the device of a copy of these weights: that of the first tensor that is not on the CPU."""
    devices = (_as_device(tensor.device) for tensor in _tensors(weights))
    return next((device for device in devices if device != CPU), CPU)


def _tensors(weights: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module, a TensorDict or a nested dict."""
    if isinstance(weights, nn.Module):
        yield from (*weights.parameters(), *weights.buffers())
    elif isinstance(weights, TensorDictBase):
        yield from weights.values(include_nested=True, leaves_only=True)
    elif isinstance(weights, Mapping):
        for value in weights.values():
            yield from _tensors(value)
    elif isinstance(weights, torch.Tensor):
        yield weights


def _mapped_devices(args: SenderArguments, source: Any, count: int) -> list[torch.device]:
    """Return the device of what ``device_map_fn`` returns for each worker."""
    function = args.device_map_fn
    if not callable(function):
        raise InvalidArgumentError(f"device_map_fn: expected a function, got {type(function).__name__}")
    weights = args.extract(source)
    found = [function(worker, weights) for worker in range(count)]
    for each in found:
        if not isinstance(each, nn.Module | TensorDictBase | Mapping):
            raise InvalidArgumentError(
                f"device_map_fn: expected it to return a TensorDict or a dict, got {type(each).__name__}"
            )
    return [_device_of(each) for each in found]


def _count(what: str, count: int | None) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgumentError(f"{what}: expected a number of workers >= 1, got {count!r}")
    return count
