"""An ``nn.Module`` bound to a layout.

The mode ``flip`` points each parameter's ``.data`` at the new memory, which takes microseconds for any size.
The parameter objects stay the same. The mode ``copy`` writes into the parameters' memory, for CUDA graphs and
code that keeps raw pointers. Buffers are copied, so that a worker's writes to them (such as BatchNorm
statistics) stay in the worker. A large buffer is pointed at private memory of this process instead, because
copying it would block the event loop. Extra state is set by ``set_extra_state``.

A worker may change its model between two updates: replace a layer or a tensor, convert the model to another
dtype, load a state dict. So each commit compares the model with the bound one, and binds it again if it
differs. If the model no longer fits the layout, the update is refused and the model stays unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from aiosync.errors import LayoutMismatchError
from aiosync.weights.binding import (
    Binding,
    CommitMode,
    FlippedViews,
    Staged,
    StaleStaging,
    names_to_flip,
)
from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import optional_names
from aiosync.weights.layout import Layout
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import (
    Look,
    WeightTarget,
    data_for,
    look_of,
    overlapping,
    receiver_slots,
    receiver_tensors,
    write,
    write_into,
)
from aiosync.weights.tensors import memory_key
from aiosync.weights.walk import Structure, is_extra_state


def bind(model: WeightTarget | None, layout: Layout, strategy: WeightStrategy, mode: CommitMode) -> Binding:
    """Bind ``model`` to the sender's ``layout``.

    Raises:
        LayoutMismatchError: the model has other names, shapes or dtypes.
    """
    own_way = type(strategy).apply_weights is not WeightStrategy.apply_weights
    if isinstance(model, nn.Module) and not isinstance(model, TensorDictBase) and not own_way:
        return ModuleBinding(model, layout, mode)
    if model is not None:
        layout.check_receiver(receiver_tensors(model), optional=optional_names(model))
    return Binding(model, layout, strategy)


class ModuleBinding(Binding):
    """Commits updates to an ``nn.Module``. The first commit materialises its tensors on ``meta``.

    Raises:
        Exception: as :meth:`refresh`.
    """

    def __init__(self, model: nn.Module, layout: Layout, mode: CommitMode) -> None:
        self.model = model
        self.layout = layout
        self.generation = 0
        self._module = model
        self._mode = mode
        self._extra = tuple(name for name in layout.names if is_extra_state(name))
        # Each tensor is under one name: in _flips if a commit re-points it, in _copies if it copies into it.
        self._flips: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._tied: dict[str, str] = {}  # other names of these tensors -> the name above
        self._shown = FlippedViews([], [], frozenset())  # what the last commit pointed _flips at
        self._in_place = False  # whether all of _flips were at these addresses at the last comparison
        # The module is current as long as these are the same.
        self._structure = Structure(model)
        self._looks: list[Look] = []
        self._shapes: list[torch.Size] = []
        self._copied_looks: list[tuple[int, Look]] = []
        self._meta = False
        self._inference = False
        self._overlapping: list[str] = []  # names of _copies whose memory overlaps that of another entry
        self._replaced: Sequence[Tensor] = []  # by the last commit; kept alive until forget_replaced()
        self._mark = object()
        self._bind()

    # -- what the module consists of -----------------------------------------------------------------

    def refresh(self) -> bool:
        if self._is_current():
            return False
        self._bind()
        return True

    def _is_current(self) -> bool:
        if not self._structure.unchanged():
            return False
        flips = self._flips.values()
        self._in_place = True
        for target, address, shape in zip(flips, self._shown.addresses, self._shapes):  # noqa: B905 - see _point_at
            if target.data_ptr() != address:
                self._in_place = False
            elif target.shape != shape:  # such as a slice of the previous tensor
                return False
        if not self._in_place and [look_of(target) for target in flips] != self._looks:
            return False
        if not self._copies:
            return True
        return [(t.data_ptr(), look_of(t)) for t in self._copies.values()] == self._copied_looks

    def _bind(self) -> None:
        """Find the module's tensors; decide for each whether to flip or to copy. An error changes nothing."""
        entries = receiver_tensors(self._module)
        self.layout.check_receiver(entries, optional=optional_names(self._module))
        structure = Structure(self._module)
        targets: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name in self.layout.names:
            target = entries.get(name)
            if target is None:
                continue
            if first.setdefault(id(target), name) == name:
                targets[name] = target
            else:
                tied[name] = first[id(target)]
        flipped = names_to_flip(targets) if self._mode == "flip" else ()
        flips = {name: target for name, target in targets.items() if name in flipped}
        copies = {name: target for name, target in targets.items() if name not in flipped}
        looks = [look_of(target) for target in flips.values()]
        if flips.keys() != self._flips.keys() or looks != self._looks:
            self.generation += 1
        last = zip(self._shown.tensors, self._shown.addresses, strict=True)
        shown = dict(zip(self._flips, last, strict=True))
        self._part_with_all_but(flips)
        self._flips, self._copies, self._looks = flips, copies, looks
        self._shapes = [target.shape for target in flips.values()]
        kept = [shown.get(name, (None, None)) for name in flips]
        self._shown = FlippedViews([view for view, _ in kept], [at for _, at in kept], self._shown.borrowed)
        self._in_place = False
        self._copied_looks = [(t.data_ptr(), look_of(t)) for t in copies.values()]
        self._structure = structure
        self.ties = Layout.of(entries).aliases
        self._tied = tied
        self._overlapping = overlapping(copies)
        self._meta = any(target.is_meta for target in targets.values())
        self._inference = any(target.is_inference() for target in targets.values())
        self._mark = object()

    def _part_with_all_but(self, now: Mapping[str, Tensor]) -> None:
        """Copy tensors that are no longer in the module into their own memory.

        Other code may still use them, and the sender will write the memory that they view again.
        """
        kept = {id(target) for target in now.values()}
        for target, address in zip(self._flips.values(), self._shown.addresses, strict=True):
            if id(target) not in kept and target.data_ptr() == address:
                target.data = data_for(target, target.detach().clone())

    def _materialize(self, views: Mapping[str, Tensor]) -> None:
        """Allocate memory for the tensors on ``meta``. An undo does not move them back to ``meta``."""
        slots = receiver_slots(self._module)
        write([(s, views[s.name]) for s in slots if s.tensor.is_meta], inplace=False)
        self._bind()

    def needs(self) -> Mapping[str, Tensor]:
        return self._flips

    def targets(self) -> Mapping[str, Tensor]:
        return {**self._flips, **self._copies}

    def written_in_place(self) -> Iterable[Tensor]:
        return self._copies.values()

    def needs_own(self) -> Collection[str]:
        # A worker may write its buffers.
        return [name for name, target in self._flips.items() if not isinstance(target, nn.Parameter)]

    # -- commits ---------------------------------------------------------------------------------------

    @contextmanager
    def committing(
        self, staged: Staged, names: Collection[str] | None = None, *, reversible: bool = False
    ) -> Iterator[None]:
        changed = self.refresh()
        if names is not None:
            staged, names = self._by_first_names(staged, names)
        views = staged.views
        if self._meta:
            self._materialize(views)
        if changed and self.ties:
            self.check(views)
        extra = {n: views[n] for n in self._extra if names is None or n in names}
        with (
            applying_extra_state(self._module, extra, merge=names is not None),
            ExitStack() as undo,
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            new = self._new(staged, names)  # allocates all memory before anything is changed
            if staged.generation != self.generation:
                for name, target in self._copies.items():
                    if names is None or name in names:
                        self._check_conversion(name, target, views[name])
            for name, target in self._copies.items():
                if names is None or name in names:
                    write_into(target, views[name], undo if reversible or self._overlapping else None)
            self._check_overlapping(views, names)
            self._in_place = False  # an undo has to restore the exact tensors, with their strides
            undo.callback(setattr, self, "_shown", self._shown)
            undo.callback(self._point_back, self._point_at(new))
            yield
            undo.pop_all()

    def commit(self, staged: Staged, names: Collection[str] | None = None) -> None:
        # If all entries flip, this is a plain loop.
        if self._extra or self._copies or self._meta or names is not None or not self._is_current():
            super().commit(staged, names)
        else:
            self._point_at(self._new(staged, None))

    def _check_overlapping(self, views: Mapping[str, Tensor], names: Collection[str] | None) -> None:
        """Raise LayoutMismatchError if tensors with overlapping memory were sent different values."""
        for name in self._overlapping:
            target = self._copies[name]
            sent = names is None or name in names
            if sent and not torch.equal(target, views[name].to(target.device, target.dtype)):
                apart = "a value of its own", "memory that it shares with another entry here: clone() it"
                raise LayoutMismatchError(differing={name: apart})

    def _by_first_names(self, staged: Staged, names: Collection[str]) -> tuple[Staged, Collection[str]]:
        """Return the same update with the names under which tied tensors are bound."""
        others = [(alias, first) for alias, first in self._tied.items() if alias in names]
        if not others:
            return staged, names
        sent = {first: staged.views[alias] for alias, first in others if first not in names}
        parts = msgspec.structs.replace(staged, views={**staged.views, **sent}, generation=-1)
        return parts, {*names, *sent}

    def _new(self, staged: Staged, names: Collection[str] | None) -> FlippedViews:
        """Return what each of the flipped tensors will view."""
        if names is not None:
            return self._new_of(staged, names)
        lent = staged.views if type(staged.views) is LentTensors else None
        if lent is not None and lent.matched is not None and lent.matched[0] is self._mark:
            matched: FlippedViews = lent.matched[1]
            return matched
        fits = staged.generation == self.generation and not self._inference
        if fits:
            new = [staged.views[name] for name in self._flips]
        else:
            new = [self._fitting(name, target, staged) for name, target in self._flips.items()]
        borrowed = frozenset(self._flips).difference(staged.lasting)
        views = FlippedViews(new, [view.data_ptr() for view in new], borrowed)
        if fits and lent is not None:
            lent.matched = self._mark, views
        return views

    def _new_of(self, staged: Staged, names: Collection[str]) -> FlippedViews:
        """Return the same for an update of some names only. The other entries keep their values.

        An entry that was not sent and views the sender's memory moves to the new version's memory, which has
        the same value. If this process has written the entry, the written value is copied there. All others
        stay unchanged.
        """
        here = {
            name: target.data_ptr() == address
            and (shown is None or (target.dtype, target.stride()) == (shown.dtype, shown.stride()))
            for (name, target), address, shown in zip(
                self._flips.items(), self._shown.addresses, self._shown.tensors, strict=True
            )
        }
        lent = [n for n in self._flips if n not in names and n in self._shown.borrowed and here[n]]
        moving = {name for name in lent if name not in staged.lasting}
        written = set(staged.written(moving)) if moving and staged.written is not None else set()
        new: list[Tensor] = []
        for name, target in self._flips.items():
            if name in names:
                new.append(self._fitting(name, target, staged))
            elif name in moving:
                if name in written:
                    staged.views[name].copy_(target.detach())
                new.append(self._fitting(name, target, staged))
            elif (name in lent or name in staged.leaving) and here[name]:
                new.append(data_for(target, target.detach().clone()))
            elif not here[name] and staged.is_lent is not None and staged.is_lent(target.data_ptr()):
                # It views the memory of another entry.
                new.append(data_for(target, target.detach().clone()))
            else:
                new.append(target.data)
        addresses = [view.data_ptr() for view in new]
        sent = frozenset(self._flips).intersection(names).difference(staged.lasting)
        return FlippedViews(new, addresses, sent | moving)

    def _fitting(self, name: str, target: Tensor, staged: Staged) -> Tensor:
        """Return the new value in ``target``'s dtype and on its device, which may differ since staging."""
        view = staged.views[name]
        self._check_conversion(name, target, view)
        apart = view.dtype is not target.dtype or view.device != target.device
        if apart or (name not in staged.own and not isinstance(target, nn.Parameter)):
            with torch.inference_mode(False):
                view = view.to(target.device, target.dtype, copy=True)
        return data_for(target, view)

    def _check_conversion(self, name: str, target: Tensor, view: Tensor) -> None:
        if view.dtype is not target.dtype and view.dtype is not self.layout[name].dtype:
            raise StaleStaging(f"{name} was converted to {view.dtype}; the model has {target.dtype} now")

    def _point_at(self, new: FlippedViews) -> Sequence[Tensor]:
        """Re-point the flipped tensors; returns what they viewed before. Either all change or none."""
        targets = self._flips.values()
        # If they still view what the last commit pointed them at, no new tensors have to be made.
        before: Sequence[Any] = self._shown.tensors if self._in_place else [target.data for target in targets]
        try:
            # A model of six tensors is re-pointed in 6 us. strict= would add 2.
            for target, view in zip(targets, new.tensors):  # noqa: B905
                target.data = view
        except BaseException:
            self._point_back(before)
            raise
        self._replaced = before
        self._shown = new
        return before

    def _point_back(self, before: Sequence[Tensor]) -> None:
        for target, view in zip(self._flips.values(), before, strict=True):
            target.data = view

    def detach(self, is_lent: Callable[[int], bool]) -> None:
        own: dict[object, Tensor] = {}  # tied tensors stay tied
        # The module may have new tensors over the same memory, which are not bound.
        for target in (*self._flips.values(), *self._module.parameters(), *self._module.buffers()):
            if not is_lazy(target) and is_lent(target.data_ptr()):
                key = memory_key(target.data)
                if key not in own:
                    own[key] = target.detach().clone()
                target.data = data_for(target, own[key])
        unknown = [None] * len(self._flips)
        self._shown = FlippedViews(unknown, unknown, frozenset())

    def forget_replaced(self) -> None:
        self._replaced = []


class LentViews:
    """The tensors of a slot as a worker's parameters view them.

    If a user calls ``share_memory_()`` on a parameter, or puts it into a ``torch.multiprocessing`` queue,
    torch moves its storage into other memory. Such a tensor is made again before the slot is used again.
    Otherwise the next version in this slot would show the old values.
    """

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self._layout = layout
        self._buffer = buffer
        # Filled when a storage drops its memory. Comparing the address of each tensor at each update would
        # take longer than the rest of a small update's staging. On a device the addresses are compared.
        self._moved: list[object] = []
        self._watches: list[object] = []
        self._make()

    def _make(self) -> None:
        moved: list[object] = []
        watches: list[object] = []
        views = self._layout.views(
            self._buffer, lambda memory: watches.append(weakref.ref(memory, moved.append))
        )
        self._tensors, self._moved, self._watches = LentTensors(views), moved, watches
        self._addresses = None if self._buffer.is_cpu else [*map(Tensor.data_ptr, views.values())]

    def tensors(self) -> LentTensors:
        """Return entry name -> tensor in the memory, aliases included. Do not change the dict."""
        if self._moved or (
            self._addresses is not None and [*map(Tensor.data_ptr, self._tensors.values())] != self._addresses
        ):
            self._make()
        return self._tensors


class LentTensors(dict[str, Tensor]):
    """Entry name -> tensor."""

    # (mark, result) that a binding has cached, so that the next commit of the same slot does not compute the
    # result again. The mark identifies the binding and its state.
    matched: tuple[object, Any] | None = None
