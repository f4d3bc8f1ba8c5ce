"""Versions that a process group of torch.distributed moves from the sender's rank to the workers' ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
import torch

from aiosync.errors import ProtocolError, WorkerLostError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.framing import decode_either, encode_payload
from aiosync.transfer.base import InboundTransfer, MemoryAccess, OutboundTransfer, Transfer
from aiosync.transfer.broadcast import BroadcastGroup, ProcessGroupPayload, send_by, tag_of
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.transfer.mapped import MappedInbound, MappedOutbound
from aiosync.transfer.slots import SlotVersion
from aiosync.transfer.stream import BaseLostError
from aiosync.transports._offload import call_when_done
from aiosync.transports.base import FramedTransport, Listener
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember, device_of
from aiosync.transports.torch_distributed.transport import (
    TorchDistributedListener,
    TorchDistributedTransport,
)
from aiosync.weights.arena import Slot
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup
    from aiosync.transfer.base import TransferConnection

T = TypeVar("T")

Collective: TypeAlias = Literal["p2p", "broadcast"]


class InlinePayload(msgspec.Struct, frozen=True, rename={"data": "bytes"}):
    """What an Update frame says of a version that it carries itself."""

    data: bytes


@dataclass(eq=False, repr=False)
class ProcessGroupTransfer(Transfer):
    """Process groups move the weights. Workers that can map the slots view them instead."""

    backend: str  # "gloo" or "nccl"
    collective: Collective  # "p2p": to each worker; "broadcast": to all workers of a group at once
    timeout: float  # seconds that an operation of a process group may take
    listener: Listener | None  # on the sender: where workers connect
    inline: int  # bytes up to which an Update frame has the weights: starting a transfer takes longer
    _broadcasts: dict[WorkerGroup, BroadcastGroup] = field(default_factory=dict, init=False)

    streams = "plain"

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        return allocate_near(self.listener, nbytes, device_of(self.backend))

    def outbound(self, transport: FramedTransport, group: WorkerGroup) -> OutboundTransfer:
        if self.collective == "broadcast" and group not in self._broadcasts:
            self._broadcasts[group] = BroadcastGroup(group, self._join)
        broadcast = self._broadcasts.get(group)
        if transport.maps and broadcast is not None:
            return _MappedBesideBroadcast(group, broadcast)
        if transport.maps:
            return MappedOutbound(group, MemoryAccess.VIEWED)
        assert isinstance(transport, TCPConnection)
        # Slots of other backends than gloo are on a device.
        if broadcast is None and self.backend == "gloo" and group.pool.layout.nbytes <= self.inline:
            return InlineOutbound(group)
        key = secrets.token_hex(8)
        if broadcast is None:
            return ProcessGroupOutbound(transport, group, key, self._join(key))
        return BroadcastOutbound(transport, group, key, self._join(key), broadcast)

    def inbound(self, layout: Layout, transport: FramedTransport, source: torch.device) -> InboundTransfer:
        if transport.maps:
            return MappedInbound(layout, MemoryAccess.VIEWED)
        return ProcessGroupInbound(layout, self.backend, self.timeout)

    def _join(self, key: str, size: int = 2) -> ProcessGroupMember:
        """Make the sender's member of a process group."""
        assert isinstance(self.listener, TorchDistributedListener)
        return ProcessGroupMember(self.backend, self.listener.connection, key, 0, size, timeout=self.timeout)

    def renew(self) -> None:
        for broadcast in self._broadcasts.values():
            broadcast.renew()

    def close(self) -> None:
        self._broadcasts.clear()


def allocate_near(listener: Listener | None, nbytes: int, device: torch.device) -> Segment:
    """Memory for a slot: shared, if workers on this machine may view it, else private and on ``device``."""
    if isinstance(listener, TorchDistributedListener) and listener.address.local is not None:
        return Segment.shared(nbytes)
    return Segment.private(nbytes, device)


