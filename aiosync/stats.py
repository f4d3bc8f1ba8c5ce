"""Statistics of one endpoint: what is counted, and the durations of its phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PhaseStats", "SchemeStats"]


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
