"""Report what happens to a receiver, as events and in the log."""

from __future__ import annotations

from collections.abc import Mapping

from aiosync.events import EventKind, EventSource, logger
from aiosync.receiver.connection import SenderConnection
from aiosync.receiver.updates import Applier

__all__ = ["ReceiverReporter"]


class ReceiverReporter:
    """Emits a receiver's events, with its version and its worker index.

    Args:
        events: gets the events.
        model_id: the sender's name of the model.
        applier: has the version.
        connection: has the worker index.
    """

    def __init__(
        self, events: EventSource, model_id: str | None, applier: Applier, connection: SenderConnection
    ) -> None:
        self.model_id = model_id
        self._events = events
        self._applier = applier
        self._connection = connection

    def emit(self, kind: EventKind, *, seconds: Mapping[str, float] | None = None, message: str = "") -> None:
        """Emit an event."""
        worker = self._connection.worker
        self._events.emit(
            kind, self.model_id, self._applier.version, worker, seconds=seconds, message=message
        )

    def disconnected(self, reason: str) -> None:
        """The connection was lost, and this worker tries to find the sender again."""
        logger.warning(
            "worker %d has lost the sender (%s); it goes on with version %d and tries to connect again",
            self._connection.worker,
            reason,
            self._applier.version,
        )
        self.emit("lost", message=reason)

    def sender_closed(self, reason: str, *, level: int) -> None:
        """The sender has closed in order, which is logged at this level."""
        logger.log(
            level,
            "the sender of worker %d has closed (%s): version %d stays in service",
            self._connection.worker,
            reason,
            self._applier.version,
        )

    def followed(self, before: int, version: int) -> None:
        """This worker follows another sender, whose versions begin anew."""
        worker = self._connection.worker
        words = f"followed another sender: {before} → {version}"
        logger.warning("worker %d %s", worker, words)
        self._events.emit("followed", self.model_id, version, worker, message=words, previous=before)
