"""From what a ``send`` is given to named tensors of each group, and their match to a layout.

Both are cached while the same module is sent and has not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.errors import InvalidArgumentError
from aiosync.sender.worker_plan import GroupPlan, SenderPlan
from aiosync.transports._offload import Offloader
from aiosync.weights.flatten import check_sendable, named_tensors, optional_names
from aiosync.weights.layout import Layout
from aiosync.weights.sharded import is_sharded, reshard
from aiosync.weights.strategy import WeightStrategy, to_tensordict
from aiosync.weights.tensors import check_dense
from aiosync.weights.walk import Structure, has_extra_state, is_transient, join, leaves, modules

Sources: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""Number of the group -> entry name -> tensor."""


def is_per_worker(weights: Any) -> bool:
    """Whether this is a dict of worker index -> weights rather than weights."""
    # A TensorDict calls itself a mapping but cannot be asked whether it is empty.
    return type(weights) is dict and bool(weights) and all(isinstance(key, int) for key in weights)


@dataclass(eq=False, repr=False)
class WeightSource:
    """Finds the weights that a call of ``send`` is to send."""

    plan: SenderPlan  # the workers, and the weights to send by default
    # Takes the argument of a call (weights, a dotted path, or None) and returns the weights.
    _resolve: Callable[[Any], Any]
    # Returns the scheme's strategy, which the user may set at any time.
    _strategy: Callable[[], WeightStrategy]

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


class Fit:
    """A source's tensors, matched to the entries of a layout. Raises as :meth:`Layout.fit`."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
        # (entry name, tensor) in buffer order, and the size of these entries in the layout, in bytes.
        self.pairs = layout.fit(tensors, strict=strict)
        self.nbytes = sum(layout[name].nbytes for name, _ in self.pairs)
        # Whether there is every entry, and whether any tensor is a DTensor.
        self.whole = len(self.pairs) == len(layout)
        self.sharded = any(is_sharded(tensor) for _, tensor in self.pairs)
        self._layout = layout
        self._looks = [(tensor.dtype, tensor.shape, False) for _, tensor in self.pairs]
        # Tied names with separate memory may have different values the next time.
        self._lasting = (
            strict
            and self.whole
            and all(
                tensors[alias] is tensors.get(name)
                for alias, name in layout.aliases.items()
                if alias in tensors
            )
        )

    def holds(self, layout: Layout) -> bool:
        """Return whether this match is still valid for ``layout``.

        A tensor's ``.data`` may have been replaced by data of another dtype or shape, or on ``meta``.
        """
        if not self._lasting or layout is not self._layout:
            return False
        return [(tensor.dtype, tensor.shape, tensor.is_meta) for _, tensor in self.pairs] == self._looks


class KnownTensors(dict[str, Tensor]):
    """Names -> tensors that are not changed, with their last match in ``fitted``."""

    fitted: Fit | None = None


def fit(layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> Fit:
    """Match a source's tensors to a layout, or return the last match if it is still valid. Raises as
    :meth:`Layout.fit`."""
    if not isinstance(tensors, KnownTensors):
        return Fit(layout, tensors, strict=strict)
    found = tensors.fitted  # read once: another thread may send the same module with another layout
    if found is None or not found.holds(layout):
        found = tensors.fitted = Fit(layout, tensors, strict=strict)
    return found


class _Index:
    """The result of a walk through a module, and the structure for which it is valid."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = KnownTensors()
        self.spread = reshard(module)
        self.structure = Structure(module)
        self.reusable = self.structure.comparable
        own = {id(part) for part in module.modules()}
        for prefix, part in modules(module, merge=True) if self.reusable else ():
            # An adapter's merged copy is not a part of the module, and is made again at each walk.
            if id(part) not in own or isinstance(part, TensorDictBase) or has_extra_state(part):
                self.reusable = False
                return
            check_sendable(prefix, part)
            for key, tensor in leaves(part):
                if not is_transient(part, key):
                    name = join(prefix, key)
                    check_dense(name, tensor, allow_meta=False)
                    self.tensors[name] = tensor


_known: WeakKeyDictionary[nn.Module, _Index] = WeakKeyDictionary()


def known_tensors(module: nn.Module) -> KnownTensors | None:
    """Return the cached result of :func:`module_tensors`; None: there is none, or it is no longer valid."""
    index = _known.get(module)
    if index is None:
        return None
    if index.spread:
        reshard(module)
    return index.tensors if index.structure.unchanged() else None


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's names -> tensors; otherwise as :func:`named_tensors`.

    If the result can be cached, the tensors are the parameters themselves, not detached.
    """
    tensors = known_tensors(module)
    if tensors is not None:
        return tensors
    index = _Index(module)
    if not index.reusable:
        _known.pop(module, None)
        return named_tensors(module)
    _known[module] = index
    return index.tensors
