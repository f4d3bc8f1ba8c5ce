"""Reports of a ``send``, and the state of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aiosync.errors import AiosyncError

__all__ = ["SendReport", "WorkerReport", "WorkerState", "WorkerStatus"]

WorkerStatus: TypeAlias = Literal["applied", "published", "failed", "lost", "timeout"]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's result of a ``send``.

    Attributes:
        worker: the worker's index.
        status: ``applied`` (the worker runs on this version or a newer one), ``published`` (the worker was
            notified, and the call did not wait), ``failed`` (the worker refused), ``lost`` (the worker is
            gone), ``timeout`` (no answer yet).
        version: the version that the worker runs on, as far as the sender knows; -1 before its first.
        seconds: phase -> seconds, as the worker measured them: ``stage``, ``wait`` (for readers), ``commit``.
        error: why the worker failed or was lost; None otherwise.
    """

    worker: int
    status: WorkerStatus
    version: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: AiosyncError | None = None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of a worker, as the sender knows it.

    Attributes:
        connected: whether the worker is connected now.
        version: the version that the worker acknowledged last; -1 before its first.
        lag: how many versions the worker is behind the newest.
        peer: the worker's address, such as ``10.0.0.7:51112``; empty while it is not connected.
    """

    connected: bool
    version: int
    lag: int
    peer: str = ""


@dataclass(frozen=True, slots=True)
class SendReport:
    """The result of a ``send``.

    Attributes:
        version: the published version.
        nbytes: bytes of weights that the sender copied.
        workers: worker index -> the worker's result.
        seconds: phase -> seconds on the sender: ``extract``, ``stage`` (the copy), ``ack``, ``total``.
        dropped: workers that this send removed (``on_failure="drop"``).
    """

    version: int
    nbytes: int
    workers: Mapping[int, WorkerReport]
    seconds: Mapping[str, float]
    dropped: tuple[int, ...] = ()

    @property
    def failures(self) -> Mapping[int, WorkerReport]:
        """The results of the workers that failed, were lost or did not answer in time."""
        return {w: r for w, r in self.workers.items() if r.status not in ("applied", "published")}

    @property
    def ok(self) -> bool:
        """Whether every worker applied the version or was notified of it."""
        return not self.failures
