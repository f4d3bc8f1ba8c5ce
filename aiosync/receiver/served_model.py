"""The model that a receiver keeps in step, and the weights in service."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from aiosync.protocol.frames import Update
from aiosync.receiver.listeners import UpdateListener
from aiosync.receiver.updates import PendingUpdate
from aiosync.weights.binding import Binding, Staged
from aiosync.weights.layout import Layout
from aiosync.weights.target import WeightTarget, receiver_tensors

__all__ = ["ServedModel", "own_copies"]


class ServedModel:
    """A model, its binding to the sender's layout, and the weights in service.

    Args:
        model: the model; None if the caller only reads :attr:`weights`.
        listener: notified of each update.
        may_view: whether the model may view the sender's memory. False if other code writes into its
            parameters.
        bind: takes a layout, and returns the model's binding to it.

    Attributes:
        make_binding: ``bind``; the model may be another one since.
        version: the version in service, -1 before the first.
        weights: the tensors in service, name -> tensor.
        viewing: whether the version in service lies in the sender's memory.
        leftover: whether the model's own memory, which the first commit replaced, is still to be freed.
    """

    def __init__(
        self,
        model: WeightTarget | None,
        listener: UpdateListener,
        *,
        may_view: bool,
        bind: Callable[[Layout], Binding],
    ) -> None:
        self.model = model
        self.listener = listener
        # What a commit calls; None, if that does nothing.
        self._notify_commit = _commit_hook(listener)
        self.may_view = may_view
        # The sender's layout; None before bind().
        self.layout: Layout | None = None
        self.version = -1
        self.weights: Mapping[str, Tensor] = {}
        self.viewing = False
        self.leftover = False
        self.make_binding = bind
        # The binding to the sender's layout, set by bind().
        self.binding: Binding
        # The version that the listener was last notified of by acting().
        self._acted = -1

    def bind(self, layout: Layout) -> None:
        """Bind the model to the sender's layout. Raises as :func:`~aiosync.weights.module_binding.bind`."""
        self.binding, self.layout = self.make_binding(layout), layout

    def rebind(
        self, binding: Binding, model: WeightTarget | None, own: dict[str, Tensor], *, may_view: bool
    ) -> None:
        """Go on with another model.

        Args:
            binding: the model's binding, as ``make_binding`` returned it.
            model: the model, which has the weights in service.
            own: the tensors that it has them in.
            may_view: whether later versions may be viewed by it.
        """
        self.binding, self.model, self.may_view, self.weights = binding, model, may_view, own
        self.viewing, self.leftover = False, True

    def names_of(self, update: Update) -> Collection[str] | None:
        """The names that an update changes, aliases included; None: all."""
        # The update names what changed since its base. A model that has another version needs all entries.
        if update.names is None or update.base != self.version:
            return None
        names = set(update.names)
        aliases = self.binding.layout.aliases
        return names.union(alias for alias, name in aliases.items() if name in names)

    def commit(self, pending: PendingUpdate, views_sender: bool) -> None:
        """Put a staged update in service. Runs in any thread, while no reader uses the model.

        Args:
            pending: the update.
            views_sender: whether the model views the sender's memory afterwards.
        """
        assert pending.staged is not None
        started = time.perf_counter()
        self.binding.commit(pending.staged, pending.names)
        self._set_in_service(pending, pending.staged, views_sender, started)

    @contextmanager
    def committing(self, pending: PendingUpdate, views_sender: bool) -> Iterator[None]:
        """:meth:`commit` for the length of the body. It is undone if the body raises."""
        assert pending.staged is not None
        started = time.perf_counter()
        before = self.version, self.weights, self.viewing
        try:
            with self.binding.committing(pending.staged, pending.names, reversible=True):
                self._set_in_service(pending, pending.staged, views_sender, started)
                yield
        except BaseException:
            self.version, self.weights, self.viewing = before
            pending.committed = False
            raise

    def _set_in_service(
        self, pending: PendingUpdate, staged: Staged, views_sender: bool, started: float
    ) -> None:
        if pending.names is None or not self.weights:
            self.weights = staged.views
        else:  # an entry that was not sent stays where it is, unless the sender will write into that memory
            kept = [name for name in self.weights if name in staged.lasting and name not in pending.names]
            before = {name: self.weights[name] for name in kept}
            before |= {name: before[name].clone() for name in kept if name in staged.leaving}
            self.weights = {**staged.views, **before}
        self.version = pending.update.version
        self.leftover |= views_sender and not self.viewing
        self.viewing = views_sender
        pending.committed = True
        if self._notify_commit is not None:
            self._notify_commit(self.version)
        pending.seconds["commit"] = time.perf_counter() - started

    def acting(self) -> None:
        """A forward pass begins. Notify the listener if it is the first with the version in service."""
        if self._acted != self.version >= 0:
            self._acted = self.version
            self.listener.acting(self.version)

    def listen(self, listener: UpdateListener) -> None:
        """Notify another listener from now on."""
        if listener is not self.listener:
            self.listener, self._acted = listener, -1
            self._notify_commit = _commit_hook(listener)

    def forget_leftover(self) -> None:
        """Free the memory that the model had before its first commit. Blocking."""
        self.binding.forget_replaced()
        self.leftover = False

    def take_over(self, is_lent: Callable[[int], bool], *, keep: bool) -> None:
        """Copy the version in service into memory of this process. Blocking.

        Args:
            is_lent: whether the sender will write into the memory at an address.
            keep: whether :attr:`weights` stay readable.
        """
        self.binding.detach(is_lent)
        self.binding.forget_replaced()
        self.weights = {name: t.clone() for name, t in self.weights.items()} if keep else {}
        self.viewing = False


def _commit_hook(listener: UpdateListener) -> Callable[[int], None] | None:
    return None if type(listener).committed is UpdateListener.committed else listener.committed


def own_copies(views: Mapping[str, Tensor], model: WeightTarget | None) -> dict[str, Tensor]:
    """Copies of weights, each on the device and of the dtype of the model's tensor. Blocking."""
    targets = receiver_tensors(model) if model is not None else {}
    like = {name: target for name, target in targets.items() if not target.is_meta}
    return {
        name: view.to(like[name].device, like[name].dtype, copy=True) if name in like else view.clone()
        for name, view in views.items()
    }
