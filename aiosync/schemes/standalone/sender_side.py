"""The sender's side of a transport that is used alone.

States: NEW (no scheme) → LISTENING (the worker can connect) → PUBLISHED (there is a version) → CLOSED.
The first weights are version 0. A call that sends publishes first, without waiting for the worker, and then
waits for its answer. Cancelled before that, nothing was published; cancelled after it, the version stays
published. The calls that publish take turns, so that only one of them opens the endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from aiosync._deadline import Deadline, FairLock
from aiosync.errors import InvalidArgumentError, NotConnectedError, SyncTimeoutError, WorkerLostError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.standalone.receiver_side import closed_transport
from aiosync.transports.base import FramedTransport


@dataclass(eq=False, repr=False)
class SenderSide:
    """Sends through a private scheme."""

    # Creates the scheme, and initialises it as a sender of this module, or of weights that come later (None).
    make: Callable[[nn.Module | None], WeightSyncScheme]
    # Makes the scheme's address known to workers that are not connected; called before each send. The second
    # argument: whether this is the first call.
    announce: Callable[[WeightSyncScheme, bool], Awaitable[None]]
    # Whether a send waits for workers that have never connected.
    waits: bool
    # Whether weights were sent that no call has waited for.
    pending: bool = field(default=False, init=False)
    scheme: WeightSyncScheme | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _turn: FairLock = field(default_factory=FairLock, init=False)

    @property
    def connections(self) -> Iterable[FramedTransport]:
        """The connections to the workers."""
        return self.scheme.sender_transports.values() if self.scheme is not None else ()

    async def listen(self, weights: Any = None) -> WeightSyncScheme:
        """Listen for the worker, and make the address known to it. Does not wait for the worker."""
        if self._closed:
            raise closed_transport()
        first = self.scheme is None
        if self.scheme is None:
            self.scheme = self.make(weights if isinstance(weights, nn.Module) else None)
        await self.announce(self.scheme, first)
        return self.scheme

    async def open(self, deadline: Deadline) -> None:
        """Publish the weights that the scheme was initialised with as version 0, if there is no version."""
        async with self._turn.hold(deadline):
            scheme = await self.listen()
            if not scheme.synchronized_on_sender:
                await scheme.connect(min_workers=0, timeout=deadline.remaining())

    async def send(
        self, weights: Any, worker_ids: list[int] | None, *, wait: bool, deadline: Deadline
    ) -> None:
        """Publish weights, and wait for the answers of the workers if ``wait``."""
        if weights is None:
            raise InvalidArgumentError("weights: expected an nn.Module, a TensorDict or a dict, got None")
        async with self._turn.hold(deadline):
            scheme = await self.listen(weights)
            first = scheme.version < 0
            if not scheme.synchronized_on_sender:
                given = weights if first else None
                await scheme.connect(weights=given, min_workers=0, timeout=deadline.remaining())
            if not first:
                # What the others answered is known: they may have gone since.
                worker_ids = await self._publish(scheme, weights, worker_ids, wait, deadline)
            self.pending = self.pending or not wait
        if wait and (first or worker_ids):
            await self._acknowledged(scheme, worker_ids, deadline)

    async def _publish(
        self,
        scheme: WeightSyncScheme,
        weights: Any,
        worker_ids: list[int] | None,
        wait: bool,
        deadline: Deadline,
    ) -> list[int]:
        """Publish a version. Returns the workers that had never connected.

        Such a worker gets the newest version when it connects, which may be during this call.
        """
        late = self._late(scheme, worker_ids)
        try:
            await scheme.send(weights, worker_ids, wait=wait, timeout=deadline.remaining())
        except WorkerLostError as exc:
            late |= self._late(scheme, worker_ids)
            if exc.report is None or not exc.report.failures.keys() <= late:
                raise
        return sorted(late)

    @staticmethod
    def _late(scheme: WeightSyncScheme, worker_ids: list[int] | None) -> set[int]:
        """Return those of the workers that have never connected. Raises UnknownWorkerError."""
        workers = scheme.workers
        asked = scheme.get_sender().registry.resolve(worker_ids)
        return {w for w in asked if not workers[w].connected and workers[w].version < 0}

    async def wait_ack(self, deadline: Deadline) -> None:
        """Wait until the workers run on the version that was published last."""
        if not self.pending or self.scheme is None:
            raise nothing_pending()
        try:
            await self._acknowledged(self.scheme, None, deadline)
        except (SyncTimeoutError, asyncio.CancelledError):
            raise  # it may be called again
        except BaseException:
            self.pending = False
            raise
        self.pending = False

    async def _acknowledged(
        self, scheme: WeightSyncScheme, worker_ids: list[int] | None, deadline: Deadline
    ) -> None:
        sender = scheme.get_sender()
        late = self._late(scheme, worker_ids)
        if late and self.waits:
            await sender.await_workers(deadline)
            late = set()
        present = sender.registry.resolve(worker_ids) - late
        await scheme.wait_ack(sorted(present), timeout=deadline.remaining())

    async def aclose(self) -> None:
        """Close the scheme; idempotent."""
        self._closed = True
        scheme, self.scheme = self.scheme, None
        if scheme is not None:
            await scheme.aclose()


def nothing_pending() -> NotConnectedError:
    """Return the error of ``wait_ack`` without weights to wait for."""
    return NotConnectedError("there are no weights to wait for: call send_weights_async() first")
