"""Adapters for contexts of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from aiosync.receiver.listeners import ContextUpdater, UpdateListener
from aiosync.sender.registry import WorkerRegistry
from aiosync.transports.process_watch import ProcessWatch


def adapter_for(context: Any) -> Any:
    """Return the module that adapts a context, by the package of the context's class; None if there is none.

    It has ``listener_for``, ``first_worker``, ``wants_transient``, ``is_enlisted``, ``processes`` and
    ``last_words``.
    """
    of_torchrl = any(cls.__module__.partition(".")[0] == "torchrl" for cls in type(context).__mro__)
    return importlib.import_module("aiosync.compat.torchrl") if of_torchrl else None


def listener_for(context: Any, model_id: str | None) -> UpdateListener:
    """Return the listener that a receiver notifies for this context."""
    adapter = adapter_for(context)
    found: UpdateListener | None = adapter and adapter.listener_for(context, model_id or "policy")
    if found is not None:
        return found
    updates = callable(getattr(context, "update_policy_weights_", None))
    return ContextUpdater(context) if updates else UpdateListener()


def first_worker(context: Any) -> int:
    """Return the index that a sender's context gives its first worker; aiosync's own is always 0."""
    adapter = adapter_for(context)
    return int(adapter.first_worker(context)) if adapter else 0


def wants_transient(context: Any) -> bool:
    """Return whether a sender's context starts workers without the values of non-persistent buffers."""
    adapter = adapter_for(context)
    return bool(adapter and adapter.wants_transient(context))


@contextmanager
def watching_start(context: Any, registry: WorkerRegistry) -> Iterator[None]:
    """Watch the worker processes that a context has started, while the body waits for them to connect.

    The registry stops waiting for a worker if its process ends before it has connected.
    """
    adapter = adapter_for(context)

    def ended(worker: int) -> None:
        if registry.last_version_of(worker) >= 0:
            return  # it had connected: its connection reports the loss
        said = ""
        try:
            said = adapter.last_words(context, worker)
        finally:
            registry.never_coming(
                worker, "its process has ended before it connected" + (said and f": {said}")
            )

    with ExitStack() as stack:
        for worker, pid in (adapter.processes(context) if adapter else {}).items():
            stack.callback(ProcessWatch(pid, partial(ended, worker)).close)
        yield
