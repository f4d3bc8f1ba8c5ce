"""An update on the worker's side, and the interface of an object that applies updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from aiosync.errors import LayoutMismatchError
from aiosync.protocol.frames import Update, Welcome
from aiosync.transfer.base import InboundTransfer
from aiosync.transports.base import Transport
from aiosync.weights.binding import Staged
from aiosync.weights.layout import Layout

if TYPE_CHECKING:
    from aiosync.receiver.staging import StagingBuffers

__all__ = ["Applier", "Overtaken", "PendingUpdate", "check_same_layout"]


class PendingUpdate(msgspec.Struct, eq=False):
    """An update that has arrived and is not committed yet.

    Attributes:
        update: the sender's frame.
        staged: its tensors, once they can be committed.
        names: the entries that were sent, aliases included; None: all.
        back_buffers: the buffers that it was staged in.
        seconds: phase (``stage``, ``wait``, ``commit``) -> seconds that it took.
        committed: whether it is in service.
    """

    update: Update
    staged: Staged | None = None
    names: Collection[str] | None = None
    back_buffers: StagingBuffers | None = None
    seconds: dict[str, float] = {}
    committed: bool = False


class Overtaken(Exception):
    """A newer version arrived, or the receiver was closed, while a commit waited for readers."""


class Applier(ABC):
    """What a receiver does with updates: apply them to a model, or hand them on to other workers.

    All methods are called on the receiver's event loop, in this order::

        follow(via)                  the sender has welcomed this worker
        open(layout, device)         once: the sender's layout is known; or, after a reconnection,
        check_layout(welcome)
        prepare(transport)           updates arrive over this connection
        for each update:
            may_fetch, make_room()   before the Fetch is sent
            inbound.expect(update)   its frame has arrived
            take_at_once(pending)    → whether it was applied synchronously; if not
            stage(pending)
            commit(pending, on_wait)
            forget()                 instead, if the update will not be committed
        reserve()                    once, after the first update
        detach()                     the connection is lost
        close()

    Attributes:
        may_fetch: whether the next update may be fetched now.
    """

    may_fetch = True

    def __init__(self, worker: int) -> None:
        # The version in service, -1 before the first.
        self.version = -1
        self.worker = worker
        # The transfer by which updates arrive, once there is a connection.
        self.inbound: InboundTransfer | None = None

    # -- the connection --------------------------------------------------------------------------

    def follow(self, via: Sequence[str]) -> None:
        """Note the ids of the senders that this connection's updates pass.

        Raises:
            RelayRingError: the sender follows this relay.
        """
        return

    def follow_another(self) -> None:
        """Follow another sender. The version in service counts as older than all of its versions."""
        self.version = -1

    @abstractmethod
    def open(self, wire_layout: object, device: str) -> None:
        """Get ready for updates of this layout.

        Args:
            wire_layout: the sender's layout, as it came.
            device: the device of the sender's weights.

        Raises:
            LayoutMismatchError: model and layout do not fit.
            ProtocolError: the layout is malformed, or this process does not have the device.
            UnsupportedTensorError: the model has a tensor that cannot be received into.
        """

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether updates can be staged."""

    @property
    @abstractmethod
    def signature(self) -> str:
        """The signature of the layout; "" before :meth:`open`."""

    @abstractmethod
    def check_layout(self, welcome: Welcome) -> None:
        """Check that the sender still has the layout of :meth:`open`, after a reconnection.

        Raises:
            LayoutMismatchError: the sender has another layout.
            ProtocolError: the layout is malformed.
        """

    @abstractmethod
    async def prepare(self, transport: Transport) -> None:
        """Get ready for updates over this connection."""

    async def reserve(self) -> None:
        """Allocate all memory that later updates need."""
        return

    async def detach(self) -> None:
        """The connection is lost: stop using the sender's memory."""
        return

    def disconnected(self) -> None:
        """Called when the connection to the sender is lost."""
        return

    # -- one update ------------------------------------------------------------------------------

    async def make_room(self) -> None:
        """Wait until :attr:`may_fetch` is true."""
        return

    @property
    def have(self) -> int:
        """The version whose bytes, as they arrived, this process still has; -1 for none."""
        return self.version if self.inbound is not None and not self.inbound.access.lent else -1

    @property
    def can_read_sender(self) -> bool:
        """Whether blocks of the next update may be left in the sender's memory."""
        return self.inbound is not None and self.inbound.can_read_sender

    @property
    def needs_sender(self) -> bool:
        """Whether a staged update may be read again in the sender's memory."""
        return False

    def take_at_once(self, pending: PendingUpdate) -> bool:
        """Stage and commit synchronously if no step needs to await. Return whether that was done.

        Raises:
            Exception: as :meth:`stage` and :meth:`commit`.
        """
        return False

    @abstractmethod
    async def stage(self, pending: PendingUpdate) -> None:
        """Bring the bytes to where a commit can use them; in a thread if that takes long.

        Raises:
            Exception: what mapping, checking or the context raises; ``pending`` is as it was.
        """

    @abstractmethod
    def has_staged(self, pending: PendingUpdate) -> bool:
        """Whether an update is staged and can be committed."""

    @abstractmethod
    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        """Put a staged update in service. Call ``on_wait`` if that has to wait for readers.

        Raises:
            Exception: what the model raises; the version before is in service, whole.
            Overtaken: :meth:`overtake` or :meth:`close` was called before.
            CancelledError: the commit was withdrawn, unless ``pending.committed`` says otherwise.
        """

    def forget(self) -> None:
        """The update that arrived last will not be committed."""
        if self.inbound is not None:
            self.inbound.forget()

    def overtake(self) -> None:
        """A newer version is there: cancel a commit that waits for readers or for other parts.

        The waiting commit would only keep the sender's memory in use.
        """
        return

    # -- figures ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors in service, name -> tensor."""

    @property
    def memory(self) -> int:
        """Bytes that staging has allocated in this process."""
        return 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of one version."""

    # -- the end ---------------------------------------------------------------------------------

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Nothing is committed once this has begun."""

    def abandon_loop(self) -> None:
        """Release what can be released after the endpoint's event loop has been closed."""
        return


def check_same_layout(bound: Layout, welcome: Welcome) -> None:
    """Check that a sender has the layout that it had before.

    Raises:
        LayoutMismatchError: it has another layout.
        ProtocolError: the layout is malformed.
    """
    if welcome.layout is None and welcome.signature == bound.identity:
        return
    found = Layout.from_wire(welcome.layout)
    if found != bound:
        bound.check_receiver(found)
        raise LayoutMismatchError(unexpected=["ties or an order of entries that it did not have before"])
