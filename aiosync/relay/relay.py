"""A node between a trainer and its workers, which passes on each block as it arrives."""

from __future__ import annotations

from aiosync._deadline import Deadline, seconds_of
from aiosync._endpoint import AsyncResource
from aiosync.errors import AlreadyConnectedError, NotConnectedError
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.relay.forwarder import RelayForwarder
from aiosync.reports import WorkerState
from aiosync.schemes.tcp import RelayParts, TCPWeightSyncScheme, relay_parts, upstream_receiver
from aiosync.transports._offload import uninterrupted
from aiosync.transports._tasks import BackgroundTasks


class WeightRelay(AsyncResource):
    """Receives a trainer's updates and forwards them to its workers, block by block as they arrive.

    A trainer with one uplink can so feed many hosts as a tree: it sends one copy to each relay, whatever the
    number of workers below. To the trainer a relay is one worker, which has applied an update when all of
    the relay's workers have. A relay may follow another relay. ::

        upstream = aiosync.TCPWeightSyncScheme("tcp://trainer:5555", token=token)
        downstream = aiosync.TCPWeightSyncScheme("tcp://0.0.0.0:5556", token=token)
        async with aiosync.WeightRelay(upstream, downstream, model_id="policy") as relay:
            await relay.wait_closed()

    Memory: ``max_slots`` model sizes at most. A worker that joins gets the newest version from the relay. If
    the link upstream breaks, workers keep their version, and the relay connects again as a worker would.

    Args:
        upstream: how to reach the trainer, or the relay above.
        downstream: where to listen, and how to encode updates for the workers.
        model_id: the model's name on the trainer.
    """

    def __init__(
        self, upstream: TCPWeightSyncScheme, downstream: TCPWeightSyncScheme, *, model_id: str | None = None
    ) -> None:
        self._upstream = upstream
        self._downstream = downstream
        self._model_id = model_id
        # None: its listener was closed.
        self._parts: RelayParts | None = relay_parts(downstream, model_id)
        self._applier: RelayForwarder | None = None
        self._receiver: WeightReceiver | None = None
        self._host = BackgroundTasks("aiosync-relay")

    @property
    def address(self) -> str:
        """The address that workers connect to."""
        return self._downstream.address

    @property
    def version(self) -> int:
        """The newest version that all of the relay's workers have answered; -1 before the first."""
        return self._receiver.version if self._receiver is not None else -1

    @property
    def workers(self) -> dict[int, WorkerState]:
        """The relay's workers: index -> state."""
        return self._applier.registry.states(self.version) if self._applier is not None else {}

    @property
    def ended(self) -> str | None:
        """Why no more updates will come: the trainer has gone, or the relay failed. None before that."""
        return self._receiver.ended if self._receiver is not None else None

    @property
    def lost(self) -> bool:
        """Whether the trainer has gone without closing, or the relay failed: see :attr:`ended`."""
        return self._receiver is not None and self._receiver.lost

    async def connect(self, timeout: float | None = None) -> None:
        """Connect to the trainer, receive its newest version, then accept workers.

        Raises:
            AlreadyConnectedError: it is connected.
            WorkerLostError, HandshakeError, SyncTimeoutError: as a worker's ``connect``.
            ArenaAllocationError: there is no memory for one version.
        """
        if self._receiver is not None:
            raise AlreadyConnectedError("connect() was called before and succeeded")
        if self._parts is None:  # an attempt before this one failed
            self._parts = relay_parts(self._downstream, self._model_id)
        applier = self._applier = RelayForwarder(self._parts, self._model_id)
        self._receiver = upstream_receiver(self._upstream, applier, self._model_id)
        try:
            await self._receiver.connect(Deadline.after(seconds_of(timeout, self._upstream.timeout)))
            await applier.open_downstream()
            await self._host.start()
            self._host.spawn(self._receiver.run)
        except BaseException:
            await self.aclose()
            raise

    async def wait_closed(self) -> None:
        """Wait until the trainer has gone, or the relay has failed. Has no deadline: cancel it to stop."""
        if self._receiver is None:
            raise NotConnectedError("connect() first: this relay is not connected")
        await self._receiver.wait_closed()

    async def aclose(self) -> None:
        """Close the connections to the trainer and to the workers; idempotent."""
        await uninterrupted(lambda _: self._close())

    async def _close(self) -> None:
        receiver, self._receiver, self._parts = self._receiver, None, None
        await self._host.aclose()
        if receiver is not None:
            await receiver.aclose()
        await self._downstream.aclose()
