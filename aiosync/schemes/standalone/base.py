"""What all transports that are used alone have in common.

A standalone transport owns a private scheme of its kind with one worker (several in shared memory), so that
the scheme's endpoints, protocol and transfer do the work. The first call decides the side.

States: NEW → SENDER (:mod:`.sender_side`) or RECEIVER (:mod:`.receiver_side`) → CLOSED.
In CLOSED every call raises NotConnectedError. A forked child begins with NEW, and so does a pickled
transport, which has the constructor's arguments only.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, ClassVar

from torch import nn

from aiosync._deadline import Deadline, check_timeout, seconds_of
from aiosync.errors import AlreadyConnectedError, InvalidArgumentError, NotConnectedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.standalone.receiver_side import MODEL, ReceiverSide, closed_transport
from aiosync.schemes.standalone.sender_side import SenderSide, nothing_pending
from aiosync.transports.contract import Transport


class StandaloneTransport(Transport):
    """A transport without a scheme, for one sender and one worker.

    A subclass implements :meth:`_make_sender` and :meth:`_make_receiver`, and overrides the other hooks if it
    needs to.

    Args:
        timeout: seconds that a call may take by default; None: the environment's ``AIOSYNC_TIMEOUT``, else
            120.
    """

    # Whether the argument ``weights`` of receive_weights() is written to.
    _fills_buffer: ClassVar[bool] = False
    # Whether a send waits for workers that have never connected.
    _waits: ClassVar[bool] = True

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None:
            check_timeout(timeout, f"timeout={timeout!r}")
        self.timeout = timeout
        self._forget()

    def _forget(self) -> None:
        """Set the fields that belong to one process."""
        self._pid = os.getpid()
        self._side: SenderSide | ReceiverSide | None = None  # None before the first call
        self._closed = False

    # -- hooks ------------------------------------------------------------------------------------------

    @property
    def _may_send(self) -> bool:
        """Whether the constructor was given what the worker is reached by. If not, sending does nothing."""
        return True

    @property
    def _may_receive(self) -> bool:
        """Whether the constructor was given what the sender is reached by. If not, receiving returns None."""
        return True

    @property
    def _finds_another(self) -> bool:
        """Whether a worker that found no sender where it should be looks for another one."""
        return False

    @abstractmethod
    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        """Create the private scheme and initialise it as a sender of ``model``, or of weights given later."""

    @abstractmethod
    async def _make_receiver(self) -> WeightSyncScheme:
        """Create the private scheme, not initialised. May wait for the sender until it is cancelled."""

    async def _announce(self, scheme: WeightSyncScheme, first: bool) -> None:
        """Make the sender's address known to workers that are not connected. Called before each send."""
        return

    # -- the sender's side --------------------------------------------------------------------------------

    async def setup_connection_and_weights_on_sender(
        self, weights: Any = None, *, timeout: float | None = None
    ) -> None:
        """Become the sender: the worker can connect from now on. Does not wait for it without ``weights``.

        Args:
            weights: as in :meth:`send_weights`; None: nothing is sent yet.
            timeout: seconds; None: the transport's.

        Raises:
            Exception: as :meth:`send_weights`.
        """
        if weights is not None:
            await self.send_weights(weights, timeout=timeout)
        elif self._may_send:
            await self._sender().listen()

    async def send_weights(self, weights: Any, *, timeout: float | None = None) -> None:
        """Send weights, and wait until the worker has applied them. The first call waits for the worker.

        Args:
            weights: an ``nn.Module``, a TensorDict or a dict (flat or nested). All calls give the same
                names, shapes and dtypes.
            timeout: seconds; None: the transport's.

        Raises:
            InvalidArgumentError: ``weights`` is None.
            LayoutMismatchError: the weights differ from the first ones, or do not fit the worker's model.
            RemoteApplyError: the worker could not apply the weights, and keeps the previous ones.
            WorkerLostError: the worker was lost.
            SyncTimeoutError: the worker did not connect or answer in time.
            AlreadyConnectedError: this transport is used on the worker's side.
            NotConnectedError: this transport is closed.
        """
        if self._may_send:
            await self._sender().send(weights, None, wait=True, deadline=self._deadline(timeout))

    async def send_weights_async(
        self, weights: Any, model_id: str = "policy", *, timeout: float | None = None
    ) -> None:
        """Publish weights and return; :meth:`wait_ack` waits for the worker. Newer weights replace older ones
        that the worker has not fetched.

        Args:
            weights: as in :meth:`send_weights`.
            model_id: not used, as in torchrl: one transport sends one model.
            timeout: seconds; None: the transport's.

        Raises:
            Exception: as :meth:`send_weights`.
        """
        if self._may_send:
            await self._sender().send(weights, None, wait=False, deadline=self._deadline(timeout))

    async def wait_ack(self, *, timeout: float | None = None) -> None:
        """Wait until the worker has applied the weights of the last :meth:`send_weights_async`.

        Args:
            timeout: seconds; None: the transport's. After SyncTimeoutError it may be called again.

        Raises:
            NotConnectedError: :meth:`send_weights_async` was not called since the last call.
            Exception: as :meth:`send_weights`.
        """
        side = self._here._side
        if not isinstance(side, SenderSide):
            raise nothing_pending()
        await side.wait_ack(self._deadline(timeout))

    async def check_ack(self, message: str = "updated") -> None:
        """Wait as :meth:`wait_ack`.

        Args:
            message: the expected answer; workers answer ``"updated"``.

        Raises:
            InvalidArgumentError: another message.
            Exception: as :meth:`wait_ack`.
        """
        _check_message(message)
        await self.wait_ack()

    # -- the worker's side --------------------------------------------------------------------------------

    async def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int = 0,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Become the worker: connect to the sender, and return the newest weights.

        Args:
            worker_idx: this worker's index; not used by a transport that has one worker.
            weights: as in :meth:`receive_weights`.
            model: as in :meth:`receive_weights`.
            strategy: as in :meth:`receive_weights`.
            timeout: seconds; None: the transport's.

        Raises:
            SyncTimeoutError: no weights came in time.
            Exception: as :meth:`receive_weights`.
        """
        deadline = self._deadline(timeout)
        found = await self.receive_weights(
            deadline.remaining(), weights=weights, model=model, strategy=strategy
        )
        if found is None and self._may_receive:
            raise deadline.error("connect", hint="no weights came from the sender")
        return found

    async def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Wait for weights that no earlier call has returned, apply them and acknowledge them.

        Args:
            timeout: seconds; None: the transport's.
            weights: a buffer, a TensorDict or dict with the sent names and shapes. If the transport receives
                into buffers (Distributed, RPC, Ray) the weights are written to it and it is returned; the
                others ignore it.
            model: an ``nn.Module``, TensorDict or dict that the weights are applied to; None: the one that
                was given before, if any.
            strategy: a :class:`~aiosync.WeightStrategy`, or its name; None: the one that was given before,
                else ``"tensordict"``.

        Returns:
            The weights in the strategy's form, or None if none came in time. With a model they view what
            the model now computes with: read only, and valid until the next call. Without a model they are
            the caller's own.

        Raises:
            LayoutMismatchError: the weights do not fit the model. The sender gets the same error.
            WorkerLostError: the sender is gone. The next call looks for a new one.
            HandshakeError: the sender refused this worker.
            AlreadyConnectedError: this transport is used on the sender's side.
            NotConnectedError: this transport is closed.
            Exception: what a strategy or the model raises. The sender gets it as RemoteApplyError.
        """
        if not self._may_receive:
            return None
        buffer = weights if self._fills_buffer else None
        return await self._receiver().receive(self._deadline(timeout), buffer, model, strategy)

    async def send_ack(self, message: str = "updated") -> None:
        """Do nothing: :meth:`receive_weights` has acknowledged the weights, or has reported why not.

        Args:
            message: the answer; only ``"updated"`` is known.

        Raises:
            InvalidArgumentError: another message.
        """
        _check_message(message)

    # -- both sides ---------------------------------------------------------------------------------------

    def check_connection(self) -> bool:
        """Return whether the other side is connected, as far as is known without a round trip."""
        side = self._here._side
        return side is not None and any(each.check_connection() for each in side.connections)

    async def aclose(self) -> None:
        """Close this side and release everything; idempotent. A worker's model keeps its weights."""
        here = self._here
        here._closed = True
        side, here._side = here._side, None
        if side is not None:
            await side.aclose()

    @property
    def _here(self) -> StandaloneTransport:
        """This object, without the state of a parent process."""
        if self._pid != os.getpid():
            self._forget()
        return self

    def _sender(self) -> SenderSide:
        side = self._here._side
        if side is None and not self._closed:
            side = self._side = SenderSide(self._make_sender, self._announce, self._waits)
        if isinstance(side, SenderSide):
            return side
        raise self._unusable("sender")

    def _receiver(self, index: int = 0) -> ReceiverSide:
        side = self._here._side
        if side is None and not self._closed:
            seconds = seconds_of(None, self.timeout)
            side = self._side = ReceiverSide(self._make_receiver, seconds, self._finds_another, index)
        if isinstance(side, ReceiverSide):
            return side
        raise self._unusable("worker")

    def _unusable(self, wanted: str) -> NotConnectedError | AlreadyConnectedError:
        if self._closed:
            return closed_transport()
        return AlreadyConnectedError(
            f"this transport is in use on the other side: the {wanted} needs another transport object, with "
            "the same arguments"
        )

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(seconds_of(timeout, self.timeout))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


_OF_ONE_PROCESS = {"_pid", "_side", "_closed"}


def init_sender(
    scheme: WeightSyncScheme, model: nn.Module | None, *, model_id: str = MODEL, **arguments: Any
) -> WeightSyncScheme:
    """Initialise a private scheme as a sender; the first call of ``connect`` gives it its weights."""
    source: dict[str, Any] = {"weights": {}} if model is None else {"model": model}
    scheme.init_on_sender(model_id=model_id, num_workers=1, **source, **arguments)
    return scheme


def _check_message(message: str) -> None:
    if message != "updated":
        raise InvalidArgumentError(f"message={message!r}: expected 'updated'")
