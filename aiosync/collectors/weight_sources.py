"""Which weights a collector sends, to which workers: what its options and the arguments of a call mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from aiosync.collectors.worker_spec import POLICY, Schemes
from aiosync.errors import InvalidArgumentError, UnknownWorkerError
from aiosync.schemes.none import NoWeightSyncScheme
from aiosync.weights.resolve import resolve_model
from aiosync.weights.strategy import WeightStrategy

Weights: TypeAlias = Mapping[str, Any]
"""Model id -> its weights; None: those of the trainer's model."""

WorkersOrDevices: TypeAlias = int | torch.device | Sequence[int | torch.device] | None
"""One worker, several, or None for all. A device stands for the workers whose policy is on it."""


def sent_in_full(policy: Any, schemes: Schemes) -> list[nn.Module]:
    """Return the modules in a policy whose weights schemes send to each worker at its start."""
    found = []
    for model_id, scheme in schemes.items():
        strategy = scheme.strategy
        plain = type(strategy) is WeightStrategy and strategy.peft != "adapter"
        if isinstance(scheme, NoWeightSyncScheme) or not plain:
            continue  # it may send no weights, or others than those of the module
        root, _, path = model_id.partition(".")
        if root == POLICY:
            model = resolve_model(policy, path) if path else policy
            found += [model] if isinstance(model, nn.Module) else []
    return found


def indices_of(
    ids: int | torch.device | Sequence[int | torch.device], devices: Sequence[Any] | None, workers: int
) -> int | list[int]:
    """Return the indices of workers that may be given by the devices of their policies. ``devices``: of each
    worker's policy.

    Raises:
        UnknownWorkerError: no worker's policy is on this device.
    """
    if isinstance(ids, int):
        return ids
    found: list[int] = []
    for each in [ids] if isinstance(ids, torch.device) else ids:
        if not isinstance(each, torch.device):
            found.append(each)
        elif devices is not None and each in devices:
            found += [index for index, device in enumerate(devices) if device == each]
        else:
            raise UnknownWorkerError(each, [*range(workers), *{d for d in devices or () if d is not None}])
    return found


@dataclass
class PoliciesMadeHere:
    """The context of a scheme that sends what the policy factories have made in this process."""

    policy_factory: list[Callable[[], Any] | None]  # one per worker
    num_workers: int
    policy_device: Any

    def __post_init__(self) -> None:
        made: dict[int, Callable[[], Any]] = {}
        for factory in self.policy_factory:
            if factory is not None and id(factory) not in made:
                made[id(factory)] = functools.partial(_identity, factory())
        self._policies = [get() for get in made.values()]
        self.policy_factory = [made[id(factory)] for factory in self.policy_factory]

    @property
    def can_be_sent(self) -> bool:
        """Whether the policies have weights, of the same names and shapes in all workers."""
        if not all(has_weights(policy) for policy in self._policies):
            return False
        forms = [{name: each.shape for name, each in _tensors(policy)} for policy in self._policies]
        return all(form == forms[0] for form in forms)


def _identity(policy: Any) -> Any:
    return policy


def _tensors(policy: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*policy.named_parameters(), *policy.named_buffers()]


def weights_by_model(
    first: Any, others: Mapping[str, Any], model_id: str | None, weights_dict: Weights | None
) -> Weights:
    """Return the weights that a call was given, by model id. InvalidArgumentError: several were given."""
    every = {"policy_or_weights": first, **others}
    given = {name: weights for name, weights in every.items() if weights is not None}
    if weights_dict is not None:
        clashing = [*given, *(["model_id"] if model_id is not None else [])]
        if clashing:
            raise InvalidArgumentError(f"weights_dict cannot be combined with {', '.join(clashing)}")
        return weights_dict
    if len(given) > 1:
        raise InvalidArgumentError(f"got {' and '.join(given)}: expected one of them")
    return {POLICY if model_id is None else model_id: next(iter(given.values()), None)}


def has_weights(policy: Any) -> bool:
    """Return whether there is anything to send."""
    return isinstance(policy, nn.Module) and bool([*policy.parameters(), *policy.buffers()])


def make_updater(given: Any) -> Any:
    """Return the updater that ``weight_updater=`` is or returns; None if there is none."""
    is_one = callable(getattr(given, "push_weights", None)) and not isinstance(given, type)
    made = given() if callable(given) and not is_one else given
    if made is not None and not callable(getattr(made, "push_weights", None)):
        raise InvalidArgumentError(
            f"weight_updater: expected an updater with push_weights(), or a function that returns one; got "
            f"{type(made).__name__}"
        )
    return made