@dataclass(eq=False, repr=False)
class InlineOutbound(OutboundTransfer):
    """The sender's side for small weights: an Update frame has them."""

    group: WorkerGroup

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        buffer = published.slot.segment.buffer[: self.group.pool.layout.nbytes]
        return encode_payload(InlinePayload(buffer.numpy().tobytes()))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        on_sent()


@dataclass(eq=False, repr=False)
class ProcessGroupOutbound(OutboundTransfer):
    """The sender's side: an Update frame names the process group that the bytes come through."""

    transport: TCPConnection
    group: WorkerGroup
    key: str  # names the process group that has only the sender and this worker
    member: ProcessGroupMember  # the sender's member of it

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        return encode_payload(ProcessGroupPayload(self.key, rank=1, size=2))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        def ended(error: BaseException | None) -> None:
            if error is None:
                on_sent()
            else:
                self.transport.give_up(error.reason if isinstance(error, WorkerLostError) else str(error))

        send_by(self.member, self.group, published, ended)

    def detach(self) -> None:
        if not self.group.stopped:  # a worker of a sender that closes still gets the last version
            self.member.interrupt()
        self.member.close()

    @property
    def progress(self) -> int:
        return self.member.moved

    moved = progress


@dataclass(eq=False, repr=False)
class BroadcastOutbound(ProcessGroupOutbound):
    """The sender's side where a version may be broadcast. Other versions are sent to this worker alone."""

    broadcast: BroadcastGroup
    _connection: TransferConnection = field(init=False)

    @property
    def moved(self) -> int:
        return self.member.moved + self.broadcast.moved

    def attach(self, connection: TransferConnection) -> None:
        self._connection = connection
        self.broadcast.attach(connection)

    def can_start(self, published: SlotVersion) -> bool:
        return self.broadcast.can_start(self._connection, published)

    def answered(self) -> None:
        self.broadcast.answered(self._connection)

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        if self.broadcast.broadcasts(published):
            return encode_payload(self.broadcast.payload(self._connection.worker))
        return super().payload(published, fetched)

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        if self.broadcast.broadcasts(published):
            self.broadcast.start(published)
        else:
            super().start(published, on_sent)

    def detach(self) -> None:
        super().detach()
        self.broadcast.detach(self._connection)


class _MappedBesideBroadcast(MappedOutbound):
    """The sender's side towards a worker that views the slots: the broadcast does not wait for it."""

    def __init__(self, group: WorkerGroup, broadcast: BroadcastGroup) -> None:
        super().__init__(group, MemoryAccess.VIEWED)
        self._broadcast = broadcast

    def attach(self, connection: TransferConnection) -> None:
        super().attach(connection)
        self._broadcast.exclude(connection.worker)


def completed(result: T) -> Future[T]:
    """A future that has this result."""
    future = Future[T]()
    future.set_result(result)
    return future


class BackgroundInbound(InboundTransfer):
    """The worker's side where a thread receives the bytes of an update."""

    # The update that arrived last, and the future of its bytes. The thread may be held for long after the
    # future has an error.
    _arriving: tuple[Update, Future[Any]] | None = None

    def follow(self, update: Update, work: Future[T]) -> None:
        """``update`` is here once ``work`` is done, unless :meth:`interrupted` is called before."""
        outcome = Future[T]()

        def ended(work: Future[T]) -> None:
            error = work.exception()
            with suppress(InvalidStateError):
                if error is None:
                    outcome.set_result(work.result())
                else:
                    outcome.set_exception(error)

        work.add_done_callback(ended)
        self._arriving = update, outcome

    def is_here(self, update: Update) -> bool:
        if self._arriving is None or self._arriving[0] is not update:
            return False
        arriving = self._arriving[1]
        return arriving.done() and arriving.exception() is None

    def interrupted(self, reason: str) -> None:
        if self._arriving is not None:
            with suppress(InvalidStateError):  # the bytes are here, or the thread has noticed it by itself
                self._arriving[1].set_exception(BaseLostError(reason))

    async def arrive(self, update: Update) -> None:
        assert self._arriving is not None and self._arriving[0] is update
        ended = asyncio.Event()
        call_when_done(self._arriving[1], lambda _: ended.set())
        await ended.wait()


