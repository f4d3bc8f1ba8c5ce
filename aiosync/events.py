"""Events and statistics of one endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = [
    "EventHook",
    "EventKind",
    "EventSource",
    "PhaseStats",
    "SchemeStats",
    "SyncEvent",
    "logger",
]

logger = logging.getLogger("aiosync")

EventKind: TypeAlias = Literal[
    "connected", "sent", "applied", "failed", "lost", "joined", "dropped", "committed", "followed", "closed"
]


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
    """

    kind: EventKind
    model_id: str | None = None
    version: int = -1
    worker: int | None = None
    nbytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    previous: int = -1


EventHook: TypeAlias = Callable[[SyncEvent], None]


@dataclass(slots=True)
class PhaseStats:
    """Durations of one phase over all updates, in seconds."""

    count: int = 0
    total: float = 0.0
    last: float = 0.0
    max: float = 0.0

    @property
    def mean(self) -> float:
        """Mean duration in seconds; 0.0 before the first update."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class SchemeStats:
    """Statistics of one endpoint since it was connected.

    Attributes:
        updates: versions published (sender) or committed (receiver).
        nbytes: bytes of weights that the sender copied, or that the receiver staged.
        wire_nbytes: on the sender, bytes sent over the workers' connections, if those carry the weights.
        skipped: on a receiver, versions that it did not get because a newer one existed (latest wins).
        failures: refused updates; on the sender, by any worker.
        lost: on the sender, workers lost so far.
        phases: durations of the phases ``extract``, ``stage``, ``ack``, ``total`` on the sender; ``stage``,
            ``wait``, ``commit`` on a receiver.
        lag: on the sender, worker -> how many versions the worker is behind the newest.
        memory: bytes of shared or staging memory that this endpoint has allocated.
    """

    updates: int = 0
    nbytes: int = 0
    wire_nbytes: int = 0
    skipped: int = 0
    failures: int = 0
    lost: int = 0
    phases: dict[str, PhaseStats] = field(default_factory=dict)
    lag: dict[int, int] = field(default_factory=dict)
    memory: int = 0

    def add_phases(self, seconds: Mapping[str, float]) -> None:
        """Add the durations of one update's phases."""
        for phase, spent in seconds.items():
            known = self.phases.get(phase)
            if known is None:
                known = self.phases[phase] = PhaseStats()
            known.count += 1
            known.total += spent
            known.last = spent
            if spent > known.max:
                known.max = spent


class EventSource:
    """Calls the registered hooks for each event.

    Attributes:
        hooks: the registered hooks.
    """

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
    ) -> None:
        """Call the hooks with a :class:`SyncEvent` of these values. Without hooks no event is made."""
        if not self.hooks:
            return
        event = SyncEvent(kind, model_id, version, worker, nbytes, seconds or {}, message, previous)
        for hook in list(self.hooks):
            try:
                hook(event)
            except Exception:  # an error of a hook must not fail the update
                logger.exception("an event hook raised for %s", event.kind)
