"""The way to one object of another process, by calling its methods: what torch RPC and Ray have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aiosync._deadline import Deadline
from aiosync.errors import WorkerError

__all__ = ["CallingTransport"]


class CallingTransport(ABC):
    """Methods of a remote object are called there, and awaited here. No thread waits for an answer.

    Args:
        worker_idx: which worker it is, for messages.
    """

    _fetching: ClassVar[str] = "_receive_weights_scheme"
    """The method that is called where there are no weights to hand over."""

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self._sent: Any = None
        self._closed = False

    @abstractmethod
    def check_connection(self) -> bool:
        """Whether it can be called, as far as is known without asking it."""

    @abstractmethod
    def _begin(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline) -> Any:
        """Begin a call."""

    @abstractmethod
    async def _begin_weights(self, weights: Any, deadline: Deadline) -> Any:
        """Begin the call that hands weights over."""

    @abstractmethod
    async def _result(self, begun: Any, deadline: Deadline | None = None) -> Any:
        """What came of a call; given up, it can be asked for again, with another deadline."""

    @abstractmethod
    def _forget(self, begun: Any) -> None:
        """The result of a call is not needed any more."""

    async def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Call a method of the object; a coroutine is run to its end there.

        Args:
            method: its name.
            args: its arguments.
            kwargs: its further arguments.
            timeout: seconds.

        Raises:
            RemoteApplyError: it raised; with the exception's type, message and traceback.
            WorkerLostError: the process is gone.
            SyncTimeoutError: it did not answer in time.
        """
        return await self._result(self._begin(method, args, kwargs, Deadline.after(timeout)))

    async def send_weights(self, weights: Any, *, timeout: float) -> None:
        """Hand weights to the object's method for that, and wait until it has returned.

        Args:
            weights: an ``nn.Module``, TensorDict or dict; copied first. None: its
                ``_receive_weights_scheme()`` is called, which fetches them.
            timeout: seconds.

        Raises:
            As :meth:`call`.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        await self.wait_ack()
        if earlier is not None:
            raise earlier

    async def send_weights_async(self, weights: Any, *, timeout: float) -> None:
        """The same without waiting for the answer; :meth:`wait_ack` does. Waits for what was sent before: the
        older weights are not to come last. What that raised is raised when these have been sent.
        """
        earlier = await self._send(weights, Deadline.after(timeout))
        if earlier is not None:
            raise earlier

    async def wait_ack(self) -> None:
        """Wait for the answer to what :meth:`send_weights_async` sent, and raise what was raised there."""
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
            self._sent = self._begin(self._fetching, (), {}, deadline)
        else:
            self._sent = await self._begin_weights(weights, deadline)
        return earlier

    async def _acknowledged(self, deadline: Deadline | None) -> None:
        """Given up, it is still the one that the next waits for."""
        assert self._sent is not None
        try:
            await self._result(self._sent, deadline)
        except WorkerError:
            self._sent = None
            raise
        self._sent = None

    async def aclose(self) -> None:
        """Let go of it; idempotent. The object stays; its further answers are dropped."""
        self._closed = True
        sent, self._sent = self._sent, None
        if sent is not None:
            self._forget(sent)
