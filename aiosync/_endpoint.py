"""What live objects have in common: how they open and close, and the event loop that they belong to."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from torch import Tensor

from aiosync._deadline import Deadline
from aiosync._options import SchemeOptions
from aiosync.errors import AiosyncError, NotConnectedError, WrongEventLoopError
from aiosync.reports import SendReport, WorkerState
from aiosync.stats import SchemeStats

if TYPE_CHECKING:
    from aiosync.transports.base import FramedTransport


WorkerIds: TypeAlias = int | list[int] | None
"""One worker, several, or None for all."""


class AsyncResource(ABC):
    """An object that lives from :meth:`connect` to :meth:`aclose`. ``async with`` calls both.

    If :meth:`connect` raises, the object has released all that it took.
    """

    @abstractmethod
    async def connect(self) -> object:
        """Open the object."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything. Idempotent."""

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Endpoint:
    """The live half of a scheme in this process. A role overrides what it has."""

    # On a receiver: why no more updates will come; None while there is a sender.
    ended: str | None = None

    # Whether the other ranks of a sharded trainer match each call of ``send`` with one of theirs, also if
    # ``connect`` has failed here.
    is_matched: bool = False

    @property
    def version(self) -> int:
        """The version last published (sender) or current (receiver); -1 before the first."""
        return -1

    @property
    def stats(self) -> SchemeStats:
        """Counters and timings so far."""
        return SchemeStats()

    @property
    def workers(self) -> dict[int, WorkerState]:
        """On a sender: worker -> its state."""
        return {}

    @property
    def weights_in_use(self) -> Mapping[str, Tensor] | None:
        """The current tensors (receiver) or those last published (sender), by name; None: there are none."""
        return None

    @property
    def transports(self) -> dict[int, FramedTransport]:
        """On a sender: worker -> its connection."""
        return {}

    def check_alive(self) -> None:
        """Raise WrongEventLoopError if the endpoint lives on another event loop, which is not closed."""

    async def aclose(self) -> None:
        """Release everything; idempotent."""


class SendingEndpoint(Endpoint):
    """The calls that send, with the arguments of the scheme's calls of these names."""

    spec: SchemeOptions

    @abstractmethod
    async def send_until(
        self, weights: Any, worker_ids: WorkerIds, *, wait: bool, strict: bool, deadline: Deadline
    ) -> SendReport:
        """Publish the next version. Raises as :meth:`aiosync.WeightSyncScheme.send`."""

    @abstractmethod
    async def wait_ack_until(self, worker_ids: WorkerIds, deadline: Deadline) -> SendReport:
        """Wait until workers have applied the version that was last published to them."""

    async def send(
        self,
        weights: Any = None,
        worker_ids: WorkerIds = None,
        *,
        wait: bool | None = None,
        strict: bool = True,
        timeout: float | None = None,
    ) -> SendReport:
        """Publish the next version: see :meth:`aiosync.WeightSyncScheme.send`."""
        wait, deadline = self.spec.sync if wait is None else wait, Deadline.after(self.spec.seconds(timeout))
        return await self.send_until(weights, worker_ids, wait=wait, strict=strict, deadline=deadline)

    async def update_weights(self, weights: Any = None) -> SendReport:
        """The same as ``send(weights)``."""
        return await self.send(weights)

    async def send_async(self, weights: Any = None, worker_ids: WorkerIds = None) -> SendReport:
        """Publish the next version, and do not wait for the workers: ``send(..., wait=False)``."""
        return await self.send(weights, worker_ids, wait=False)

    async def wait_ack(self, worker_ids: WorkerIds = None, timeout: float | None = None) -> SendReport:
        """Wait for the workers: see :meth:`aiosync.WeightSyncScheme.wait_ack`."""
        return await self.wait_ack_until(worker_ids, Deadline.after(self.spec.seconds(timeout)))

    wait_async = wait_ack


class HomeLoop:
    """The event loop that an endpoint was connected on."""

    def __init__(self, what: str) -> None:
        # The endpoint, for the error message.
        self._what = what
        # Set when the endpoint connects.
        self.loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """Record the running loop at the first call; later calls raise as :meth:`check` does."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
        self.check()

    def check(self) -> None:
        """Raise WrongEventLoopError if another loop runs here."""
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return
        state = "is closed" if self.loop.is_closed() else "is not the one that runs here"
        raise WrongEventLoopError(
            f"{self._what} was connected on an event loop that {state}: call connect(), everything after it "
            "and aclose() within one asyncio.run(), or use the blocking classes of aiosync.sync, which have "
            "a loop of their own"
        )

    def check_alive(self) -> None:
        """Raise as :meth:`check` does, unless the endpoint's loop is closed: it can only be abandoned."""
        if not self.closed:
            self.check()

    @property
    def closed(self) -> bool:
        """Whether the loop has been closed, so that nothing on it can end in order."""
        return self.loop is not None and self.loop.is_closed()


class OpenCalls:
    """The calls of one endpoint that ``aclose``, from another task, ends before it closes anything.

    Without this a running ``connect`` would continue with a closed endpoint: open further connections,
    and wait for answers that do not come.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._scopes: set[asyncio.Timeout] = set()
        self._none_left = asyncio.Event()

    @asynccontextmanager
    async def call(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Run the body for ``seconds`` (TimeoutError) at most, and until :meth:`stop` (NotConnectedError)."""
        scope = asyncio.timeout(0 if self._stopped else seconds)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except (TimeoutError, AiosyncError):
            if not self._stopped:
                raise
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._none_left.set()
        if self._stopped:
            raise NotConnectedError("this endpoint was closed meanwhile")

    async def stop(self) -> None:
        """Cancel the bodies, wait until they have ended, and let no other begin."""
        self._stopped = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():  # else its body is ending already
                scope.reschedule(now)
        if self._scopes:
            self._none_left.clear()
            await self._none_left.wait()
