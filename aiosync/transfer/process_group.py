"""Versions that a process group moves from the sender's rank to the workers' ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiosync.errors import ProtocolError, WorkerLostError
from aiosync.protocol.events import Fetched
from aiosync.protocol.frames import Update
from aiosync.transfer.base import OutboundTransfer, TransferConnection
from aiosync.transfer.broadcast import BroadcastGroup, send_by, tag_of
from aiosync.transfer.double_buffer import DoubleBuffer
from aiosync.transfer.mapped import MappedOutbound
from aiosync.transfer.slots import SlotVersion
from aiosync.transfer.stream_inbound import BaseLostError
from aiosync.transports._offload import call_when_done
from aiosync.transports.base import Transport
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.transports.torch_distributed.connection import RankedTransport
from aiosync.transports.torch_distributed.process_group import ProcessGroupMember
from aiosync.weights.layout import Layout

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = ["NearRankZero", "ProcessGroupInbound", "ProcessGroupOutbound"]

_MOST_RANKS = 1 << 16


class ProcessGroupOutbound(OutboundTransfer):
    """The sender's side: what it says over the connection is which process group the bytes come through.

    Args:
        transport: the worker's.
        group: whose versions.
        join: makes the sender's part of a process group of two, of a key.
        broadcast_group: sends what all workers get to all at once; None: to each by itself.
        inline: bytes up to which a version goes with the word of it: it takes longer to have threads meet.
    """

    maps = False

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

    def payload(self, published: SlotVersion, fetched: Fetched) -> dict[str, Any]:
        """Which process group it comes through; or the bytes themselves."""
        if self._inline:
            buffer = published.slot.segment.buffer[: self._group.pool.layout.nbytes]
            return {"bytes": buffer.numpy().tobytes()}
        if (
            self._broadcast_group is not None
            and self._connection is not None
            and self._broadcast_group.broadcasts(published)
        ):
            return self._broadcast_group.payload(self._connection.worker)
        return {"group": self._key, "rank": 1, "size": 2}

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        """Send the bytes."""
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
        """The worker is gone."""
        self._ranks.close()
        if self._broadcast_group is not None and self._connection is not None:
            self._broadcast_group.detach(self._connection)

    @property
    def progress(self) -> int:
        return self._ranks.moved

    @property
    def moved(self) -> Hashable:
        return self._ranks.moved


class NearRankZero(MappedOutbound):
    """The sender's side towards a worker that views its slots.

    Args:
        group: whose versions.
        broadcast_group: of the others.
    """

    def __init__(self, group: WorkerGroup, broadcast_group: BroadcastGroup | None) -> None:
        super().__init__(group, holds=True)
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
        match update.payload:
            case {"bytes": bytes(data)} if len(data) == self._layout.nbytes:
                self._take(update, data)
                return
            case {"group": str(key), "rank": int(rank), "size": int(size)} if 0 < rank < size <= _MOST_RANKS:
                ranks = self._member_of(key, rank, size)
            case _:
                raise ProtocolError(f"an update names no process group: {update.payload!r:.80}")
        buffer = self._next_buffer()
        # What came by way of another process group may still be being written there.
        before = [] if self._arriving is None else [self._arriving[1]]
        future = ranks.receive(buffer, tag_of(update.round), before)
        self._arriving = update, future

    def _next_buffer(self) -> Tensor:
        return self.take_slot().segment.buffer[: self._layout.nbytes]

    def _take(self, update: Update, data: bytes) -> None:
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
        if isinstance(error, WorkerLostError) and update.payload["size"] > 2:
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
