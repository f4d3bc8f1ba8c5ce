"""Versions that a process group moves from the sender's rank to the workers' ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from aiosync.errors import ProtocolError, WorkerLostError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.payloads import InlinePayload, ProcessGroupPayload, decode_either, encode
from aiosync.transfer.base import (
    InboundTransfer,
    MemoryAccess,
    OutboundTransfer,
    Streams,
    Transfer,
    TransferConnection,
)
from aiosync.transfer.broadcast import BroadcastGroup, send_by, tag_of
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.transfer.mapped import MappedInbound, MappedOutbound
from aiosync.transfer.slots import SlotVersion
from aiosync.transfer.stream_inbound import BaseLostError
from aiosync.transports._offload import call_when_done
from aiosync.transports.base import Listener, Transport
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.transports.torch_distributed.connection import RankedListener, RankedTransport
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember, device_of
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = [
    "Collective",
    "ProcessGroupInbound",
    "ProcessGroupOutbound",
    "ProcessGroupTransfer",
    "allocate_near",
]

Collective: TypeAlias = Literal["p2p", "broadcast"]


class ProcessGroupTransfer(Transfer):
    """Process groups of torch.distributed move the weights. Workers that can map the slots view them.

    Args:
        backend: the backend of the groups, "gloo" or "nccl".
        collective: "p2p": from the sender to each worker; "broadcast": to all workers of a group at once.
        timeout: seconds that an operation of a process group may take.
        listener: on the sender: where workers connect.
        inline: bytes up to which an update carries the weights itself: having threads meet takes longer.
    """

    streams: Streams = "plain"

    def __init__(
        self, backend: str, collective: Collective, timeout: float, listener: Listener | None, inline: int
    ) -> None:
        self._backend = backend
        self._collective = collective
        self._timeout = timeout
        self._listener = listener
        self._inline = inline if backend == "gloo" else 0  # slots of other backends are on a device
        self._broadcast_groups: dict[WorkerGroup, BroadcastGroup] = {}

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        return allocate_near(self._listener, nbytes, device_of(self._backend))

    def outbound(self, transport: Transport, group: WorkerGroup) -> OutboundTransfer:
        if self._collective == "broadcast" and group not in self._broadcast_groups:
            self._broadcast_groups[group] = BroadcastGroup(group, self._rank_zero)
        broadcast_group = self._broadcast_groups.get(group)
        if transport.maps:
            return _MappedBesideBroadcast(group, broadcast_group)
        assert isinstance(transport, TCPTransport)
        return ProcessGroupOutbound(transport, group, self._rank_zero, broadcast_group, self._inline)

    def inbound(self, layout: Layout, transport: Transport, source: torch.device) -> InboundTransfer:
        if transport.maps:
            return MappedInbound(layout, MemoryAccess.VIEWED)
        return ProcessGroupInbound(layout, device_of(self._backend), self._rank_of_worker)

    def _rank_zero(self, key: str, size: int = 2) -> ProcessGroupMember:
        listener = self._listener
        assert isinstance(listener, RankedListener)
        return ProcessGroupMember(self._backend, listener.connection, key, 0, size, timeout=self._timeout)

    def _rank_of_worker(
        self, transport: RankedTransport, key: str, rank: int, size: int
    ) -> ProcessGroupMember:
        return ProcessGroupMember(self._backend, transport.connection, key, rank, size, timeout=self._timeout)

    def renew(self) -> None:
        for broadcast_group in self._broadcast_groups.values():
            broadcast_group.renew()

    def close(self) -> None:
        self._broadcast_groups.clear()


def allocate_near(listener: Listener | None, nbytes: int, device: torch.device) -> Segment:
    """Memory for a slot: shared, if workers on this machine may view it, else private and on ``device``."""
    if isinstance(listener, RankedListener) and listener.place.near is not None:
        return Segment.shared(nbytes)
    return Segment.private(nbytes, device)


class ProcessGroupOutbound(OutboundTransfer):
    """The sender's side: an Update frame says which process group the bytes come through.

    Args:
        transport: the worker's connection.
        group: the worker's group.
        join: takes a key, and makes the sender's member of a process group of two.
        broadcast_group: sends to all workers at once; None: each worker is sent to by itself.
        inline: bytes up to which an update carries the weights itself.
    """

    def __init__(
        self,
        transport: TCPTransport,
        group: WorkerGroup,
        join: Callable[[str], ProcessGroupMember],
        broadcast_group: BroadcastGroup | None,
        inline: int,
    ) -> None:
        self._transport = transport
        self._group = group
        self._key = secrets.token_hex(8)
        self._ranks = join(self._key)
        self._broadcast_group = broadcast_group
        self._inline = broadcast_group is None and group.pool.layout.nbytes <= inline
        self._connection: TransferConnection | None = None

    def attach(self, connection: TransferConnection) -> None:
        self._connection = connection
        if self._broadcast_group is not None:
            self._broadcast_group.attach(connection)

    def can_start(self, published: SlotVersion) -> bool:
        return self._broadcast_group is None or self._broadcast_group.can_start(published)

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        if self._inline:
            buffer = published.slot.segment.buffer[: self._group.pool.layout.nbytes]
            return encode(InlinePayload(buffer.numpy().tobytes()))
        if (
            self._broadcast_group is not None
            and self._connection is not None
            and self._broadcast_group.broadcasts(published)
        ):
            return encode(self._broadcast_group.payload(self._connection.worker))
        return encode(ProcessGroupPayload(self._key, rank=1, size=2))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        if self._inline:
            on_sent()
            return
        if self._broadcast_group is not None and self._broadcast_group.broadcasts(published):
            self._broadcast_group.start(published, on_sent)
            return

        def ended(error: BaseException | None) -> None:
            if error is None:
                on_sent()
            else:
                self._transport.give_up(error.reason if isinstance(error, WorkerLostError) else str(error))

        send_by(self._ranks, self._group, published, ended)

    def detach(self) -> None:
        self._ranks.close()
        if self._broadcast_group is not None and self._connection is not None:
            self._broadcast_group.detach(self._connection)

    @property
    def progress(self) -> int:
        return self._ranks.moved

    @property
    def moved(self) -> Hashable:
        return self._ranks.moved


class _MappedBesideBroadcast(MappedOutbound):
    """The sender's side towards a worker that views the slots, so that a broadcast need not wait for it.

    Args:
        group: the worker's group.
        broadcast_group: the broadcast to the other workers.
    """

    def __init__(self, group: WorkerGroup, broadcast_group: BroadcastGroup | None) -> None:
        super().__init__(group, MemoryAccess.VIEWED)
        self._broadcast_group = broadcast_group

    def attach(self, connection: TransferConnection) -> None:
        if self._broadcast_group is not None:
            self._broadcast_group.excuse(connection.worker)


class ProcessGroupInbound(DoubleBuffer):
    """The worker's side.

    Args:
        layout: what a slot holds.
        device: where slots have to be.
        join: makes this worker's part of a process group, of the connection, a key, a rank and a size.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        join: Callable[[RankedTransport, str, int, int], ProcessGroupMember],
    ) -> None:
        super().__init__(layout, device)
        self._join = join
        self._transport: RankedTransport | None = None
        self._groups: dict[int, tuple[str, ProcessGroupMember]] = {}
        self._arriving: tuple[Update, Future[None]] | None = None

    def attach(self, transport: Transport) -> None:
        assert isinstance(transport, RankedTransport)
        self._drop()
        self._transport = transport

    def expect(self, update: Update) -> None:
        """Receive it at once: the sender is sending it, and what follows comes behind it."""
        payload = decode_either(update.payload, ProcessGroupPayload, InlinePayload)
        if isinstance(payload, InlinePayload):
            if len(payload.data) != self._layout.nbytes:
                raise ProtocolError(
                    f"an update carries {len(payload.data)} bytes, the layout needs {self._layout.nbytes}"
                )
            self._put(update, payload.data)
            return
        if payload.rank >= payload.size:
            raise ProtocolError(f"an update names rank {payload.rank} of {payload.size}")
        ranks = self._member_of(payload.group, payload.rank, payload.size)
        buffer = self._next_buffer()
        # What came by way of another process group may still be being written there.
        before = [] if self._arriving is None else [self._arriving[1]]
        future = ranks.receive(buffer, tag_of(update.round), before)
        self._arriving = update, future

    def _next_buffer(self) -> Tensor:
        return self.take_slot().segment.buffer[: self._layout.nbytes]

    def _put(self, update: Update, data: bytes) -> None:
        buffer, here = self._next_buffer(), Future[None]()

        def put(_: object = None) -> None:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            here.set_result(None)

        if self._arriving is None or self._arriving[1].done():
            put()
        else:  # what an earlier connection brings may still be being written there
            self._arriving[1].add_done_callback(put)
        self._arriving = update, here

    def _member_of(self, key: str, rank: int, size: int) -> ProcessGroupMember:
        kind = min(size, 3)  # a group of two, and a broadcast's
        if kind in self._groups and self._groups[kind][0] != key:
            self._groups.pop(kind)[1].close()
        if kind not in self._groups:
            assert self._transport is not None
            self._groups[kind] = key, self._join(self._transport, key, rank, size)
        return self._groups[kind][1]

    def is_here(self, update: Update) -> bool:
        return self._arriving is not None and self._arriving[0] is update and self._arriving[1].done()

    async def arrive(self, update: Update) -> None:
        """Wait for it.

        Raises:
            WorkerLostError: the group has broken; the connection is given up too.
        """
        assert self._arriving is not None and self._arriving[0] is update
        future, ended = self._arriving[1], asyncio.Event()
        call_when_done(future, lambda _: ended.set())
        await ended.wait()
        self._check(update, future)

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._arriving is not None
        self._check(*self._arriving)
        return super().find(update)

    def _check(self, update: Update, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, WorkerLostError) and update.payload.get("size", 2) > 2:
            # It is one of the others that is gone, more likely than the sender.
            raise BaseLostError(error.reason)
        if isinstance(error, WorkerLostError) and self._transport is not None:
            self._transport.give_up(error.reason)
        if error is not None:
            raise error

    def _drop(self) -> None:
        groups, self._groups = self._groups, {}
        for _, ranks in groups.values():
            ranks.close()

    def close(self) -> None:
        self._drop()
        super().close()
