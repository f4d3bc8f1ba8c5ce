"""No weights at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from multiprocessing.context import BaseContext
from typing import Any

from aiosync._endpoint import Endpoint
from aiosync.errors import NotConnectedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.null_endpoint import NullEndpoint
from aiosync.transfer.base import Transfer
from aiosync.transports.base import Listener, Transport

__all__ = ["NoWeightSyncScheme"]


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: every call succeeds at once.

    For policies without weights, and to switch synchronisation off in one place. ``send`` counts
    versions all the same; a receiver's version stays 0.

    See :class:`~aiosync.WeightSyncScheme` for the arguments.
    """

    backends = ("none", "direct")

    def init_on_sender(self, *, model_id: str | None = None, **arguments: Any) -> None:
        """Accept the arguments of every other scheme."""
        self._forget_runtime()
        self._model_id = model_id
        self._model = arguments.get("model")
        self.context = arguments.get("context")
        self._role = "sender"

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Accept the arguments of every other scheme."""
        self._forget_runtime()
        self._model_id = model_id
        self._model = model
        self.context = context
        self._worker_idx = worker_idx
        self._role = "receiver"

    init_on_worker = init_on_receiver

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        min_workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connect at once, with version 0."""
        if self._pid != os.getpid():
            self._pid, self._endpoint = os.getpid(), Endpoint()
        if not isinstance(self._endpoint, NullEndpoint):
            self._endpoint = NullEndpoint(max(self._last_version, 0))
        self._synchronized = True

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply nothing."""

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        raise NotConnectedError("there is nothing to connect to in NoWeightSyncScheme")

    def _make_transfer(self) -> Transfer:
        raise NotConnectedError("there is nothing to connect to in NoWeightSyncScheme")

    def create_transport(self, *, worker_idx: int) -> Transport:
        """Raise: this scheme has no connections.

        Raises:
            NotConnectedError: always.
        """
        raise NotConnectedError("there is nothing to connect to in NoWeightSyncScheme")
