"""Contexts that belong to another library, and what is known of them there."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from aiosync.schemes.cascade import Cascade, Follower

__all__ = ["Peer", "first_worker", "follower_of", "peer_of"]

_PEERS = {"torchrl": "aiosync.compat.torchrl"}
"""Root package of a context's class -> the module that knows such contexts, imported when there is one."""


class Peer(Protocol):
    """What such a module has."""

    def follower_of(self, context: Any, model_id: str) -> Follower | None:
        """How a context is told of a model's updates; None: as any other."""

    def first_worker(self, context: Any) -> int:
        """What a sender's context tells its first worker that its index is."""

    def is_enlisted(self, context: Any) -> bool:
        """Whether a worker is handed a scheme before its sender has it, which will have it join."""

    def processes(self, context: Any) -> dict[int, int]:
        """The workers of a sender's context that are processes on this machine -> their ids."""

    def last_words(self, context: Any, worker: int) -> str:
        """What such a process has said of its end, if it has; it has ended."""


def peer_of(context: Any) -> Peer | None:
    """Who knows more of a context."""
    for cls in type(context).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _PEERS:
            return cast(Peer, importlib.import_module(_PEERS[root]))
    return None


def follower_of(context: Any, model_id: str | None) -> Follower:
    """How a context is told of a model's updates."""
    peer = peer_of(context)
    found = peer.follower_of(context, model_id or "policy") if peer is not None else None
    if found is not None:
        return found
    return Cascade(context) if callable(getattr(context, "update_policy_weights_", None)) else Follower()


def first_worker(context: Any) -> int:
    """What a sender's context tells its first worker that its index is; to us it is 0."""
    peer = peer_of(context)
    return peer.first_worker(context) if peer is not None else 0
