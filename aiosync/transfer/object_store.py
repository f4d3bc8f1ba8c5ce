"""Versions that lie in Ray's object store; :mod:`aiosync.transports.ray.object_store` puts them there."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.payloads import InlinePayload, ObjectPayload, decode_either, encode
from aiosync.transfer.base import (
    InboundTransfer,
    MemoryAccess,
    OutboundTransfer,
    Transfer,
    TransferConnection,
)
from aiosync.transfer.mapped import MappedInbound, MappedOutbound
from aiosync.transfer.process_group import allocate_near
from aiosync.transfer.slots import SlotVersion
from aiosync.transports._offload import DetachedThread, call_when_done
from aiosync.transports.base import Listener, Transport
from aiosync.transports.ray.object_store import fetch, notify_keeper, put, warn_if_tight
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = ["ObjectStoreInbound", "ObjectStoreOutbound", "ObjectStorePublisher", "ObjectStoreTransfer"]


class ObjectStoreTransfer(Transfer):
    """Ray's object store holds the versions. Workers that can map the slots view them instead.

    Args:
        keeper: the actor that keeps the references; None: this process has none yet.
        tensor_transport: how Ray moves objects.
        listener: on the sender: where workers connect.
        inline: bytes up to which an update carries the weights itself: putting an object takes longer.
    """

    def __init__(self, keeper: Any, tensor_transport: str, listener: Listener | None, inline: int) -> None:
        self._keeper = keeper
        self._tensor_transport = tensor_transport
        self._listener = listener
        self._inline = inline
        self._publishers: dict[WorkerGroup, ObjectStorePublisher] = {}

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        return allocate_near(self._listener, nbytes, torch.device("cpu"))

    def outbound(self, transport: Transport, group: WorkerGroup) -> OutboundTransfer:
        if transport.maps:
            return MappedOutbound(group, MemoryAccess.VIEWED)
        assert isinstance(transport, TCPTransport)
        if group not in self._publishers:
            self._publishers[group] = ObjectStorePublisher(group, self._keeper, self._tensor_transport)
        return ObjectStoreOutbound(transport, self._publishers[group], self._inline)

    def inbound(self, layout: Layout, transport: Transport, source: torch.device) -> InboundTransfer:
        if transport.maps:
            return MappedInbound(layout, MemoryAccess.VIEWED)
        return ObjectStoreInbound(layout, self._keeper)

    def close(self) -> None:
        publishers, self._publishers = self._publishers, {}
        for publisher in publishers.values():
            publisher.close()


class ObjectStorePublisher:
    """Puts a group's newest version into the object store, and keeps older ones that a worker still reads.

    At most one older version per worker is kept.

    Args:
        group: the group.
        keeper: the actor that keeps the references.
        tensor_transport: how Ray moves objects.

    Attributes:
        name: the name by which the keeper keeps the references.
        number: the number of the newest object; -1: the newest version is not there.
    """

    def __init__(self, group: WorkerGroup, keeper: Any, tensor_transport: str) -> None:
        self.name = secrets.token_hex(8)
        self._group = group
        self._keeper = keeper
        self._tensor_transport = tensor_transport
        self._thread = DetachedThread("aiosync-ray")
        self.number = -1
        self._puts = 0
        self._round = -1
        self._storing = False
        self._closed = False
        self._last: SlotVersion | None = None
        self._served: set[ObjectStoreOutbound] = set()
        self._waiting: set[ObjectStoreOutbound] = set()
        self._readers: dict[ObjectStoreOutbound, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self._group.pool.layout.nbytes

    def offers(self, published: SlotVersion, reader: ObjectStoreOutbound) -> bool:
        """Whether a version is there for a reader. If it is, the reader begins at once.

        If not, it is put, and the reader is offered it again when it is there. Only one version is put at a
        time, so that this leases no more than one slot: a put cannot be cancelled.
        """
        if self._storing:
            self._waiting.add(reader)
            return False
        if (self.number >= 0 and self._round == published.round) or self.substitute(
            published, reader
        ) is not published:
            return True
        if published.copying is None or published.copying.whole:
            self._waiting.add(reader)
            self._store(published)
        return False

    def substitute(self, due: SlotVersion, reader: ObjectStoreOutbound) -> SlotVersion:
        """The version that a reader gets: the one that it has waited for, although there is a newer one.

        Otherwise a sender that publishes faster than objects are put would never get a version across.
        """
        waited = self._last if reader in self._served else None
        return due if waited is None or due.joint is not None or waited.joint is not None else waited

    def _store(self, published: SlotVersion) -> None:
        slot = published.slot
        buffer, number = slot.segment.buffer[: self.nbytes], self._puts
        self._puts += 1
        self._storing = True

        def store() -> None:
            if number == 0:
                warn_if_tight(self.nbytes)
            # A worker that asks for the object waits at the keeper until this call has arrived there.
            self._keeper.keep.remote(self.name, number, [put(buffer, self._tensor_transport)])

        def stored(future: Future[Any]) -> None:
            self._storing = False
            if self._closed:
                return
            error = future.exception()
            before, self.number = self.number, number if error is None else -1
            self._round = published.round
            self._drop_if_unread(before)
            self._served, self._waiting = self._waiting, set()
            self._last = published if error is None else None
            for reader in list(self._served):
                reader.stored(error)
            self._served, self._last = set(), None
            self._drop_if_unread(number)

        self._group.pool.keep_until(self._thread.submit(store), slot, stored)

    def reads(self, reader: ObjectStoreOutbound) -> None:
        """The reader has been sent the newest version."""
        self._readers[reader] = self.number

    def done(self, reader: ObjectStoreOutbound) -> None:
        """The reader needs its version no more. The last reader's object is dropped."""
        self._waiting.discard(reader)
        self._drop_if_unread(self._readers.pop(reader, -1))

    def _drop_if_unread(self, number: int) -> None:
        if number >= 0 and number not in self._readers.values():
            notify_keeper(self._keeper, "drop", self.name, number)
            if number == self.number:
                self.number = -1

    def close(self) -> None:
        """Drop all objects, also the one that is being put."""
        self._closed = True
        self._waiting.clear()
        self._readers.clear()
        self.number = -1
        self._thread.submit(lambda: notify_keeper(self._keeper, "forget", self.name))
        self._thread.close()


