"""The contract of all transports: torchrl's vocabulary, as coroutines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Transport(ABC):
    """Moves weights between one sender and its worker.

    A transport is used on one side. On the sender: ``setup_connection_and_weights_on_sender``, then
    ``send_weights``, or ``send_weights_async`` and ``wait_ack``. On a worker:
    ``setup_connection_and_weights_on_receiver``, then ``receive_weights``. Both setup calls may be left out.
    ``aclose`` ends the use. A transport that a scheme owns refuses the methods that move weights: call the
    scheme's methods.
    """

    @abstractmethod
    async def send_weights(self, weights: Any) -> None:
        """Send weights, and wait until the worker has applied them."""

    @abstractmethod
    async def send_weights_async(self, weights: Any) -> None:
        """Send weights without waiting for the worker; see :meth:`wait_ack`."""

    @abstractmethod
    async def wait_ack(self) -> None:
        """Wait until the worker has applied the weights of the last :meth:`send_weights_async`."""

    @abstractmethod
    async def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Wait for weights, apply them and acknowledge them. Returns None if none came in time."""

    @abstractmethod
    async def send_ack(self, message: str = "updated") -> None:
        """Acknowledge the weights that were received last."""

    @abstractmethod
    def check_connection(self) -> bool:
        """Return whether the connection is open, as far as is known without a round trip."""

    @abstractmethod
    async def setup_connection_and_weights_on_sender(self) -> None:
        """Become the sender."""

    @abstractmethod
    async def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int = 0, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Become the worker: connect to the sender, and return its first weights."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the connection and release everything; idempotent."""
