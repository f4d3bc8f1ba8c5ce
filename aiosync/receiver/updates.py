"""An update on the worker's side, and the interface of an object that applies updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.errors import LayoutMismatchError
from aiosync.protocol.frames import Update, Welcome
from aiosync.receiver.joint_commit import give_up
from aiosync.transfer.base import InboundTransfer
from aiosync.transports._offload import Offloader
from aiosync.transports.base import FramedTransport
from aiosync.weights.binding import Staged
from aiosync.weights.devices import cuda_devices
from aiosync.weights.layout import Layout
from aiosync.weights.peft import check_presumed, differences
from aiosync.weights.target import WeightTarget, receiver_tensors

if TYPE_CHECKING:
    from aiosync.receiver.staging import StagingBuffers


class PendingUpdate(msgspec.Struct, eq=False):
    """An update that has arrived and is not committed yet."""

    update: Update
    # The tensors to commit; None: it is not staged yet.
    staged: Staged | None = None
    # The entries that were sent, aliases included; None: all.
    names: Collection[str] | None = None
    # The buffers that it was staged in.
    back_buffers: StagingBuffers | None = None
    # Phase (``stage``, ``wait``, ``commit``) -> seconds that it took.
    seconds: dict[str, float] = {}
    # The time of time.perf_counter() when its commit was first held up; None: it was not.
    held_up_since: float | None = None
    # Whether the sender may write over the memory that it arrived in, since it is staged in another.
    released: bool = False
    # Whether it is in service.
    committed: bool = False


class Overtaken(Exception):
    """A newer version arrived, or the receiver was closed, while a commit waited for readers."""


class Applier(ABC):
    """What a receiver does with updates: apply them to a model, or forward them to other workers.

    All methods are called on the receiver's event loop, in this order::

        follow(via)                  the sender has welcomed this worker
        open(welcome)                the sender's layout is known; the first time: bind(layout, device)
        check_base(model)            the first time: the model is what updates presume
        prepare(transport)           updates arrive over this connection
        for each update:
            may_fetch                whether the Fetch may be sent; if not
            make_room()              once a newer update was announced; before, if has_room
            inbound.expect(update)   its frame has arrived
            take_at_once(pending)    → whether it was applied synchronously; if not
            stage(pending)
            commit(pending, on_wait)
            settle()
            forget()                 instead, if the update will not be committed
        reserve()                    once, after the first update
        disconnected(), detach()     the connection is lost; the methods above are called again for another
        close()

    Attributes:
        model: the model that updates are applied to; None: there is none.
        worker: this worker's index; -1: the sender has not assigned one yet.
        version: the version in service, as the sender counts; -1 before its first.
        in_service: the same; but the number that the sender before had given to it, as long as there is none
            of this sender. It is what users see.
        weights: the tensors in service, name -> tensor.
        layout: the sender's layout; None before :meth:`open`.
        inbound: the transfer by which updates arrive; None before :meth:`prepare`.
        may_fetch: whether the next update may be fetched now.
        views_sender: whether the version in service lies in the sender's memory.
    """

    may_fetch = True
    views_sender = False
    model: WeightTarget | None = None

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.version = self.in_service = -1
        self.weights: Mapping[str, Tensor] = {}
        self.layout: Layout | None = None
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
        self.version = -1  # and not in_service: those weights still act

    def open(self, welcome: Welcome) -> None:
        """Get ready for updates of the sender's layout; after a reconnection, check that it is the same.

        Raises:
            LayoutMismatchError: model and layout do not fit, or the sender has another layout than before.
            ProtocolError: the layout is malformed, or this process does not have the device.
            UnsupportedTensorError: the model has a tensor that cannot be received into.
        """
        if self.layout is None:
            layout = Layout.from_wire(welcome.layout)
            self.bind(layout, welcome.device)
            self.layout = layout
        elif welcome.layout is not None or welcome.signature != self.layout.identity:
            found = Layout.from_wire(welcome.layout)
            if found != self.layout:
                if differing := differences(self.layout.base, found.base):
                    raise LayoutMismatchError(differing=differing)
                self.layout.check_receiver(found)
                changed = "ties or an order of entries that it did not have before"
                raise LayoutMismatchError(unexpected=[changed])

    @abstractmethod
    def bind(self, layout: Layout, device: str) -> None:
        """Get ready for updates of this layout, whose weights are on this device. Raises as :meth:`open`."""

    async def check_base(self, model: WeightTarget | None) -> None:
        """Check in a thread that ``model`` is what updates presume (:attr:`.Layout.base`). None: no check.

        Raises:
            LayoutMismatchError: it is not.
            UnsupportedTensorError: a part of it that updates do not contain has no values.
        """
        layout = self.layout
        if layout is None or not layout.base or model is None:
            return
        with closing(Offloader("aiosync-digest")) as offloader:
            base, names = layout.base, frozenset(layout.names)
            await offloader.settle(cuda_devices(receiver_tensors(model).values()))
            await offloader.run(lambda cancelled: check_presumed(base, model, names, cancelled))

    @abstractmethod
    async def prepare(self, transport: FramedTransport) -> None:
        """Get ready for updates over this connection."""

    async def reserve(self) -> None:
        """Allocate all memory that later updates need."""
        return

    def disconnected(self) -> None:
        """Called when the connection to the sender is lost."""
        return

    async def detach(self, deadline: Deadline) -> bool:
        """The connection is lost: stop using the sender's memory. Return whether that was done in time."""
        return True

    # -- one update ------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether :meth:`make_room` neither waits nor overwrites a version, so that it may be called before
        a newer update was announced."""
        return True

    async def make_room(self) -> None:
        """Wait until :attr:`may_fetch` is true, or the connection is lost."""
        return

    @property
    def have(self) -> int:
        """The version whose bytes, as they arrived, this process still has; -1 for none."""
        return self.version if self.inbound is not None and not self.inbound.access.lent else -1

    @property
    def needs_sender(self) -> bool:
        """Whether a staged update may be read again in the sender's memory."""
        return False

    def take_at_once(self, pending: PendingUpdate) -> bool:
        """Stage and commit synchronously if no step needs to await. Return whether that was done.

        May block for a millisecond where other threads use the model.

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

    def has_staged(self, pending: PendingUpdate) -> bool:
        """Whether an update is staged and can be committed."""
        return pending.staged is not None

    @abstractmethod
    async def commit(self, pending: PendingUpdate, on_wait: Callable[[], None]) -> None:
        """Put a staged update in service. Call ``on_wait`` if that has to wait for readers.

        Raises:
            Exception: what the model raises; the version before is in service, whole.
            Overtaken: :meth:`overtake` or :meth:`close` was called before.
            CancelledError: the commit was withdrawn, unless ``pending.committed`` says otherwise.
        """

    async def settle(self) -> None:
        """Wait until no forward pass that is queued on a device reads the version before the one in service.

        Called after each commit, before it is acknowledged: then the sender may write over that version.
        """
        return

    def forget(self) -> None:
        """The update that arrived last will not be committed."""
        if self.inbound is not None:
            self.inbound.forget()

    def overtake(self) -> None:
        """A newer version is there: cancel a commit that waits for readers or for other parts.

        The waiting commit would only keep the sender's memory in use.
        """
        return

    def abort(self, joint_id: str, worker: int) -> None:
        """The sender has called a joint update off: this worker commits none of its parts."""
        give_up(joint_id, worker, "the sender called it off")

    # -- the end ---------------------------------------------------------------------------------

    @property
    def memory(self) -> int:
        """Bytes that staging has allocated in this process."""
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Nothing is committed once this has begun."""

    def abandon_loop(self) -> None:
        """Release what can be released after the endpoint's event loop has been closed."""
        return
