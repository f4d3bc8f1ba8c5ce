"""A model that gets its weights through a method of its owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from aiosync.weights.binding import Binding, Staged
from aiosync.weights.extra_state import applying_extra_state
from aiosync.weights.flatten import optional_names
from aiosync.weights.layout import Layout
from aiosync.weights.names import TORCH_EXTRA_STATE, is_extra_state
from aiosync.weights.strategy import WeightStrategy, nested_tensordict
from aiosync.weights.target import receiver_tensors


class MethodBinding(Binding):
    """Commits updates by ``update(weights)``, with all weights each time, as a TensorDict or a dict.

    If the method raises, it is called again with the previous weights.

    The method may replace the model's tensors by those of the TensorDict. It has parameters where the model
    has parameters; they view the update's memory and must not be written. Its other tensors are copies.

    Args:
        update: the method.
        model: the model that the method updates; None: unknown.
        layout: the sender's layout, which has been checked against the model.
        strategy: the scheme's strategy.
        nested: whether the method expects a TensorDict; else a flat dict.
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
        extra: Any = nullcontext()
        if self._module is not None:
            extra = applying_extra_state(self._module, {n: v for n, v in views.items() if is_extra_state(n)})
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
        """Return the model's buffers that the update does not contain: the model may have written them."""
        live = receiver_tensors(self._module) if self._module is not None else {}
        return {n: t for n, t in live.items() if n not in names and not isinstance(t, nn.Parameter)}

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
        """Return the extra state, which has been applied already. A state dict without it would be
        refused."""
        if self._module is None:
            return {}
        state = self._module.state_dict()
        return {key: value for key, value in state.items() if key.endswith(TORCH_EXTRA_STATE)}

    def detach(self, is_lent: Callable[[int], bool]) -> None:
        """See :meth:`Binding.detach`.

        The model's tensors that view the memory are re-pointed. If the model is unknown, the method is called
        once more, with copies.
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
