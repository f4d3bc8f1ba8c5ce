"""Listeners that a receiver notifies before and after a commit, such as the model's context."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from aiosync.weights.binding import over_same_memory
from aiosync.weights.strategy import WeightStrategy, to_state_dict, to_tensordict

__all__ = ["ContextUpdater", "UpdateListener", "in_format", "weakly"]


def in_format(strategy: WeightStrategy, views: Mapping[str, Tensor]) -> Any:
    """The weights in the form that ``strategy`` extracts: a TensorDict or a flat dict. The tensors are new
    ones over the same memory, so that the caller may re-point or reshape them in place."""
    new = over_same_memory(views)
    return to_tensordict(new) if strategy.extract_as == "tensordict" else to_state_dict(new)


class UpdateListener:
    """A listener of one receiver's updates. This base class does nothing.

    Attributes:
        cascades: whether :meth:`updating` has anything to do.
        writes: whether it may write the weights into the model's parameters itself, so that these must not
            view the sender's memory.
    """

    cascades = False
    writes = False

    def updating(self, model_id: str, weights: Any) -> Any:
        """Before the commit; what it returns is awaited if it can be. What it raises refuses the update."""

    def committed(self, version: int) -> None:
        """Called during the commit, while no reader is active. It must be quick and must not raise."""

    def acting(self, version: int) -> None:
        """In another thread, at the beginning of its first forward pass with a version."""


class ContextUpdater(UpdateListener):
    """A context with ``update_policy_weights_(policy_or_weights=..., model_id=...)``, which is called with
    each update before this worker's own commit: its failure leaves the model here as it was."""

    cascades = True
    writes = True

    def __init__(self, context: Any) -> None:
        self._context = weakly(context)

    def updating(self, model_id: str, weights: Any) -> Any:
        context = self._context()
        if context is None:
            return None
        return context.update_policy_weights_(policy_or_weights=weights, model_id=model_id)


def weakly(context: Any) -> Callable[[], Any]:
    """Return a function that returns the context, or None once the context has been freed.

    A context that does not support weak references is kept alive instead.
    """
    try:
        return weakref.ref(context)
    except TypeError:
        return lambda: context
