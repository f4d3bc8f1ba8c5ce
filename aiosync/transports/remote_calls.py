"""Calls of the methods of one remote object: the base class of the torch RPC and the Ray transport."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aiosync._deadline import Deadline
from aiosync.errors import WorkerError
from aiosync.transports._offload import handover


class PendingCall(ABC):
    """A call in another process. No thread blocks until its answer.

    The subclass's constructor starts the call, and has ``_resolve`` called with a function that returns the
    answer or raises.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._answer: asyncio.Future[Any]
        self._answer, self._resolve = handover()

    @abstractmethod
    async def answer(self, deadline: Deadline | None = None) -> Any:
        """Wait for the answer and return it. After a cancellation or a timeout it may be awaited again.

        ``deadline`` replaces the call's own.

        Raises:
            RemoteApplyError: the actor's method raised. The error has the exception's type and traceback.
            WorkerLostError: the process is gone, or not a member of torch RPC.
            SyncTimeoutError: no answer arrived in time.
        """

    async def _wait(self, deadline: Deadline | None) -> Deadline | None:
        """Wait for the answer. Returns None, or the deadline that passed."""
        deadline = deadline or self._deadline
        await asyncio.wait([self._answer], timeout=deadline.remaining())
        return None if self._answer.done() else deadline

    def discard(self) -> None:
        """Drop the answer."""
        self._answer.cancel()


class CallingTransport(ABC):
    """Calls methods of a remote object and awaits their results. No thread blocks meanwhile.

    A subclass implements ``check_connection``, ``_start_call`` and ``_start_weights``.

    Args:
        worker_idx: the index of the object's worker, for messages.
    """

    _fetching: ClassVar[str] = "_receive_weights_scheme"
    """The method that ``send_weights(None)`` calls."""

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        # The call of the last ``send_weights_async`` whose result has not been read.
        self._sent: PendingCall | None = None
        self._closed = False

    @abstractmethod
    def check_connection(self) -> bool:
        """Return whether the object can be called, as far as is known without a call."""

    @abstractmethod
    def _start_call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline
    ) -> PendingCall:
        """Start a call of a method."""

    @abstractmethod
    async def _start_weights(self, weights: Any, deadline: Deadline) -> PendingCall:
        """Start the call that passes weights to the object."""

    async def _result(self, call: Any, deadline: Deadline | None = None) -> Any:
        """Return the result of ``call``. After a cancellation or a timeout it may be awaited again."""
        return await call.answer(deadline)

    async def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call a method of the object and return its result. The remote process awaits a coroutine's result.

        Args:
            method: the method's name.
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: seconds.

        Raises:
            RemoteApplyError: the method raised. The error has the exception's type, message and traceback.
            WorkerLostError: the process is gone.
            SyncTimeoutError: no answer arrived in time.
        """
        return await self._result(self._start_call(method, args, kwargs, Deadline.after(timeout)))

    async def send_weights(self, weights: Any, *, timeout: float) -> None:
        """Pass weights to the object's method for weights, and wait until the method has returned.

        Args:
            weights: an ``nn.Module``, TensorDict or dict, which is copied first. None: call the object's
                ``_receive_weights_scheme()``, which fetches the weights.
            timeout: seconds.

        Raises:
            As :meth:`call`.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        await self.wait_ack()
        if earlier is not None:
            raise earlier

    async def send_weights_async(self, weights: Any, *, timeout: float) -> None:
        """Pass weights to the object without waiting for the answer; see :meth:`wait_ack`.

        It first waits for the answer to the previous weights, so that older weights never arrive last. An
        error in that answer is raised after the new weights have been sent.

        Args:
            weights: as in :meth:`send_weights`.
            timeout: seconds.

        Raises:
            As :meth:`call`.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        if earlier is not None:
            raise earlier

    async def wait_ack(self) -> None:
        """Wait for the answer to the last :meth:`send_weights_async`.

        Raises:
            As :meth:`call`.
        """
        if self._sent is not None:
            await self._acknowledged(None)

    async def _send(self, weights: Any, deadline: Deadline) -> WorkerError | None:
        earlier = None
        if self._sent is not None:
            try:
                await self._acknowledged(deadline)
            except WorkerError as exc:
                earlier = exc
        if weights is None:
            self._sent = self._start_call(self._fetching, (), {}, deadline)
        else:
            self._sent = await self._start_weights(weights, deadline)
        return earlier

    async def _acknowledged(self, deadline: Deadline | None) -> None:
        """Wait for the answer to the last weights. May be called again after a timeout."""
        assert self._sent is not None
        try:
            await self._result(self._sent, deadline)
        except WorkerError:
            self._sent = None
            raise
        self._sent = None

    async def aclose(self) -> None:
        """Close this transport; idempotent. The object stays. Answers that arrive later are dropped."""
        self._closed = True
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.discard()
