"""Transfers: how a version's bytes get from the sender to one worker, both sides of it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from aiosync.protocol.frames import Fetch, Update
from aiosync.transfer.slots import SlotVersion
from aiosync.transfer.yield_request import NO_REQUEST
from aiosync.transports.base import FramedTransport
from aiosync.weights.arena import Slot
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

Streams: TypeAlias = Literal["", "plain", "checked"]
"""Whether versions are sent block after block, while the last are still being copied; and with checksums."""


class MemoryAccess(enum.Enum):
    """How a worker uses the memory that a version lies in when it has arrived."""

    PRIVATE = "private"
    """The memory is the worker's own."""
    IMMUTABLE = "immutable"
    """The worker's model views memory that is never written again."""
    CHECKED = "checked"
    """The worker copies from the sender's slot and finds out by checksums if the slot is overwritten."""
    READ_ONCE = "read once"
    """The worker copies from the sender's slot until it has answered."""
    VIEWED = "viewed"
    """The worker's model views the sender's slot until a later version is in service."""

    def __init__(self, kind: str) -> None:
        # Plain attributes, because they are read for each update.
        self.lent = kind in ("read once", "viewed")
        self.viewable = kind in ("immutable", "viewed")

    lent: bool
    """Whether the sender will write into the memory again and must wait for the worker with that."""
    viewable: bool
    """Whether a model may view the memory although it is not the worker's own."""


class Transfer(ABC):
    """One way to move versions. It makes both sides, and lives as long as the endpoint that it is made for.

    A subclass must implement :meth:`outbound` and :meth:`inbound`.
    """

    # Whether versions are sent block after block, and with checksums.
    streams: Streams = ""

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        """On the sender: memory for a slot. Blocking; called in a thread.

        Args:
            nbytes: its size, in bytes.
            device: the device of the group's copy of the weights.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        return Segment.shared(nbytes, device)

    @abstractmethod
    def outbound(self, transport: FramedTransport, group: WorkerGroup) -> OutboundTransfer:
        """The sender's side towards a worker of ``group`` that has connected by ``transport``."""

    @abstractmethod
    def inbound(self, layout: Layout, transport: FramedTransport, source: torch.device) -> InboundTransfer:
        """The worker's side.

        Args:
            layout: what a version holds.
            transport: the connection to the sender.
            source: the device of the sender's weights.
        """

    def renew(self) -> None:
        """On the sender: all workers are connected again."""

    def close(self) -> None:
        """On the sender, which has closed: release what the transfers share."""


class TransferConnection(Protocol):
    """A worker's connection, as far as a transfer uses it."""

    worker: int
    pid: int  # its process; 0 if unknown
    notified: SlotVersion | None  # the version that the worker was notified of and has not fetched
    staged: bool  # whether the worker has all bytes of its last update, and waits to commit it

    @property
    def ready(self) -> bool:
        """Whether the worker has sent a Fetch, and ``notified`` can be offered."""

    def offer_next(self) -> None:
        """Send the worker the version that it waits for, if that can be sent now."""

    def interrupt(self, round_: int) -> None:
        """Tell the worker that the bytes of this round's update will not arrive, if it has not answered."""


class OutboundTransfer(ABC):
    """The sender's side of the transfer to one worker.

    All methods are called on the sender's event loop, in this order::

        accept_codecs(codecs)        the worker's Hello has named the encodings that it can decode
        attach(connection)           the worker is admitted
        for each version:
            can_start(version)       it has sent a Fetch. False: ask again when that may have changed
            substitute(version)         → the version to send; an older one if that is ready sooner
            payload(version, fetch)  → what the Update frame says of this transfer
            base_slot()              → a second slot that is read while the version is sent, or None
            start(version, on_sent)  the Update frame has been written, or is kept for this: move the bytes
            cancel()                 only if the slot is needed for another version: stop
            answered()               the worker acknowledged or refused the version, or gave it back
        detach()                     the worker is gone

    A subclass must implement :meth:`payload`. The other methods do nothing by default.
    """

    # How the worker uses the slot of the version in flight.
    access = MemoryAccess.PRIVATE
    # Whether there is more to do for an update than to send its frame. If not, only attach, can_start,
    # payload, cancel and detach are called.
    carries = True
    # Whether start() sends the Update frame too, together with the version's bytes.
    sends_update = False

    @abstractmethod
    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        """What the Update frame says of this transfer, as msgpack can carry it.

        Args:
            published: the version to send.
            fetched: the worker's last Fetch.
        """

    def attach(self, connection: TransferConnection) -> None:
        """Called once, with the worker's connection."""

    def can_start(self, published: SlotVersion) -> bool:
        """Whether the version can be sent now. If not, this is asked again when that may have changed."""
        return True

    def substitute(self, notified: SlotVersion) -> SlotVersion:
        """The version to send now: ``notified``, or an older one if ``notified`` can never be sent."""
        return notified

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        """Move the bytes: the Update frame has been written.

        Args:
            published: the version.
            on_sent: called on the event loop once the slot is not read any more.
        """

    def accept_codecs(self, codecs: Sequence[str]) -> None:
        """Note the encodings that the worker can decode."""

    def base_slot(self) -> Slot | None:
        """A second slot that is read while the version is being sent; None: there is none."""
        return None

    def cancel(self) -> bool:
        """Stop reading the slot at once. Return whether that took the update back from the worker."""
        return False

    def answered(self) -> None:
        """The worker acknowledged or refused its last update."""

    def detach(self) -> None:
        """The worker is gone."""

    @property
    def progress(self) -> int:
        """Bytes that the kernel has taken from the connection, if that carries the weights; else 0."""
        return 0

    @property
    def moved(self) -> Hashable:
        """A value that changes as long as bytes move."""
        return None


