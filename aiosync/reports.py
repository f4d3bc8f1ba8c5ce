"""What a ``send`` did, worker by worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aiosync.errors import AiosyncError

__all__ = ["SendReport", "WorkerReport", "WorkerState", "WorkerStatus"]

WorkerStatus: TypeAlias = Literal["applied", "published", "failed", "lost", "timeout"]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's part.

    Attributes:
        worker: its index.
        status: ``applied`` (it runs on this version or a newer one), ``published`` (it was notified; the
            call did not wait), ``failed`` (it refused), ``lost`` (it is gone), ``timeout`` (no answer yet).
        version: the version it runs on as far as the sender knows; -1 before its first.
        seconds: per phase as the worker measured it: ``stage``, ``wait`` (for readers), ``commit``.
        error: why it failed or was lost.
    """

    worker: int
    status: WorkerStatus
    version: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: AiosyncError | None = None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How a worker stands, seen from the sender.

    Attributes:
        connected: whether it is there now.
        version: the version that it last acknowledged; -1 before its first.
        lag: versions that it is behind the newest.
        peer: where it is, such as ``10.0.0.7:51112``; "" while it is not there.
    """

    connected: bool
    version: int
    lag: int
    peer: str = ""


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a ``send`` did.

    Attributes:
        version: the version that it published.
        nbytes: bytes of weights copied by the sender.
        workers: worker index -> its part.
        seconds: per phase on the sender: ``extract``, ``stage`` (the copy), ``ack``, ``total``.
        dropped: workers that left the set because of this send (``on_failure="drop"``).
    """

    version: int
    nbytes: int
    workers: Mapping[int, WorkerReport]
    seconds: Mapping[str, float]
    dropped: tuple[int, ...] = ()

    @property
    def failures(self) -> Mapping[int, WorkerReport]:
        """The workers that neither applied it nor were merely told."""
        return {w: r for w, r in self.workers.items() if r.status not in ("applied", "published")}

    @property
    def ok(self) -> bool:
        """Whether every worker applied it or was told."""
        return not self.failures
