"""Adapters for contexts of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, cast

from aiosync.receiver.listeners import ContextUpdater, UpdateListener
from aiosync.sender.registry import WorkerRegistry
from aiosync.transports.process_watch import ProcessWatch

__all__ = ["ContextAdapter", "adapter_for", "first_worker", "listener_for", "watching_start"]

_PEERS = {"torchrl": "aiosync.compat.torchrl"}
"""Root package of a context's class -> the adapter's module, imported at the first such context."""


class ContextAdapter(Protocol):
    """The functions of an adapter module."""

    def listener_for(self, context: Any, model_id: str) -> UpdateListener | None:
        """Return the listener for a context; None: the default listener."""

    def first_worker(self, context: Any) -> int:
        """Return the index that a sender's context gives its first worker."""

    def is_enlisted(self, context: Any) -> bool:
        """Return whether the sender will enlist this worker, so that it need not connect itself."""

    def processes(self, context: Any) -> dict[int, int]:
        """Return worker -> process id, for the workers of a sender's context that run on this machine."""

    def last_words(self, context: Any, worker: int) -> str:
        """Return the reason that an ended worker process has reported, or ""."""


def adapter_for(context: Any) -> ContextAdapter | None:
    """Return the adapter for a context, by the package of its class; None if there is none."""
    for cls in type(context).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _PEERS:
            return cast(ContextAdapter, importlib.import_module(_PEERS[root]))
    return None


def listener_for(context: Any, model_id: str | None) -> UpdateListener:
    """Return the listener that a receiver notifies for this context."""
    peer = adapter_for(context)
    found = peer.listener_for(context, model_id or "policy") if peer is not None else None
    if found is not None:
        return found
    return (
        ContextUpdater(context)
        if callable(getattr(context, "update_policy_weights_", None))
        else UpdateListener()
    )


def first_worker(context: Any) -> int:
    """Return the index that a sender's context gives its first worker; aiosync's own is always 0."""
    peer = adapter_for(context)
    return peer.first_worker(context) if peer is not None else 0


@contextmanager
def watching_start(context: Any, registry: WorkerRegistry) -> Iterator[None]:
    """Watch the worker processes that a context has started, while the body waits for them to connect.

    The registry stops waiting for a worker if its process ends before it has connected.
    """
    peer = adapter_for(context)

    def ended(worker: int) -> None:
        if registry.last_version_of(worker) >= 0:
            return  # it had connected: its connection reports the loss
        assert peer is not None
        said = ""
        try:
            said = peer.last_words(context, worker)
        finally:
            registry.never_coming(
                worker, "its process has ended before it connected" + (said and f": {said}")
            )

    with ExitStack() as stack:
        for worker, pid in (peer.processes(context) if peer is not None else {}).items():
            stack.callback(ProcessWatch(pid, partial(ended, worker)).close)
        yield
