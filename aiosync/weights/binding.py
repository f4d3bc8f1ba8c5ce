"""A model bound to a layout: what a commit changes in it, and how that is taken back.

``flip`` re-points each parameter's ``.data`` at the new memory, which takes microseconds whatever the
size; the parameter objects stay the same. ``copy`` writes into the memory that the parameters have, for
CUDA graphs and code that holds raw pointers. Buffers are always copied, so that what a worker writes
into them (BatchNorm statistics, say) stays its own. Extra state goes through ``set_extra_state``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from aiosync.weights.dense import memory_key
from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import optional_names
from aiosync.weights.layout import Layout
from aiosync.weights.names import is_extra_state
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import (
    WeightTarget,
    overlaps_itself,
    receiver_slots,
    receiver_tensors,
    write,
)
from aiosync.weights.ties import check_tied

__all__ = ["Binding", "CommitMode", "bind"]

CommitMode: TypeAlias = Literal["flip", "copy"]


class Binding:
    """How commits reach a destination; this one goes through the strategy's ``apply_weights``.

    It serves destinations that are no modules, strategies of the user's own making, and none at all.
    """

    def __init__(self, model: WeightTarget | None, layout: Layout, strategy: WeightStrategy) -> None:
        self.model = model
        self.layout = layout
        self._strategy = strategy
        self._ties = Layout.of(receiver_tensors(model)).aliases if model is not None else {}

    def viewed(self) -> Mapping[str, nn.Parameter]:
        """The parameters that will view the committed memory for as long as it is in service."""
        return {}

    def check(self, views: Mapping[str, Tensor]) -> None:
        """Check what only the values can tell.

        Raises:
            LayoutMismatchError: two values for what is one tensor here.
        """
        if self._ties:
            check_tied(views, self._ties)

    @contextmanager
    def committing(
        self,
        views: Mapping[str, Tensor],
        names: Collection[str] | None = None,
        *,
        reversible: bool = False,
    ) -> Iterator[None]:
        """Put ``views`` in service on entry; take that back if the body raises.

        Args:
            views: every name of the layout -> its new value.
            names: the entries that have changed, where the others must not be touched.
            reversible: whether the body may raise. Without it, what can no longer fail is not saved.

        Raises:
            Exception: whatever the destination raises; it then has the weights that it had before.
        """
        if self.model is None:
            yield
            return
        given = {name: view for name, view in views.items() if names is None or name in names}
        before = [
            (slot, slot.tensor.clone()) for slot in receiver_slots(self.model) if not slot.tensor.is_meta
        ]
        try:
            self._apply(given)
            yield
        except BaseException:
            write(before, inplace=True)
            raise

    def _apply(self, weights: dict[str, Tensor]) -> None:
        assert self.model is not None
        if len(weights) < len(self.layout.names):
            self._strategy.apply_weights(self.model, weights, strict=False)
        else:
            self._strategy.apply_weights(self.model, weights)

    def commit(self, views: Mapping[str, Tensor], names: Collection[str] | None = None) -> None:
        """Put ``views`` in service; raises as :meth:`committing`."""
        with self.committing(views, names):
            pass

    def detach(self) -> None:
        """Give the model memory of its own again, with the values that it has."""

    def forget_replaced(self) -> None:
        """Free what the last commit put out of service. Takes time where that was the model's own
        memory, so call it in a thread after the first."""


class ModuleBinding(Binding):
    """How commits reach an ``nn.Module``.

    Args:
        model: the module; what is on ``meta`` is materialised by the first commit.
        layout: the sender's layout, which has been checked against the module.
        strategy: the scheme's strategy.
        mode: ``flip`` or ``copy``, for the parameters.
    """

    def __init__(self, model: nn.Module, layout: Layout, strategy: WeightStrategy, mode: CommitMode) -> None:
        super().__init__(model, layout, strategy)
        self._module = model
        self._mode = mode
        self._flips: dict[str, nn.Parameter] = {}
        self._copies: dict[str, Tensor] = {}
        self._meta = False
        self._replaced: list[tuple[nn.Parameter, Tensor]] = []
        self._shown: Mapping[str, Tensor] = {}
        self._sort()
        self._extra = tuple(name for name in layout.names if is_extra_state(name))

    def _sort(self) -> None:
        """Find the module's tensors, and what is to be done with each."""
        self._flips.clear()
        self._copies.clear()
        entries = receiver_tensors(self._module)
        seen: set[int] = set()
        for name in self.layout.names:
            target = entries.get(name)
            if target is None or id(target) in seen:
                continue
            seen.add(id(target))
            self._meta |= target.is_meta
            if isinstance(target, nn.Parameter) and self._mode == "flip":
                self._flips[name] = target
            else:
                self._copies[name] = target

    def _materialize(self, views: Mapping[str, Tensor]) -> None:
        """Give what is on ``meta`` memory; whatever happens after, it does not go back there."""
        slots = receiver_slots(self._module)
        write([(s, views[s.name]) for s in slots if s.tensor.is_meta], inplace=False)
        self._meta = False
        self._sort()

    def viewed(self) -> Mapping[str, nn.Parameter]:
        """The parameters that flip."""
        return self._flips

    @contextmanager
    def committing(
        self,
        views: Mapping[str, Tensor],
        names: Collection[str] | None = None,
        *,
        reversible: bool = False,
    ) -> Iterator[None]:
        """See :meth:`Binding.committing`."""
        if self._meta:
            self._materialize(views)
        extra = {n: views[n] for n in self._extra if names is None or n in names}
        partial = names is not None
        with applying_extra_state(self._module, extra, merge=partial), ExitStack() as undo:
            with torch.no_grad():
                for name, target in self._copies.items():
                    if names is None or name in names:
                        # A parameter is saved only if it has to be: that would cost a second copy.
                        saved = reversible or not isinstance(target, nn.Parameter)
                        _copy(target, views[name], undo if saved else None)
            undo.callback(_point_back, self._flip(views))
            yield
            undo.pop_all()

    def commit(self, views: Mapping[str, Tensor], names: Collection[str] | None = None) -> None:
        """See :meth:`Binding.commit`. Where there is nothing but flips this is a plain loop."""
        if self._extra or self._copies or self._meta:
            super().commit(views, names)
        else:
            self._flip(views)

    def _flip(self, views: Mapping[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        replaced: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for name, parameter in self._flips.items():
                before = self._shown.get(name)
                if before is None or before.data_ptr() != parameter.data_ptr():
                    before = parameter.data  # a tensor that has to be made for it
                replaced.append((parameter, before))
                parameter.data = views[name]
        except BaseException:
            _point_back(replaced)
            raise
        self._replaced, self._shown = replaced, views
        return replaced

    def detach(self) -> None:
        """Give the parameters memory of their own, with the values that they have."""
        self._shown = {}
        own: dict[object, Tensor] = {}  # those that are tied stay it
        with torch.no_grad():
            for parameter in self._flips.values():
                key = memory_key(parameter.data)
                if key not in own:
                    own[key] = parameter.data.clone()
                parameter.data = own[key]

    def forget_replaced(self) -> None:
        """See :meth:`Binding.forget_replaced`."""
        self._replaced = []


def bind(model: WeightTarget | None, layout: Layout, strategy: WeightStrategy, mode: CommitMode) -> Binding:
    """Bind ``model`` to the sender's ``layout``.

    Raises:
        LayoutMismatchError: the model has other names, shapes or dtypes.
    """
    if model is not None:
        layout.check_receiver(receiver_tensors(model), optional=optional_names(model))
    own_way = type(strategy).apply_weights is not WeightStrategy.apply_weights
    if isinstance(model, nn.Module) and not isinstance(model, TensorDictBase) and not own_way:
        return ModuleBinding(model, layout, strategy, mode)
    return Binding(model, layout, strategy)


def _point_back(replaced: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, before in reversed(replaced):
        parameter.data = before


def _copy(target: Tensor, view: Tensor, undo: ExitStack | None) -> None:
    if overlaps_itself(target):
        # An expanded tensor cannot be written element by element: it gets memory of its own.
        if undo is not None:
            undo.callback(setattr, target, "data", target.data)
        target.data = target.new_empty(target.shape).copy_(view)
        return
    if undo is not None:
        undo.callback(target.detach().copy_, target.detach().clone())
    target.detach().copy_(view)
