"""No weights at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from multiprocessing.context import BaseContext
from typing import Any

from aiosync.errors import NotConnectedError
from aiosync.receiver.listeners import weakly
from aiosync.reports import SendReport
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transfer.base import Transfer
from aiosync.transports.base import Listener, Transport

__all__ = ["NoWeightSyncScheme"]


class NoWeightSyncScheme(WeightSyncScheme):
    """Moves nothing: every call succeeds at once, and no worker is ever behind.

    For policies without weights, and for switching synchronisation off in one place. ``send`` counts
    versions all the same; a receiver's version stays 0.

    See :class:`~aiosync.WeightSyncScheme` for the arguments.
    """

    backends = ("none", "direct")

    _closed: asyncio.Event | None = None

    def init_on_sender(self, *, model_id: str | None = None, **arguments: Any) -> None:
        """Takes anything that another scheme would take."""
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
        """Takes what another scheme would take."""
        self._forget_runtime()
        self._model_id = model_id
        self._model = model
        self.context = context
        self._worker_idx = worker_idx
        self._role = "receiver"

    init_on_worker = init_on_receiver

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        self._role = "recipe"
        self._version = -1

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        min_workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connected."""
        self._closed = asyncio.Event()
        self._version = max(self._version, 0)
        self._synchronized = True

    async def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        wait: bool | None = None,
        strict: bool = True,
        timeout: float | None = None,
    ) -> SendReport:
        """Counts one version."""
        self._version += 1
        return self._report()

    async def wait_ack(
        self, worker_ids: int | list[int] | None = None, timeout: float | None = None
    ) -> SendReport:
        """Nothing is ever under way."""
        return self._report()

    def _report(self) -> SendReport:
        return SendReport(self._version, 0, {}, {"total": 0.0})

    async def receive(self, timeout: float | None = None) -> Any:
        """Nothing ever comes: None, at once."""
        return None

    def receiving(self) -> AbstractAsyncContextManager[None]:
        """Nothing runs beside the body."""
        return nullcontext()

    @asynccontextmanager
    async def pinned(self, timeout: float | None = None) -> AsyncIterator[int]:
        """The version never changes."""
        yield self.version

    async def rebind(self, *, model: Any = None, context: Any = None) -> None:
        """Takes what another scheme would take."""
        self._model = self._model if model is None else model
        self._context = self._context if context is None else weakly(context)

    async def wait_closed(self) -> None:
        """Wait until this side closes: there is no other."""
        if self._closed is None:
            raise NotConnectedError("connect() first: this receiver is not connected")
        await self._closed.wait()

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Applies nothing."""

    async def aclose(self) -> None:
        """Idempotent."""
        self._synchronized = False
        if self._closed is not None:
            self._closed.set()

    @property
    def version(self) -> int:
        """Versions sent (sender), or 0 (receiver); -1 before ``connect``."""
        return self._version

    @property
    def worker_versions(self) -> dict[int, int]:
        """There are no workers."""
        return {}

    @property
    def initialized_on_sender(self) -> bool:
        """Whether ``init_on_sender`` was called."""
        return self._role == "sender"

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether ``init_on_receiver`` was called."""
        return self._role == "receiver"

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect`` was called, on the sender."""
        return self._synchronized and self._role == "sender"

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect`` was called, on a receiver."""
        return self._synchronized and self._role == "receiver"

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        raise NotConnectedError("there is nothing to connect to in NoWeightSyncScheme")

    def _make_transfer(self) -> Transfer:
        raise NotConnectedError("there is nothing to connect to in NoWeightSyncScheme")

    def create_transport(self, *, worker_idx: int) -> Transport:
        """There is none.

        Raises:
            NotConnectedError: always.
        """
        raise NotConnectedError("there is nothing to connect to in NoWeightSyncScheme")
