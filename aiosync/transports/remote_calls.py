"""Calls of the methods of one remote object: the base class of the torch RPC and the Ray transport."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from aiosync._deadline import Deadline
from aiosync.errors import NotConnectedError, Phase, SyncTimeoutError, WorkerError
from aiosync.transports._offload import post


class PendingCall(ABC):
    """A call in another process. No thread blocks until its answer.

    The subclass's constructor starts the call, and has ``_resolve`` called with a function that returns the
    answer or raises.
    """

    phase: Phase  # which a timeout's error names
    hint: str  # what a timeout's error says

    def __init__(self, workers: Sequence[int], deadline: Deadline) -> None:
        self._workers = workers  # for errors
        self._deadline = deadline
        # Not a future of this event loop: another one may wait for the answer.
        self._answer: Future[Any] = Future()
        # What waits for it: an event loop, and its event.
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def _resolve(self, work: Callable[[], Any]) -> None:
        """Set what ``work()`` returns or raises as the answer, in any thread, unless it was discarded."""
        if self._answer.set_running_or_notify_cancel():
            try:
                self._answer.set_result(work())
            except Exception as exc:  # noqa: BLE001 - raised where it is awaited
                self._answer.set_exception(exc)
            self._wake()

    def _wake(self) -> None:
        for loop, arrived in tuple(self._waiters):
            post(loop, arrived.set)

    async def answer(self, deadline: Deadline | None = None) -> Any:
        """Wait for the answer and return it. After a cancellation or a timeout it may be awaited again, also
        on another event loop.

        ``deadline`` replaces the call's own.

        Raises:
            RemoteApplyError: the actor's method raised. The error has the exception's type and traceback.
            WorkerLostError: the process is gone, or not a member of torch RPC.
            SyncTimeoutError: no answer arrived in time.
            NotConnectedError: :meth:`discard` was called.
        """
        deadline = deadline or self._deadline
        waiter = asyncio.get_running_loop(), asyncio.Event()
        self._waiters.add(waiter)
        try:
            if not self._answer.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(deadline.remaining()):
                        await waiter[1].wait()
        finally:
            self._waiters.discard(waiter)
        if self._answer.cancelled():
            raise NotConnectedError("this transport was closed meanwhile")
        if not self._answer.done():
            seconds, workers = deadline.seconds, self._workers
            raise SyncTimeoutError(self.phase, seconds=seconds, workers=workers, hint=self.hint)
        return self._read()

    @abstractmethod
    def _read(self) -> Any:
        """Return the answer, which has arrived, or raise an error of this package."""

    def discard(self) -> None:
        """Drop the answer; calls that wait for it raise NotConnectedError."""
        self._answer.cancel()
        self._wake()


class RemoteObject(ABC):
    """Calls methods of a remote object and awaits their results. No thread blocks meanwhile.

    A subclass implements ``check_connection``, ``_start_call`` and ``_start_weights``.
    """

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx  # the index of the object's worker, for messages
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
        return await self._start_call(method, args, kwargs, Deadline.after(timeout)).answer()

    async def send_weights(self, weights: Any, *, timeout: float) -> None:
        """Pass weights to the object's method for weights, and wait until the method has returned.

        Args:
            weights: an ``nn.Module``, TensorDict or dict, which is copied first. None: call the object's
                ``_receive_weights_scheme()``, which fetches the weights.
            timeout: seconds.

        Raises:
            Exception: as :meth:`call`.
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
            Exception: as :meth:`call`.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        if earlier is not None:
            raise earlier

    async def wait_ack(self) -> None:
        """Wait for the answer to the last :meth:`send_weights_async`.

        Raises:
            Exception: as :meth:`call`.
        """
        error = await self._acknowledged(None)
        if error is not None:
            raise error

    async def _send(self, weights: Any, deadline: Deadline) -> WorkerError | None:
        """Send weights after the answer to the earlier ones has arrived. Returns the error in that answer."""
        earlier = await self._acknowledged(deadline)
        if weights is None:
            self._sent = self._start_call("_receive_weights_scheme", (), {}, deadline)
        else:
            self._sent = await self._start_weights(weights, deadline)
        return earlier

    async def _acknowledged(self, deadline: Deadline | None) -> WorkerError | None:
        """Wait for the answer to the last weights; return its error. May be called again after a timeout."""
        error = None
        if self._sent is not None:
            try:
                await self._sent.answer(deadline)
            except WorkerError as exc:
                error = exc
            self._sent = None
        return error

    async def aclose(self) -> None:
        """Close this transport; idempotent. The object stays. Answers that arrive later are dropped."""
        self._closed = True
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.discard()
