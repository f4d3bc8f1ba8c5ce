"""A destination bound to a layout: what a commit changes in it, and how a commit is undone."""

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

CommitMode: TypeAlias = Literal["flip", "copy"]


class StaleConversion(Exception):
    """A value was converted for a tensor whose dtype has changed since.

    A second conversion would lose bits, so the value that was sent has to be staged again.
    """


class Staged(msgspec.Struct, eq=False):
    """An update's tensors, ready to be committed.

    Attributes:
        views: every name of the layout -> its new value.
        own: names whose values are in memory of this process alone, which a worker may write.
        lasting: names whose values are in memory that does not change while the model views it. All other
            values are in memory that the sender will write again.
        generation: the binding's generation when the update was staged. If it has changed since, values may
            have another dtype or device than the model's tensors.
        written: returns which of the given names this process has written in the memory of the current
            version. None: the parameters are read-only by contract.
        leaving: names that get their own memory, unless the update contains them.
        is_lent: returns whether an address is in memory that updates arrive in and that will be written
            again.
    """

    views: Mapping[str, Tensor]
    own: Collection[str] = frozenset()
    lasting: Collection[str] = frozenset()
    generation: int = -1
    written: Callable[[Collection[str]], Collection[str]] | None = None
    leaving: Collection[str] = ()
    is_lent: Callable[[int], bool] | None = None


def over_same_memory(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new tensors over the same memory, which may be re-pointed and reshaped. Tied names share one
    tensor."""
    made: dict[int, Tensor] = {}
    return {name: made.setdefault(id(view), view.detach()) for name, view in views.items()}


class Binding:
    """Commits updates to a destination, by the strategy's ``apply_weights``.

    This class serves destinations that are not modules, users' own strategies, and receivers without a model.

    Args:
        model: the destination; None: there is none.
        layout: the sender's layout.
        strategy: the scheme's strategy.

    Attributes:
        generation: changes whenever the result of :meth:`needs` changes.
    """

    def __init__(self, model: WeightTarget | None, layout: Layout, strategy: WeightStrategy) -> None:
        self.model = model
        self.layout = layout
        self.generation = 0
        self._strategy = strategy
        self._ties = Layout.of(receiver_tensors(model)).aliases if model is not None else {}

    def needs(self) -> Mapping[str, Tensor]:
        """Return name -> tensor that will view the committed memory, which needs the tensor's device and
        dtype."""
        return {}

    def targets(self) -> Mapping[str, Tensor]:
        """Return name -> tensor that a commit changes: those of :meth:`needs`, and those that it copies
        into."""
        return self.needs()

    def needs_own(self) -> Collection[str]:
        """Return the names of :meth:`needs` that must not view memory of other processes."""
        return ()

    def refresh(self) -> bool:
        """Bind the model again if it has changed since the last commit; returns whether it has.

        Raises:
            LayoutMismatchError: the model no longer fits the layout.
            UnsupportedTensorError: the model has a tensor that updates cannot be written to.
        """
        return False

    def check(self, views: Mapping[str, Tensor]) -> None:
        """Check the values of an update.

        Raises:
            LayoutMismatchError: two names of one tied tensor have different values.
        """
        if self._ties:
            check_tied(views, self._ties)

    @contextmanager
    def committing(
        self, staged: Staged, names: Collection[str] | None = None, *, reversible: bool = False
    ) -> Iterator[None]:
        """Commit staged values on entry; undo the commit if the body raises.

        Args:
            staged: the values.
            names: the entries that were sent; the others keep their values. None: all entries.
            reversible: whether the body may raise. If not, values are not saved for an undo that cannot
                happen.

        Raises:
            Exception: any exception of the destination. The destination then has its previous weights.
        """
        if self.model is None:
            yield
            return
        given = over_same_memory(staged.views)
        if names is not None:
            given = {name: view for name, view in given.items() if name in names}
        # aiosync's own strategy changes all or nothing. A user's strategy may fail half way.
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
        """Commit staged values. Raises as :meth:`committing`."""
        with self.committing(staged, names):
            pass

    def detach(self, is_lent: Callable[[int], bool]) -> None:
        """Copy the model's tensors at addresses for which ``is_lent`` returns true into memory of the model's
        own."""

    def forget_replaced(self) -> None:
        """Free the memory that the last commit replaced.

        After the first commit this frees the model's own memory, which takes time: call it in a thread then.
        """
