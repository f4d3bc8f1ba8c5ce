"""The worker's side of a transport that is used alone.

States: NEW → JOINING (a task connects the scheme) → CONNECTED → LOST (the sender is gone) → JOINING; CLOSED.
The task belongs to this object, not to a call: a call that is cancelled, or reaches its timeout, leaves it
running, and the next call waits for it again. If it fails, the call that waits for it raises, and the next
call starts another one. In LOST one call has raised WorkerLostError, and the next one looks for a sender
again. A call that is cancelled while it applies an update leaves what ``scheme.receive`` leaves then.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import NotConnectedError, SyncTimeoutError, WorkerLostError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.transports._offload import offloaded
from aiosync.transports.base import FramedTransport
from aiosync.weights.strategy import get_strategy

MODEL = "weights"  # the model's name in private schemes that have no other


@dataclass(eq=False, repr=False)
class ReceiverSide:
    """Receives through a private scheme."""

    # Creates the scheme, not initialised. May wait for the sender until it is cancelled.
    make: Callable[[], Awaitable[WeightSyncScheme]]
    seconds: float  # that one attempt to connect may take
    # Whether a worker that found no sender where it should be looks for another one.
    finds_another: bool
    index: int = 0  # the worker's index
    # What updates are applied to: a model or a buffer.
    target: Any = field(default=None, init=False)
    scheme: WeightSyncScheme | None = field(default=None, init=False)
    # The sender's recipe, if the sender has to hand it out.
    _recipe: WeightSyncScheme | None = field(default=None, init=False)
    _joining: asyncio.Task[None] | None = field(default=None, init=False)
    _returned: bool = field(default=False, init=False)  # whether a call has returned the first weights
    _lost: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    @property
    def connections(self) -> Iterable[FramedTransport]:
        """The connection to the sender."""
        found = self.scheme.receiver_transport if self.scheme is not None else None
        return () if found is None else (found,)

    async def receive(self, deadline: Deadline, buffer: Any, model: Any, strategy: Any) -> Any:
        """Wait for the next weights and apply them. Return them, or None if none came in time.

        Args:
            deadline: until when to wait.
            buffer: a TensorDict or dict that the weights are written to, and that is returned.
            model: what the weights are applied to; None: as before.
            strategy: a strategy or its name; None: as before.
        """
        if self._lost and self.scheme is not None:
            before, self.scheme, self._lost = self.scheme, None, False
            await before.aclose()
        target = model if model is not None else buffer
        self._join(target, strategy)
        first = self._joining is not None or not self._returned
        scheme = await self._joined(deadline)
        if scheme is None:
            return None
        if target is not None and target is not self.target:
            await scheme.rebind(model=target)
            self.target = target
        if strategy is not None:
            scheme.strategy = get_strategy(strategy)
        if not first and not await self._next(scheme, deadline):
            return None
        self._returned = True
        return await self._result(scheme, buffer)

    def begin(self, target: Any = None, strategy: Any = None) -> None:
        """Start to connect, without waiting."""
        self._join(target, strategy)

    def _join(self, target: Any, strategy: Any) -> None:
        if self._closed:
            raise closed_transport()
        if self.scheme is None and self._joining is None:
            self.target = target if target is not None else self.target
            self._joining = asyncio.create_task(self._connect(strategy), name="aiosync-joining")

    async def _connect(self, strategy: Any) -> None:
        while True:
            scheme = await self._made()
            scheme.init_on_receiver(
                model_id=scheme.model_id or MODEL, model=self.target, worker_idx=self.index
            )
            if strategy is not None:
                scheme.strategy = get_strategy(strategy)
            try:
                await scheme.connect(timeout=self.seconds)
            except WorkerLostError:
                if not self.finds_another:
                    raise
                self._recipe = None
            else:
                self.scheme, self._returned = scheme, False
                return

    async def _made(self) -> WeightSyncScheme:
        """Create the scheme, from the same recipe as before unless its sender is gone."""
        if not self.finds_another:
            return await self.make()
        if self._recipe is None:
            self._recipe = await self.make()
        return copy.copy(self._recipe)

    async def _joined(self, deadline: Deadline) -> WeightSyncScheme | None:
        """Wait until the scheme is connected. Return None if that did not happen in time."""
        joining = self._joining
        if joining is not None:
            await asyncio.wait([joining], timeout=deadline.remaining())
            if not joining.done():
                return None
            if self._closed:
                raise closed_transport()
            self._joining = None
            try:
                joining.result()
            except SyncTimeoutError:  # the next call tries again
                return None
        return self.scheme

    async def _next(self, scheme: WeightSyncScheme, deadline: Deadline) -> bool:
        """Wait for the next version and apply it. Return whether one came in time."""
        try:
            return await scheme.receive(deadline.remaining()) is not None
        except WorkerLostError:
            self._lost, self._recipe = True, None
            raise

    async def _result(self, scheme: WeightSyncScheme, buffer: Any) -> Any:
        found, target = scheme.weights, self.target
        if buffer is not None:
            if target is not buffer:
                await offloaded(lambda: scheme.strategy.apply_weights(buffer, found), "aiosync-transport")
            return buffer
        if target is not None:
            return found
        return await offloaded(lambda: _copied(found), "aiosync-transport")

    async def aclose(self) -> None:
        """Cancel the attempt to connect, and close the scheme; idempotent. Waiting calls raise."""
        self._closed = True
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.cancel()
            await asyncio.wait([joining])
        scheme, self.scheme = self.scheme, None
        if scheme is not None:
            await scheme.aclose()


def closed_transport() -> NotConnectedError:
    """Return the error of a call on a closed transport."""
    return NotConnectedError("this transport is closed: create another one")


def _copied(weights: Any) -> Any:
    """Return weights in memory of the caller's own."""
    if not isinstance(weights, dict):  # a TensorDict
        return weights.clone()
    return {name: each.clone() if isinstance(each, Tensor) else each for name, each in weights.items()}
