"""From what a ``send`` is given to named tensors of each group, and their match to a layout.

Both are cached while the same module is sent and has not changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError
from aiosync.sender.worker_plan import GroupPlan, SenderPlan
from aiosync.transports._offload import Offloader
from aiosync.weights.devices import cuda_devices
from aiosync.weights.flatten import check_sendable, named_tensors, optional_names, transient_tensors
from aiosync.weights.layout import Layout
from aiosync.weights.peft import PeftMode, base_parameters, has_adapters, presumed
from aiosync.weights.sharded import is_sharded, reshard
from aiosync.weights.strategy import WeightStrategy, to_tensordict
from aiosync.weights.tensors import check_dense
from aiosync.weights.walk import (
    Structure,
    check_unmerged,
    has_extra_state,
    is_mergeable,
    is_transient,
    join,
    leaves,
    modules,
)

T = TypeVar("T")

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

    async def extract(self, weights: Any, targets: set[int], deadline: Deadline) -> Sources:
        """The weights as named tensors, for each group that a target is in; without targets, for all groups.

        Args:
            weights: as for :meth:`aiosync.WeightSyncScheme.send`.
            targets: the workers.
            deadline: when to stop waiting for a device that computes the weights.

        Raises:
            SyncTimeoutError: the deadline has passed.
            InvalidArgumentError: there is nothing to send, a worker has no weights, or weights are given per
                worker and workers share a copy.
            UnsupportedTensorError: a weight that cannot be sent.
        """
        plan, given, strategy = self.plan, weights, self._strategy()
        if isinstance(weights, str) or (weights is None and not plan.has_weights):
            given = self._resolve(weights)
        if plan.plain and type(strategy) is WeightStrategy:
            source = self._source_for(given, plan.groups[0])
            unchanged = known_tensors(source, strategy.peft) if isinstance(source, nn.Module) else None
            if unchanged is not None:  # as almost always
                return {0: _with_transient(source, unchanged) if plan.transient else unchanged}
        peft = _peft_of(strategy)
        custom = strategy if type(strategy).extract_weights is not WeightStrategy.extract_weights else None
        cache: dict[int, Mapping[str, Tensor]] = {}
        sources: dict[int, Mapping[str, Tensor]] = {}
        for number, group in enumerate(plan.groups):
            known = group.workers if len(plan.groups) > 1 else ()  # a later worker shares the only copy
            if targets and known and not targets & set(known):
                continue
            source = self._source_for(given, group)
            if id(source) not in cache:
                tensors = await _extract(source, custom, peft, deadline)
                cache[id(source)] = _with_transient(source, tensors) if plan.transient else tensors
            tensors = cache[id(source)]
            if plan.device_map_fn is not None:
                (worker,) = group.workers
                tensors = named_tensors(plan.device_map_fn(worker, to_tensordict(dict(tensors))))
            sources[number] = tensors
        return sources

    async def presumed(
        self, weights: Any, cast: torch.dtype | None, deadline: Deadline
    ) -> Mapping[int, Mapping[str, str]]:
        """For each group, what updates presume of its workers' models; see :mod:`aiosync.weights.peft`.

        A thread reads the base of each model once, if it has to be read.

        Args:
            weights: as for :meth:`extract`.
            cast: the dtype that floating tensors are narrowed to.
            deadline: when to give up.

        Raises:
            SyncTimeoutError: the deadline has passed.
            InvalidArgumentError, UnsupportedTensorError: as :func:`.peft.presumed`.
        """
        peft, found = _peft_of(self._strategy()), dict[int, Mapping[str, str]]()
        if peft == "merged":
            return found
        unknown = isinstance(weights, str) or (weights is None and not self.plan.has_weights)
        given, known = self._resolve(weights) if unknown else weights, dict[int, Mapping[str, str]]()
        try:
            async with asyncio.timeout(deadline.remaining()):
                for number, group in enumerate(self.plan.groups):
                    source = self._source_for(given, group)
                    if not isinstance(source, nn.Module) or isinstance(source, TensorDictBase):
                        continue
                    if id(source) not in known:
                        work = partial(presumed, source, peft, cast)
                        reads = peft == "adapter"
                        known[id(source)] = (
                            await _offloaded(work, source, deadline) if reads else work(lambda: False)
                        )
                    found[number] = known[id(source)]
        except TimeoutError as exc:
            hint = "the digest of the base weights was not finished"
            raise deadline.error("connect", hint=hint) from exc
        return found

    def _source_for(self, given: Any, group: GroupPlan) -> Any:
        if is_per_worker(given):
            if not self.plan.per_worker:
                raise InvalidArgumentError(
                    "weights per worker need per_worker_weights=True: here workers share one copy"
                )
            worker = group.workers[0]
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


def _peft_of(strategy: WeightStrategy) -> PeftMode:
    # A user's strategy may be of another class that has the same methods, such as torchrl's.
    peft: PeftMode = getattr(strategy, "peft", "merged")
    return peft


async def _extract(
    source: Any, strategy: WeightStrategy | None, peft: PeftMode, deadline: Deadline
) -> Mapping[str, Tensor]:
    if not isinstance(source, nn.Module):
        return named_tensors(source, strategy=strategy, peft=peft)
    if strategy is None and not isinstance(source, TensorDictBase):
        known = known_tensors(source, peft)
        if known is not None:
            return known
        index = _indexed(source, peft)
        if index.reusable:
            return index.tensors
        merges = index.merges
    else:
        reshard(source)
        merges = peft == "merged" and any(is_mergeable(part) for part in source.modules())
    if not merges:
        return named_tensors(source, strategy=strategy, peft=peft)
    # Adapters are merged on a copy of the whole model.
    work = partial(named_tensors, source, strategy=strategy, peft=peft)
    return await _offloaded(lambda _: work(), source, deadline)


def _with_transient(source: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors and the non-persistent buffers of a module."""
    more = transient_tensors(source) if isinstance(source, nn.Module) else {}
    return {**tensors, **more} if more else tensors


