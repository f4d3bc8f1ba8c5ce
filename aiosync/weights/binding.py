"""A destination bound to a layout: what a commit changes in it, and how that is taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

import msgspec
from torch import Tensor

from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import WeightTarget, receiver_slots, receiver_tensors, write
from aiosync.weights.ties import check_tied

__all__ = ["Binding", "CommitMode", "Staged", "StaleConversion", "over_same_memory"]

CommitMode: TypeAlias = Literal["flip", "copy"]


class StaleConversion(Exception):
    """A value was converted for a tensor that has another dtype by now. A second conversion would lose bits,
    so the value that was sent is needed again."""


class Staged(msgspec.Struct, eq=False):
    """An update's tensors, ready to be committed.

    Attributes:
        views: every name of the layout -> its new value.
        own: the names whose value lies in memory of this process alone, so that a worker may write into it.
        lasting: the names whose value lies in memory that stays as it is for as long as the model views it.
            All other values lie in memory that the sender will write again.
        generation: the binding's when this was staged; if it has changed since, values may have another
            dtype or device than the model's tensors.
        written: which of the given names this process has written into, in the memory that the version in
            service lies in; None: its parameters are read only by contract.
        leaving: names that are to get memory of their own, if the update is not about them.
        is_lent: whether an address lies in memory that updates arrive in, and which will be written again.
    """

    views: Mapping[str, Tensor]
    own: Collection[str] = frozenset()
    lasting: Collection[str] = frozenset()
    generation: int = -1
    written: Callable[[Collection[str]], Collection[str]] | None = None
    leaving: Collection[str] = ()
    is_lent: Callable[[int], bool] | None = None


def over_same_memory(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors, for others to re-point and to reshape; those that are one tensor stay one."""
    made: dict[int, Tensor] = {}
    return {name: made.setdefault(id(view), view.detach()) for name, view in views.items()}


class Binding:
    """How commits reach a destination; this one goes through the strategy's ``apply_weights``.

    It serves destinations that are no modules, strategies of the user's own making, and none at all.

    Attributes:
        generation: changes whenever :meth:`needs` does.
    """

    def __init__(self, model: WeightTarget | None, layout: Layout, strategy: WeightStrategy) -> None:
        self.model = model
        self.layout = layout
        self.generation = 0
        self._strategy = strategy
        self._ties = Layout.of(receiver_tensors(model)).aliases if model is not None else {}

    def needs(self) -> Mapping[str, Tensor]:
        """The tensors that will view the committed memory, by name: it has to have their device and dtype."""
        return {}

    def targets(self) -> Mapping[str, Tensor]:
        """All tensors that a commit changes, by name: those of :meth:`needs`, and those it copies into."""
        return self.needs()

    def needs_own(self) -> Collection[str]:
        """Those of :meth:`needs` that must not view memory of other processes."""
        return ()

    def refresh(self) -> bool:
        """Look at the model again if it has changed since the last commit; returns whether it has.

        Raises:
            LayoutMismatchError: it does not fit the layout any more.
            UnsupportedTensorError: it has a tensor that cannot be received into.
        """
        return False

    def check(self, views: Mapping[str, Tensor]) -> None:
        """Check what only the values can tell.

        Raises:
            LayoutMismatchError: two values for what is one tensor here.
        """
        if self._ties:
            check_tied(views, self._ties)

    @contextmanager
    def committing(
        self, staged: Staged, names: Collection[str] | None = None, *, reversible: bool = False
    ) -> Iterator[None]:
        """Put staged values in service on entry; take that back if the body raises.

        Args:
            staged: the values.
            names: the entries that were sent, where the others keep the values that they have.
            reversible: whether the body may raise. Without it, what can no longer fail is not saved.

        Raises:
            Exception: whatever the destination raises; it then has the weights that it had before.
        """
        if self.model is None:
            yield
            return
        given = over_same_memory(staged.views)
        if names is not None:
            given = {name: view for name, view in given.items() if name in names}
        # aiosync's own strategy changes all or nothing; another one may fail half way.
        saved = reversible or type(self._strategy) is not WeightStrategy
        before = [
            (slot, slot.tensor.clone())
            for slot in (receiver_slots(self.model) if saved else ())
            if not slot.tensor.is_meta
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

    def commit(self, staged: Staged, names: Collection[str] | None = None) -> None:
        """Put staged values in service; raises as :meth:`committing`."""
        with self.committing(staged, names):
            pass

    def detach(self, is_lent: Callable[[int], bool]) -> None:
        """Give what lies at addresses that ``is_lent`` holds true for memory of the model's own, with the
        values that it has."""

    def forget_replaced(self) -> None:
        """Free what the last commit put out of service. Takes time where that was the model's own
        memory, so call it in a thread after the first."""
