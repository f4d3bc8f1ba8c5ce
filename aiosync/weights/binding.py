"""A destination bound to a layout: what a commit changes in it, and how a commit is undone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from aiosync.weights.copying import INLINE_LIMIT
from aiosync.weights.devices import cuda_devices
from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import optional_names, transient_tensors
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy, nested_tensordict
from aiosync.weights.target import WeightTarget, receiver_slots, receiver_tensors, write
from aiosync.weights.tensors import check_tied
from aiosync.weights.walk import TORCH_EXTRA_STATE, is_extra_state

CommitMode: TypeAlias = Literal["flip", "copy"]


class StaleStaging(Exception):
    """What was staged is for another model, or for a tensor whose dtype has changed since.

    The values that were sent have to be staged again: a second conversion would lose bits.
    """


class Staged(msgspec.Struct, eq=False):
    """An update's tensors, ready to be committed."""

    views: Mapping[str, Tensor]  # every name of the layout -> its new value
    own: Collection[str] = frozenset()  # those in memory of this process alone, which a worker may write
    # Names whose values are in memory that does not change while the model views it. All other values are in
    # memory that the sender will write again.
    lasting: Collection[str] = frozenset()
    # The binding's generation when the update was staged. If it has changed since, values may have another
    # dtype or device than the model's tensors.
    generation: int = -1
    # Returns which of the given names this process has written in the memory of the current version. None:
    # the parameters are read-only by contract.
    written: Callable[[Collection[str]], Collection[str]] | None = None
    leaving: Collection[str] = ()  # names that get their own memory, unless the update contains them
    # Returns whether an address is in memory that updates arrive in and that will be written again.
    is_lent: Callable[[int], bool] | None = None

    def merged_into(self, weights: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """The tensors in service after a partial update of ``names``.

        An entry of ``weights`` that was not sent stays where it is, unless the sender will write into that
        memory.
        """
        kept = [name for name in weights if name in self.lasting and name not in names]
        before = {name: weights[name] for name in kept}
        before |= {name: before[name].clone() for name in kept if name in self.leaving}
        return {**self.views, **before}


def over_same_memory(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new tensors over the same memory, to re-point or reshape. Tied names share one tensor."""
    made: dict[int, Tensor] = {}
    return {name: made.setdefault(id(view), view.detach()) for name, view in views.items()}


class Binding:
    """Commits updates to a destination, by the strategy's ``apply_weights``.

    This class serves destinations that are not modules, users' own strategies, and receivers without a model
    (``model`` is None). The layout is the sender's. ``generation`` changes whenever the result of
    :meth:`needs` changes.
    """

    def __init__(self, model: WeightTarget | None, layout: Layout, strategy: WeightStrategy) -> None:
        self.model = model
        self.layout = layout
        self.generation = 0
        self._strategy = strategy
        # The model's own tied names, alias -> name: check() compares their values.
        self.ties = Layout.of(receiver_tensors(model)).aliases if model is not None else {}

    def needs(self) -> Mapping[str, Tensor]:
        """Return name -> tensor that will view the committed memory, in the tensor's device and dtype."""
        return {}

    def targets(self) -> Mapping[str, Tensor]:
        """Return name -> tensor that a commit changes: of :meth:`needs`, and those that it copies into."""
        return self.needs()

    def written_in_place(self) -> Iterable[Tensor]:
        """Return the tensors into whose memory a commit may write."""
        return receiver_tensors(self.model).values() if self.model is not None else ()

    @property
    def devices(self) -> frozenset[torch.device]:
        """The CUDA devices of the tensors that a commit changes."""
        return cuda_devices(chain(self.targets().values(), self.written_in_place()))

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
        """Check the values of an update. Call it only if there are :attr:`ties`.

        Raises:
            LayoutMismatchError: two names of one tied tensor have different values.
        """
        check_tied(views, self.ties)

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
        views = over_same_memory(staged.views)
        given = {name: view for name, view in views.items() if names is None or name in names}
        # aiosync's own strategy changes all or nothing. A user's strategy may fail half way.
        saved = reversible or type(self._strategy) is not WeightStrategy
        before = [
            (slot, slot.tensor.clone())
            for slot in (receiver_slots(self.model) if saved else ())
            if not slot.tensor.is_meta
        ]
        try:
            # A user's strategy need not know ``strict``.
            part = len(given) < len(self.layout.names) or bool(self.layout.base)
            options = {"strict": False} if part else {}
            self._strategy.apply_weights(self.model, given, **options)
            yield
        except BaseException:
            write(before, inplace=True)
            raise

    def commit(self, staged: Staged, names: Collection[str] | None = None) -> None:
        """Commit staged values. Raises as :meth:`committing`."""
        with self.committing(staged, names):
            pass

    def detach(self, is_lent: Callable[[int], bool]) -> None:
        """Copy the model's tensors for whose addresses ``is_lent`` returns true into memory of its own."""

    def forget_replaced(self) -> None:
        """Free the memory that the last commit replaced.

        After the first commit this frees the model's own memory, which takes time: call it in a thread then.
        """


class MethodBinding(Binding):
    """Commits updates by ``update(weights)``, a method of the model's owner, with all weights each time.

    The weights are a TensorDict if ``nested``, else a flat dict. If the method raises, it is called again
    with the previous weights.

    The method may replace the model's tensors by those of the TensorDict. It has parameters where the model
    has parameters; they view the update's memory and must not be written. Its other tensors are copies.

    The model is None if it is unknown. The layout has been checked against the model.
    """

    def __init__(
        self,
        update: Callable[[Any], object],
        model: nn.Module | None,
        layout: Layout,
        strategy: WeightStrategy,
        *,
        nested: bool,
    ) -> None:
        super().__init__(model, layout, strategy)
        self._update = update
        self._module = model
        self._nested = nested
        self._targets = receiver_tensors(model) if model is not None else {}
        self._serving: Mapping[str, Tensor] | None = None

    def needs(self) -> Mapping[str, Tensor]:
        """Return the parameters if the method may replace them; else nothing."""
        found = {n: t for n, t in self._targets.items() if isinstance(t, nn.Parameter)}
        return {name: found[name] for name in self.layout.names if name in found} if self._nested else {}

    def written_in_place(self) -> Iterable[Tensor]:
        return ()  # the method decides where it writes

    def refresh(self) -> bool:
        if self._module is None:
            return False
        looks = [(name, t.dtype, t.device) for name, t in self._targets.items()]
        targets = receiver_tensors(self._module)
        self.layout.check_receiver(targets, optional=optional_names(self._module))
        self._targets = targets
        changed = looks != [(name, t.dtype, t.device) for name, t in targets.items()]
        self.generation += changed
        return changed

    @contextmanager
    def committing(
        self, staged: Staged, names: Collection[str] | None = None, *, reversible: bool = False
    ) -> Iterator[None]:
        self.refresh()
        views, before = staged.views, self._serving
        if before is None:
            before = {name: target.detach().clone() for name, target in self._targets.items()}
        extra: Any = nullcontext() if self._module is None else applying_extra_state(self._module, views)
        try:
            with extra:
                self._update(self._form(views if names is None else {**views, **self._kept(names)}))
                yield
        except BaseException:
            if before:
                with suppress(Exception):  # the first exception is raised
                    self._update(self._form(before))
            raise
        self._serving = views

    def _kept(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the model's buffers that the update does not contain: the model may have written them. A
        state_dict has no buffers that are not persistent."""
        if self._module is None:
            return {}
        live = receiver_tensors(self._module)
        others = set() if self._nested else transient_tensors(self._module).keys() - set(self.layout.names)
        left_out = {*names, *others}
        return {n: t for n, t in live.items() if n not in left_out and not isinstance(t, nn.Parameter)}

    def _form(self, views: Mapping[str, Tensor]) -> Any:
        tensors = {name: view for name, view in views.items() if not is_extra_state(name)}
        if not self._nested:
            return tensors | self._extra_now()
        made: dict[int, Tensor] = {}  # tied entries share one tensor
        return nested_tensordict(
            {name: made.setdefault(id(view), self._as_target(name, view)) for name, view in tensors.items()}
        )

    def _as_target(self, name: str, view: Tensor) -> Tensor:
        target = self._targets.get(name)
        if target is None:
            return view
        if not target.is_meta:
            view = view.to(target.device, target.dtype)
        if isinstance(target, nn.Parameter):
            return nn.Parameter(view, requires_grad=target.requires_grad)
        return view.clone()  # the model may write its buffers

    def _extra_now(self) -> dict[str, Any]:
        """Return the extra state, which has been applied. A state dict without it would be refused."""
        if self._module is None:
            return {}
        state = self._module.state_dict()
        return {key: value for key, value in state.items() if key.endswith(TORCH_EXTRA_STATE)}

    def detach(self, is_lent: Callable[[int], bool]) -> None:
        """Re-point the model's tensors that view the memory.

        If the model is unknown, the method is called once more, with copies.
        """
        serving, self._serving = self._serving, None
        if serving is None:
            return
        if self._module is None:
            self._update(self._form({name: view.clone() for name, view in serving.items()}))
            return
        lent = {view.untyped_storage().data_ptr() for view in serving.values()}
        with torch.no_grad():
            for parameter in self._module.parameters():
                if parameter.untyped_storage().data_ptr() in lent:
                    parameter.data = parameter.data.clone()


class FlippedViews(NamedTuple):
    """What the flipped tensors view, in their order; None: unknown."""

    tensors: Sequence[Any]
    addresses: Sequence[int | None]
    borrowed: frozenset[str]
    """Names of those in memory that the sender will write again."""


def names_to_flip(targets: Mapping[str, Tensor]) -> set[str]:
    """Return the names that a commit re-points: all parameters, and the largest buffers.

    The other buffers are together small enough to be copied on the event loop.
    """
    found = {name for name, target in targets.items() if isinstance(target, nn.Parameter)}
    room = INLINE_LIMIT
    for name in sorted(targets.keys() - found, key=lambda name: targets[name].nbytes):
        room -= targets[name].nbytes
        if room < 0 and not targets[name].is_meta:
            found.add(name)
    return found
