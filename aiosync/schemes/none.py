"""No weights at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from multiprocessing.context import BaseContext
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._endpoint import Endpoint, SendingEndpoint, WorkerIds
from aiosync._options import SchemeOptions
from aiosync.errors import NotConnectedError
from aiosync.reports import SendReport
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transfer.base import Transfer
from aiosync.transports.base import FramedTransport, Listener
from aiosync.weights.strategy import WeightStrategy

_NOTHING = "there is nothing to connect to in NoWeightSyncScheme"


class NullEndpoint(SendingEndpoint):
    """A sender and a receiver in one: every call succeeds at once. A send counts a version."""

    def __init__(self, version: int, spec: SchemeOptions) -> None:
        self.spec = spec
        self._version = version
        self._closed = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    async def send_until(
        self, weights: Any, worker_ids: WorkerIds, *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        self._version += 1
        return await self.wait_ack_until(worker_ids, deadline)

    async def wait_ack_until(self, worker_ids: WorkerIds, deadline: Deadline) -> SendReport:
        return SendReport(self._version, 0, {}, {"total": 0.0})

    async def receive_until(self, deadline: Deadline) -> None:
        """Return None at once: no update ever comes."""

    async def receive(self, timeout: float | None = None) -> TensorDictBase | dict[str, Tensor] | None:
        """Return None at once: no update ever comes."""

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply nothing."""

    def receiving(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @asynccontextmanager
    async def pinned(self, deadline: Deadline) -> AsyncIterator[int]:
        yield self._version

    async def rebind(self, model: Any, listener: Any, *, may_view: bool) -> None:
        """Accept another model."""

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def aclose(self) -> None:
        self._closed.set()


class NullTransport(FramedTransport):
    """A connection to nothing: every call succeeds at once."""

    async def open(self, deadline: Deadline) -> None:
        """Open nothing."""

    def _write(self, data: bytes) -> None:
        return

    async def _close(self) -> None:
        return

    async def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return None

    send_weights = send_weights_async = wait_ack = receive_weights = send_ack = _nothing
    setup_connection_and_weights_on_sender = _nothing
    setup_connection_and_weights_on_receiver = _nothing


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: every call succeeds at once.

    For policies without weights, and to switch synchronisation off in one place. ``send`` counts
    versions all the same; a receiver's version stays the first one.

    See :class:`~aiosync.WeightSyncScheme` for the arguments.
    """

    backends = ("none", "direct")

    def init_on_sender(self, model_id: str | None = None, context: Any = None, **arguments: Any) -> None:
        """Accept the arguments of every other scheme."""
        self.init_on_receiver(model_id=model_id, model=arguments.get("model"), context=context)
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
        """Connect at once, with the first version."""
        self._sending()
        self._synchronized = True

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply nothing."""

    def prepare_weights(
        self,
        weights: Any = None,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Return the weights as other schemes do, or None where these would find none."""
        if weights is None and self.model is None and context is None:
            return None
        return super().prepare_weights(weights, model_id, strategy, context)

    # The endpoint needs no connection, so it is created by the first call, whatever came before.
    def _sending(self) -> NullEndpoint:
        if self._pid != os.getpid():
            self._pid, self._endpoint = os.getpid(), Endpoint()
        if not isinstance(self._endpoint, NullEndpoint):
            self._endpoint = NullEndpoint(max(self._last_version, self._spec.first_version), self._spec)
        return self._endpoint

    _receiving = get_sender = get_receiver = create_sender = _sending  # type: ignore[assignment]

    def create_receiver(self, *, worker_idx: int | None = None) -> NullEndpoint:  # type: ignore[override]
        """Return the endpoint, whose calls succeed at once."""
        return self._sending()

    def create_transport(self, **arguments: Any) -> NullTransport:
        """Return a connection to nothing. ``arguments``: those of every other scheme."""
        return NullTransport()

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        raise NotConnectedError(_NOTHING)  # not reached: init_on_sender() makes no listener

    def _make_transfer(self) -> Transfer:
        raise NotConnectedError(_NOTHING)  # not reached: connect() makes no transfer