@dataclass(eq=False, repr=False)
class _Arrival:
    """An update's bytes on their way into a slot."""

    member: ProcessGroupMember  # whose thread writes the slot
    slot: Slot
    work: Future[None]  # done once the thread does not write the slot any more


class ProcessGroupInbound(BackgroundInbound, DoubleBuffer):
    """The worker's side. ``timeout``: seconds that an operation of a process group may take.

    gloo cannot be interrupted. If a process group breaks while a slot is being written, its thread may keep
    the slot until the timeout. The next update arrives in another slot then, from another process group.
    """

    def __init__(self, layout: Layout, backend: str, timeout: float) -> None:
        super().__init__(layout, device_of(backend))
        self._backend = backend
        self._timeout = timeout
        self._transport: TorchDistributedTransport | None = None
        # Whether the process group is for broadcasts -> its key, and this worker's member of it.
        self._members: dict[bool, tuple[str, ProcessGroupMember]] = {}
        # The bytes that were expected last from a process group.
        self._arrival: _Arrival | None = None

    def attach(self, transport: FramedTransport) -> None:
        assert isinstance(transport, TorchDistributedTransport)
        self._leave_groups()
        self._transport = transport

    def expect(self, update: Update) -> None:
        """Start to receive the bytes: the sender is sending them."""
        payload = decode_either(update, ProcessGroupPayload, InlinePayload)
        if isinstance(payload, InlinePayload):
            if len(payload.data) != self._layout.nbytes:
                raise ProtocolError(
                    f"an update carries {len(payload.data)} bytes, the layout needs {self._layout.nbytes}"
                )
            self._copy_inline(update, payload.data)
            return
        if payload.rank >= payload.size:
            raise ProtocolError(f"an update names rank {payload.rank} of {payload.size}")
        member = self._member_of(payload)
        slot = self._take_slot_for(member)
        work = member.receive(self.bytes_of(slot), tag_of(update.round))
        self._arrival = _Arrival(member, slot, work)
        self.follow(update, work)

    def interrupted(self, reason: str) -> None:
        super().interrupted(reason)
        if self._arrival is not None and not self._arrival.work.done():
            self._arrival.member.interrupt()

    def _copy_inline(self, update: Update, data: bytes) -> None:
        self.bytes_of(self._take_slot_for(None)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.follow(update, completed(None))

    def _take_slot_for(self, member: ProcessGroupMember | None) -> Slot:
        """The slot for the next update, which no other thread than the member's writes."""
        arrival = self._arrival
        if arrival is not None and arrival.member is not member and not arrival.work.done():
            self._arrival = None
            self.replace(arrival.slot)
        return self.take_slot()

    def _member_of(self, payload: ProcessGroupPayload) -> ProcessGroupMember:
        """This worker's member of the process group; joins the group if it is new."""
        kind, key, rank, size = payload.size > 2, payload.group, payload.rank, payload.size
        if kind in self._members and self._members[kind][0] != key:
            self._members.pop(kind)[1].close()
        if kind not in self._members:
            assert self._transport is not None
            store = self._transport.connection
            member = ProcessGroupMember(self._backend, store, key, rank, size, timeout=self._timeout)
            self._members[kind] = key, member
        return self._members[kind][1]

    async def arrive(self, update: Update) -> None:
        """Wait for the bytes. Raises WorkerLostError, or BaseLostError, if the process group broke."""
        await super().arrive(update)
        self._raise_failure()

    def _raise_failure(self) -> None:
        assert self._arriving is not None
        update, future = self._arriving
        error = future.exception()
        if isinstance(error, WorkerLostError):
            if update.payload.get("size", 2) > 2:
                # Another worker of the broadcast was lost, more likely than the sender.
                raise BaseLostError(error.reason)
            assert self._transport is not None
            self._transport.give_up(error.reason)
        if error is not None:
            raise error

    def _leave_groups(self) -> None:
        members, self._members = self._members, {}
        for _, member in members.values():
            member.stop_joining()
            member.close()

    def close(self) -> None:
        self._leave_groups()
        super().close()