class ObjectStoreOutbound(OutboundTransfer):
    """The sender's side: a worker is sent a version once the object store has it.

    Args:
        transport: the worker's connection.
        publisher: puts the versions of the worker's group.
        inline: bytes up to which an update carries the weights itself.
    """

    def __init__(self, transport: TCPTransport, publisher: ObjectStorePublisher, inline: int) -> None:
        self._transport = transport
        self._publisher = publisher
        self._inline = publisher.nbytes <= inline
        self._connection: TransferConnection | None = None

    def attach(self, connection: TransferConnection) -> None:
        self._connection = connection

    def can_start(self, published: SlotVersion) -> bool:
        """Whether the version is in the store. If not, it will be put there."""
        return self._inline or self._publisher.offers(published, self)

    def substitute(self, due: SlotVersion) -> SlotVersion:
        return due if self._inline else self._publisher.substitute(due, self)

    def stored(self, error: BaseException | None) -> None:
        """Called when a version was put that this worker waits for, or when that failed."""
        if self._connection is None:
            return
        if error is None:
            self._connection.offer_next()
        else:
            self._transport.give_up(f"Ray's object store did not take a version: {error}")

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        if self._inline:
            buffer = published.slot.segment.buffer[: self._publisher.nbytes]
            return encode(InlinePayload(buffer.numpy().tobytes()))
        return encode(ObjectPayload(self._publisher.name, self._publisher.number))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        if not self._inline:
            self._publisher.reads(self)
        on_sent()

    def answered(self) -> None:
        self._publisher.done(self)

    def detach(self) -> None:
        self._connection = None
        self._publisher.done(self)


class ObjectStoreInbound(InboundTransfer):
    """The worker's side. An object is never written again, so that parameters may view it.

    Args:
        layout: what an object holds.
        keeper: the actor that keeps the references.
    """

    access = MemoryAccess.IMMUTABLE

    def __init__(self, layout: Layout, keeper: Any) -> None:
        self._layout = layout
        self._keeper = keeper
        self._thread = DetachedThread("aiosync-ray")
        self._transport: Transport | None = None
        self._arriving: tuple[Update, Future[Tensor]] | None = None
        # Where the last objects lie: (first address, bytes).
        self._places: deque[tuple[int, int]] = deque(maxlen=64)

    def attach(self, transport: Transport) -> None:
        self._transport = transport

    def expect(self, update: Update) -> None:
        """Begin to get the object: it is here, or on its way from another node."""
        payload = decode_either(update.payload, ObjectPayload, InlinePayload)
        if isinstance(payload, InlinePayload):
            future = Future[Tensor]()
            future.set_result(torch.frombuffer(bytearray(payload.data), dtype=torch.uint8))
        else:
            future = self._thread.submit(lambda: fetch(self._keeper, payload.object, payload.number))
        self._arriving = update, future

    def is_here(self, update: Update) -> bool:
        return self._arriving is not None and self._arriving[0] is update and self._arriving[1].done()

    async def arrive(self, update: Update) -> None:
        assert self._arriving is not None and self._arriving[0] is update
        ended = asyncio.Event()
        call_when_done(self._arriving[1], lambda _: ended.set())
        await ended.wait()

    def is_quick(self, update: Update) -> bool:
        return True

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._arriving is not None
        buffer = self._arriving[1].result()
        if buffer.numel() < self._layout.nbytes:
            raise ProtocolError(
                f"an object has {buffer.numel()} bytes, the layout needs {self._layout.nbytes}"
            )
        self._places.append((buffer.data_ptr(), buffer.numel()))
        return buffer, self._layout.views(buffer)

    def is_lent(self, address: int) -> bool:
        """Whether the address lies in an object: the store frees these when the connection ends."""
        return any(0 <= address - start < nbytes for start, nbytes in self._places)

    def forget(self) -> None:
        self._arriving = None

    def committed(self, names: Collection[str] | None) -> None:
        self._arriving = None  # the tensors in service keep the object alive

    def close(self) -> None:
        self._arriving = None
        self._thread.close()
