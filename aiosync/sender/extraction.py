"""From what a ``send`` is given to named tensors, worker by worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError
from aiosync.sender.worker_plan import GroupPlan, SenderPlan
from aiosync.transports._offload import Offloader
from aiosync.weights.flatten import named_tensors, optional_names
from aiosync.weights.index import known_tensors, module_tensors
from aiosync.weights.sharded import reshard
from aiosync.weights.strategy import WeightStrategy, to_tensordict

Sources: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""Number of the group -> entry name -> tensor."""


def is_per_worker(weights: Any) -> bool:
    """Whether this is a dict of worker index -> weights rather than weights."""
    # A TensorDict calls itself a mapping but cannot be asked whether it is empty.
    return type(weights) is dict and bool(weights) and all(isinstance(key, int) for key in weights)


class WeightSource:
    """Finds the weights that a call of ``send`` is to send.

    Args:
        plan: the workers, and the weights to send by default.
        resolve: takes the argument of a call (weights, a dotted path, or None) and returns the weights.
        strategy: returns the scheme's strategy, which the user may set at any time.
    """

    def __init__(
        self, plan: SenderPlan, resolve: Callable[[Any], Any], strategy: Callable[[], WeightStrategy]
    ) -> None:
        self.plan = plan
        self._resolve = resolve
        self._strategy = strategy

    async def extract(self, weights: Any, targets: set[int]) -> Sources:
        """The weights as named tensors, for each group that a target is in; without targets, for all groups.

        Args:
            weights: as for :meth:`aiosync.WeightSyncScheme.send`.
            targets: the workers.

        Raises:
            InvalidArgumentError: there is nothing to send, a worker has no weights, or weights are given per
                worker and workers share a copy.
            UnsupportedTensorError: a weight that cannot be sent.
        """
        plan, given, strategy = self.plan, weights, self._strategy()
        if isinstance(weights, str) or (weights is None and not plan.has_weights):
            given = self._resolve(weights)
        if plan.plain and isinstance(given, nn.Module) and type(strategy) is WeightStrategy:
            unchanged = known_tensors(given)
            if unchanged is not None:
                return {0: unchanged}  # as almost always
        custom = strategy if type(strategy).extract_weights is not WeightStrategy.extract_weights else None
        cache: dict[int, Mapping[str, Tensor]] = {}
        sources: dict[int, Mapping[str, Tensor]] = {}
        for number, group in enumerate(plan.groups):
            known = group.workers if len(plan.groups) > 1 else ()  # a later worker shares the only copy
            if targets and known and not targets & set(known):
                continue
            source = self._source_for(given, group)
            if id(source) not in cache:
                cache[id(source)] = await _extract(source, custom)
            tensors = cache[id(source)]
            if plan.device_map_fn is not None:
                (worker,) = group.workers
                tensors = named_tensors(plan.device_map_fn(worker, to_tensordict(dict(tensors))))
            sources[number] = tensors
        return sources

    def _source_for(self, given: Any, group: GroupPlan) -> Any:
        if is_per_worker(given):
            worker = group.workers[0]
            if not self.plan.per_worker:
                raise InvalidArgumentError(
                    "weights per worker need per_worker_weights=True: here workers share one copy"
                )
            if worker not in given:
                raise InvalidArgumentError(f"there are no weights for worker {worker}, only {list(given)}")
            return given[worker]
        if given is not None:
            return given
        return group.weights if group.weights is not None else self.plan.weights

    def optional(self, weights: Any) -> frozenset[str]:
        """Names that the models have and that are not sent (non-persistent buffers, say)."""
        plan = self.plan
        known = [m for m in (weights, plan.weights, *(g.weights for g in plan.groups)) if m is not None]
        return frozenset().union(*(optional_names(model) for model in known or [self._resolve(None)]))


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