async def _offloaded(work: Callable[[Callable[[], bool]], T], model: nn.Module, deadline: Deadline) -> T:
    """Run ``work(cancelled)``, which reads the model, in a thread. Raises as ``Offloader.settle_until``."""
    with closing(Offloader("aiosync-peft")) as offloader:
        await offloader.settle_until(cuda_devices(chain(model.parameters(), model.buffers())), deadline)
        return await offloader.run(work)


class Fit:
    """A source's tensors, matched to the entries of a layout. Raises as :meth:`Layout.fit`."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
        # (entry name, tensor) in buffer order, and the size of these entries in the layout, in bytes.
        self.pairs = layout.fit(tensors, strict=strict)
        self.nbytes = sum(layout[name].nbytes for name, _ in self.pairs)
        # Whether there is every entry, and whether any tensor is a DTensor.
        self.whole = len(self.pairs) == len(layout)
        self.tensors = [tensor for _, tensor in self.pairs]
        self.sharded = any(map(is_sharded, self.tensors))
        # Whether all are in the memory of this process.
        self.on_cpu = all(tensor.is_cpu for tensor in self.tensors)
        self._layout = layout
        self._looks = [(tensor, tensor.dtype, tensor.shape, tensor.device) for tensor in self.tensors]
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

        A tensor's ``.data`` may have been replaced by data of another dtype or shape, or on another device.
        """
        if not self._lasting or layout is not self._layout:
            return False
        for tensor, dtype, shape, device in self._looks:
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.device != device:
                return False
        return True


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

    def __init__(self, module: nn.Module, peft: PeftMode) -> None:
        self.tensors = KnownTensors()
        self.spread = reshard(module)
        self.structure = Structure(module)
        self.reusable = self.structure.comparable
        adapted = has_adapters(module)
        # How the adapters were treated; None: there are none, so that the result is the same in all modes.
        self.peft = peft if adapted else None
        # Whether adapters have to be merged. A merged copy is made again for each send.
        self.merges = adapted and peft == "merged" and any(map(is_mergeable, module.modules()))
        # Of the base, the parameters that require gradients are sent and the others are not.
        base = base_parameters(module) if peft == "adapter" else {}
        self._base = [(parameter, parameter.requires_grad) for parameter in base.values()]
        left_out = {name for name, parameter in base.items() if not parameter.requires_grad}
        for prefix, part in modules(module, merge=False):
            if self.merges or isinstance(part, TensorDictBase) or has_extra_state(part):
                self.reusable = False
            if not self.reusable:
                return
            self._add(prefix, part, left_out)

    def _add(self, prefix: str, part: nn.Module, left_out: Collection[str]) -> None:
        check_sendable(prefix, part)
        check_unmerged(prefix, part)
        for key, tensor in leaves(part):
            if not is_transient(part, key) and (name := join(prefix, key)) not in left_out:
                check_dense(name, tensor, allow_meta=False)
                self.tensors[name] = tensor

    def treats(self, peft: PeftMode) -> bool:
        """Return whether a model with adapters would be treated in the same way now."""
        return self.peft == peft and all(p.requires_grad is trained for p, trained in self._base)


_known: WeakKeyDictionary[nn.Module, _Index] = WeakKeyDictionary()


def known_tensors(module: nn.Module, peft: PeftMode = "merged") -> KnownTensors | None:
    """Return the cached result of :func:`module_tensors`; None: there is none, or it is no longer valid."""
    index = _known.get(module)
    if index is None:
        return None
    if index.spread:
        reshard(module)
    if index.peft is not None and not index.treats(peft):
        return None
    return index.tensors if index.structure.unchanged() else None


def module_tensors(module: nn.Module, peft: PeftMode = "merged") -> Mapping[str, Tensor]:
    """Return a module's names -> tensors; otherwise as :func:`named_tensors`.

    If the result can be cached, the tensors are the parameters themselves, not detached.
    """
    tensors = known_tensors(module, peft)
    if tensors is not None:
        return tensors
    index = _indexed(module, peft)
    return index.tensors if index.reusable else named_tensors(module, peft=peft)


def _indexed(module: nn.Module, peft: PeftMode) -> _Index:
    """Walk through a module, and keep the result if it can be used again."""
    index = _Index(module, peft)
    if index.reusable:
        _known[module] = index
    else:
        _known.pop(module, None)
    return index
