"""From what a ``send`` is given to named tensors, worker by worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError
from aiosync.sender.worker_plan import SenderPlan
from aiosync.transports._offload import Offloader
from aiosync.weights.flatten import named_tensors
from aiosync.weights.index import module_tensors
from aiosync.weights.sharded import reshard
from aiosync.weights.strategy import WeightStrategy, to_tensordict

__all__ = ["extract_groups", "is_per_worker"]


def is_per_worker(weights: Any) -> bool:
    """Whether this is a dict of worker index -> weights rather than weights."""
    # A TensorDict calls itself a mapping but cannot be asked whether it is empty.
    return type(weights) is dict and bool(weights) and all(isinstance(key, int) for key in weights)


async def extract_groups(
    plan: SenderPlan, given: Any, targets: set[int], strategy: WeightStrategy
) -> dict[int, Mapping[str, Tensor]]:
    """Number of the group -> entry name -> tensor, for every group that a target is in; without
    targets, for every group.

    Args:
        plan: whom to send to, and what by default.
        given: a source for all, a dict of worker -> source, or None for the plan's own.
        targets: the workers addressed.
        strategy: asked to extract if it is of the user's own making.

    Raises:
        InvalidArgumentError: weights per worker where workers share a copy, or a worker without any.
        UnsupportedTensorError: a weight that cannot be sent.
    """
    own = strategy if type(strategy).extract_weights is not WeightStrategy.extract_weights else None
    cache: dict[int, Mapping[str, Tensor]] = {}
    sources: dict[int, Mapping[str, Tensor]] = {}
    for number, group in enumerate(plan.groups):
        known = group.workers if len(plan.groups) > 1 else ()  # who comes later shares the only copy
        if targets and known and not targets & set(known):
            continue
        source = _source_for(plan, given, group.workers, group.weights)
        if id(source) not in cache:
            cache[id(source)] = await _extract(source, own)
        tensors = cache[id(source)]
        if plan.device_map_fn is not None:
            (worker,) = group.workers
            tensors = named_tensors(plan.device_map_fn(worker, to_tensordict(dict(tensors))))
        sources[number] = tensors
    return sources


def _source_for(plan: SenderPlan, given: Any, workers: tuple[int, ...], own: Any) -> Any:
    if is_per_worker(given):
        if not plan.per_worker:
            raise InvalidArgumentError(
                "weights per worker need per_worker_weights=True: here workers share one copy"
            )
        if workers[0] not in given:
            raise InvalidArgumentError(f"there are no weights for worker {workers[0]}, only {list(given)}")
        return given[workers[0]]
    if given is not None:
        return given
    return own if own is not None else plan.weights


async def _extract(source: Any, strategy: WeightStrategy | None) -> Mapping[str, Tensor]:
    if not isinstance(source, nn.Module):
        return named_tensors(source, strategy=strategy)
    adapts = callable(getattr(type(source), "merge_and_unload", None))
    if strategy is None and not adapts and not isinstance(source, TensorDictBase):
        return module_tensors(source)
    reshard(source)
    if not adapts:
        return named_tensors(source, strategy=strategy)
    # Adapters are merged on a copy of the whole model.
    offloader = Offloader("aiosync-merge")
    try:
        return await offloader.run(lambda _: named_tensors(source, strategy=strategy))
    finally:
        offloader.close()