class InboundTransfer(ABC):
    """The worker's side of a transfer.

    Methods are called on the receiver's event loop, in this order; those marked (thread) may block and may be
    called in a thread::

        prepare()                (thread) allocate what the first update needs
        attach(transport)        updates arrive over this connection; again after a reconnection
        reserve()                (thread) allocate what later updates need
        for each update:
            expect(update)       its frame has arrived
            is_here(update)      → whether find() needs no arrive() before
            arrive(update)       wait for its bytes
            interrupted(reason)  the rest of its bytes will not come
            is_quick(update)     → whether find() may be called on the event loop
            find(update)         (thread) → its buffer and tensors
            make_room(names)     (thread) only for a partial update: have memory for the next one
            committed(names)     it is in service; or
            forget()             it will not be committed
        close()                  release everything

    A subclass must implement :meth:`is_here`, :meth:`is_quick`, :meth:`find` and :meth:`close`.
    """

    # How this worker uses the memory that find() returns.
    access = MemoryAccess.PRIVATE
    # Where that memory is; None: on the sender's device.
    device: torch.device | None = None
    # What the sender asks of a worker on its machine, once the first update over a connection was found.
    yield_request = NO_REQUEST

    @property
    def nbytes(self) -> int:
        """Bytes that this object has allocated in this process."""
        return 0

    def prepare(self) -> None:
        """Allocate what the first update needs. Blocking."""

    def attach(self, transport: FramedTransport) -> None:
        """Updates arrive over this connection from now on."""

    def expect(self, update: Update) -> None:
        """Note an update that has arrived, also if it will not be applied.

        Raises:
            ProtocolError: a field is missing in the frame, or has a wrong value.
        """

    @abstractmethod
    def is_here(self, update: Update) -> bool:
        """Whether :meth:`find` can be called without :meth:`arrive`."""

    async def arrive(self, update: Update) -> None:
        """Wait until the bytes have arrived. If cancelled, the transfer goes on and can be awaited again.

        Raises:
            WorkerLostError: the connection was lost before.
        """

    def interrupted(self, reason: str) -> None:
        """The rest of the bytes of the update that arrives will not come: let :meth:`arrive` raise."""

    @property
    def can_read_sender(self) -> bool:
        """Whether this process can read blocks of an update in the sender's memory."""
        return False

    def reserve(self) -> None:
        """Allocate what all later updates need. Blocking."""

    @abstractmethod
    def is_quick(self, update: Update) -> bool:
        """Whether :meth:`find` returns at once, so that it needs no thread."""

    @abstractmethod
    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        """The buffer of an update that has arrived, and every name's view of it. Blocking.

        Raises:
            ProtocolError: the update does not name its place, cannot be mapped, or arrived damaged.
        """

    def forget(self) -> None:
        """The update that arrived last will not be committed."""

    def is_lent(self, address: int) -> bool:
        """Whether later updates will be written into the memory at this address."""
        return False

    written: Callable[[Collection[str]], Collection[str]] | None = None

    def make_room(self, names: Collection[str]) -> Collection[str]:
        """Allocate memory for the update after a partial one, which was found last. Blocking.

        Args:
            names: the entries of the partial update.

        Returns:
            Other entries, whose tensors must get their own memory when it is committed: then the slots that
            they view can be used again.
        """
        return ()

    def committed(self, names: Collection[str] | None) -> None:
        """The update found last is in service now, for these entries; None: for all."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Tensors in service stay valid."""
