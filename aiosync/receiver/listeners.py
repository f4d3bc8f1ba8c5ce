"""What a receiver notifies: listeners around a commit (such as the model's context), event hooks, the log."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from aiosync.events import EventKind, EventSource, logger
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.updates import Applier
from aiosync.transports._offload import Offloader
from aiosync.weights.binding import over_same_memory
from aiosync.weights.flatten import named_tensors
from aiosync.weights.strategy import WeightStrategy, to_tensordict


def in_format(strategy: WeightStrategy, views: Mapping[str, Tensor]) -> TensorDictBase | dict[str, Tensor]:
    """The weights in the form that ``strategy`` extracts: a TensorDict or a flat dict. The tensors are new
    ones over the same memory, so that the caller may re-point or reshape them in place."""
    new = over_same_memory(views)
    return to_tensordict(new) if strategy.extract_as == "tensordict" else named_tensors(new)


class UpdateListener:
    """A listener of one receiver's updates. This base class does nothing."""

    cascades = False  # whether updating() has anything to do
    # Whether it may write the weights into the model's parameters, so that these must not view the sender's
    # memory.
    writes = False

    def updating(self, model_id: str, weights: Any) -> Any:
        """Before the commit; what it returns is awaited if it can be. What it raises refuses the update."""

    def committed(self, version: int) -> None:
        """Called during the commit, while no reader is active. It must be quick and must not raise."""

    def acting(self, version: int) -> None:
        """In another thread, at the beginning of its first forward pass with a version."""


class Notifier:
    """Notifies one listener of one receiver's versions. The attributes say what it has to be notified of."""

    def __init__(self, listener: UpdateListener) -> None:
        self.listener = listener
        self.cascades = listener.cascades
        # What a commit calls; None, if that does nothing.
        heard = type(listener).committed is not UpdateListener.committed
        self.committed = listener.committed if heard else None
        self.hears_acting = type(listener).acting is not UpdateListener.acting
        self._acted = -1  # the version that the listener was last notified of by acting()

    def acting(self, version: int) -> None:
        """A forward pass begins with this version: notify the listener if it is the first."""
        if self._acted != version >= 0:
            self._acted = version
            self.listener.acting(version)


async def cascade(listener: UpdateListener, model_id: str, weights: Any, threads: Offloader | None) -> None:
    """Call ``listener.updating()``, in a thread if ``threads`` are given.

    Raises what it raises, and RuntimeError if it awaited something that was cancelled. If this task is
    cancelled it raises CancelledError, whatever the listener makes of that.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        if threads is None:
            result = listener.updating(model_id, weights)
        else:
            result = await threads.run(lambda _: listener.updating(model_id, weights))
        if inspect.isawaitable(result):
            await result
    except (Exception, asyncio.CancelledError) as exc:
        if task.cancelling() > cancelled:
            raise asyncio.CancelledError from exc
        if isinstance(exc, asyncio.CancelledError):
            raise RuntimeError("what the model's context awaited was cancelled") from exc
        raise
    if task.cancelling() > cancelled:
        raise asyncio.CancelledError


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


@dataclass(eq=False, repr=False)
class ReceiverReporter:
    """Emits a receiver's events, with its version and its worker index."""

    events: EventSource
    model_id: str | None  # the sender's name of the model
    applier: Applier
    connection: SenderConnection

    def emit(self, kind: EventKind, *, seconds: Mapping[str, float] | None = None, message: str = "") -> None:
        """Emit an event."""
        worker, version = self.connection.worker, self.applier.in_service
        self.events.emit(
            kind, self.model_id, version, worker, seconds=seconds, message=message, role="receiver"
        )

    def disconnected(self, reason: str) -> None:
        """The connection was lost, and this worker tries to find the sender again."""
        words = "worker %d has lost the sender (%s); version %d stays in service; it tries to connect again"
        logger.warning(words, self.connection.worker, reason, self.applier.in_service)
        self.emit("lost", message=reason)

    def sender_closed(self, reason: str, *, level: int) -> None:
        """The sender has closed in order, which is logged at this level."""
        words = "the sender of worker %d has closed (%s): version %d stays in service"
        logger.log(level, words, self.connection.worker, reason, self.applier.in_service)

    def followed(self, before: int, version: int) -> None:
        """This worker follows another sender, whose versions begin anew."""
        worker = self.connection.worker
        words = f"followed another sender: {before} → {version}"
        logger.warning("worker %d %s", worker, words)
        self.events.emit(
            "followed", self.model_id, version, worker, message=words, previous=before, role="receiver"
        )
