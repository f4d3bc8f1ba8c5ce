"""Contexts that belong to another library, and what is known of them there."""

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
"""Root package of a context's class -> the module that knows such contexts, imported when there is one."""


class ContextAdapter(Protocol):
    """What such a module has."""

    def listener_for(self, context: Any, model_id: str) -> UpdateListener | None:
        """The listener for a context; None: the same as for any other context."""

    def first_worker(self, context: Any) -> int:
        """What a sender's context tells its first worker that its index is."""

    def is_enlisted(self, context: Any) -> bool:
        """Whether a worker is handed a scheme before its sender has it, which will have it join."""

    def processes(self, context: Any) -> dict[int, int]:
        """The workers of a sender's context that are processes on this machine -> their ids."""

    def last_words(self, context: Any, worker: int) -> str:
        """What such a process has said of its end, if it has; it has ended."""


def adapter_for(context: Any) -> ContextAdapter | None:
    """Who knows more of a context."""
    for cls in type(context).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _PEERS:
            return cast(ContextAdapter, importlib.import_module(_PEERS[root]))
    return None


def listener_for(context: Any, model_id: str | None) -> UpdateListener:
    """The listener that a receiver notifies for this context."""
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
    """What a sender's context tells its first worker that its index is; to us it is 0."""
    peer = adapter_for(context)
    return peer.first_worker(context) if peer is not None else 0


@contextmanager
def watching_start(context: Any, registry: WorkerRegistry) -> Iterator[None]:
    """While the body waits for the workers that a context has started: do not wait for one whose process ends
    before it has connected."""
    peer = adapter_for(context)

    def ended(worker: int) -> None:
        if registry.last_version_of(worker) >= 0:
            return  # it was there: others have found out, or will
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
