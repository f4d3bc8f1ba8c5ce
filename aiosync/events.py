"""Events of one endpoint, and the hooks that get them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["EventHook", "EventKind", "EventSource", "SyncEvent", "logger"]

logger = logging.getLogger("aiosync")

EventKind: TypeAlias = Literal[
    "connected", "sent", "applied", "failed", "lost", "joined", "dropped", "committed", "followed", "closed"
]


Role: TypeAlias = Literal["sender", "receiver"]


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """An event at an endpoint.

    Attributes:
        kind: on the sender ``connected``, ``sent``, ``applied``, ``failed``, ``lost``, ``joined``,
            ``dropped``; on a receiver ``connected``, ``committed``, ``failed``, ``lost``, ``followed``;
            ``closed`` on both.
        model_id: the scheme's model id.
        version: the version that the event is about; -1: none.
        worker: the worker that the event is about; None: none.
        nbytes: bytes of weights that were copied or sent.
        seconds: phase -> seconds.
        message: an error's text; empty: none.
        previous: for ``followed`` (a receiver follows another sender from now on), the version of the
            previous sender, while ``version`` is the new sender's newest; else -1.
        role: what the endpoint is: ``sender`` or ``receiver``.
    """

    kind: EventKind
    model_id: str | None = None
    version: int = -1
    worker: int | None = None
    nbytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    previous: int = -1
    role: Role = "sender"


EventHook: TypeAlias = Callable[[SyncEvent], None]


class EventSource:
    """Calls the registered hooks for each event."""

    def __init__(self) -> None:
        self.hooks: list[EventHook] = []

    def register(self, hook: EventHook) -> Callable[[], None]:
        """Call ``hook`` for every event from now on; returns a function that removes the hook.

        Hooks are called on the event loop and should return quickly. An exception of a hook is logged.
        """
        self.hooks.append(hook)

        def remove() -> None:
            if hook in self.hooks:
                self.hooks.remove(hook)

        return remove

    def emit(
        self,
        kind: EventKind,
        model_id: str | None,
        version: int,
        worker: int | None = None,
        *,
        nbytes: int = 0,
        seconds: Mapping[str, float] | None = None,
        message: str = "",
        previous: int = -1,
        role: Role = "sender",
    ) -> None:
        """Call the hooks with a :class:`SyncEvent` of these values. Without hooks no event is made."""
        if not self.hooks:
            return
        event = SyncEvent(kind, model_id, version, worker, nbytes, seconds or {}, message, previous, role)
        for hook in list(self.hooks):
            try:
                hook(event)
            except Exception:  # an error of a hook must not fail the update
                logger.exception("an event hook raised for %s", event.kind)
