"""Figures of one endpoint, and the hook that hears of each event as it happens."""

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
    """Something that happened at an endpoint.

    Attributes:
        kind: on the sender ``connected``, ``sent``, ``applied``, ``failed``, ``lost``, ``joined``,
            ``dropped``; on a receiver ``connected``, ``committed``, ``failed``, ``lost``, ``followed``;
            ``closed`` on both.
        model_id: the scheme's.
        version: the version in question, or -1.
        worker: the worker in question, or None.
        nbytes: bytes moved, or 0.
        seconds: per phase.
        message: an error's text, or "".
        previous: of ``followed``, which says that a receiver follows another sender from now on, the version
            of the sender before; ``version`` is the new sender's newest. Else -1.
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
    """Seconds that one phase took, over all updates."""

    count: int = 0
    total: float = 0.0
    last: float = 0.0
    max: float = 0.0

    @property
    def mean(self) -> float:
        """Seconds on average, 0.0 before the first."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class SchemeStats:
    """Figures of one endpoint since it was connected.

    Attributes:
        updates: versions published (sender) or committed (receiver).
        nbytes: bytes of weights copied by the sender, or staged by the receiver.
        wire_nbytes: on the sender, bytes handed to the workers' connections, where those carry the weights.
        skipped: on a receiver, versions that it never saw because a newer one was there (latest wins).
        failures: updates refused; on the sender, by any worker.
        lost: workers lost so far (sender).
        phases: seconds per phase: ``extract``, ``stage``, ``ack``, ``total`` on the sender; ``stage``,
            ``wait``, ``commit`` on a receiver.
        lag: on the sender, worker -> versions that it is behind the newest.
        memory: bytes of shared or staging memory that this endpoint has taken.
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
        """Count one update's phases."""
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
    """Hands events to the hooks that were registered.

    Attributes:
        hooks: those.
    """

    def __init__(self) -> None:
        self.hooks: list[EventHook] = []

    def register(self, hook: EventHook) -> Callable[[], None]:
        """Call ``hook`` for every event from now on; returns what ends that.

        Hooks are called on the event loop and should return at once. What a hook raises is logged.
        """
        self.hooks.append(hook)

        def remove() -> None:
            if hook in self.hooks:
                self.hooks.remove(hook)

        return remove

    def tell(
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
        """Tell the hooks; without one this costs nothing."""
        if not self.hooks:
            return
        event = SyncEvent(kind, model_id, version, worker, nbytes, seconds or {}, message, previous)
        for hook in list(self.hooks):
            try:
                hook(event)
            except Exception:  # an observer's fault must not fail the update observed
                logger.exception("an event hook raised for %s", event.kind)
