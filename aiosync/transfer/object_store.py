"""Versions in Ray's object store; :mod:`aiosync.transports.ray.object_store` puts them there."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.framing import decode_either, encode_payload
from aiosync.transfer.base import InboundTransfer, MemoryAccess, OutboundTransfer, Transfer
from aiosync.transfer.mapped import MappedInbound, MappedOutbound
from aiosync.transfer.process_group import (
    BackgroundInbound,
    InlineOutbound,
    InlinePayload,
    allocate_near,
    completed,
)
from aiosync.transfer.slots import SlotVersion
from aiosync.transports._offload import DetachedThread
from aiosync.transports.base import FramedTransport, Listener
from aiosync.transports.ray.object_store import fetch, notify_keeper, put, warn_if_tight
from aiosync.transports.tcp.connection import TCPConnection
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup
    from aiosync.transfer.base import TransferConnection


class ObjectPayload(msgspec.Struct, frozen=True):
    """What an Update frame says of a version in the object store."""

    object: str  # the name by which the reference is kept
    number: int  # which of the objects kept by that name it is


@dataclass(eq=False, repr=False)
class ObjectStoreTransfer(Transfer):
    """Ray's object store holds the versions. Workers that can map the slots view them instead."""

    keeper: Any  # the actor that keeps the references; None: this process has none yet
    tensor_transport: str  # how Ray moves objects
    listener: Listener | None  # on the sender: where workers connect
    inline: int  # bytes up to which an Update frame has the weights: putting an object takes longer
    _publishers: dict[WorkerGroup, ObjectStorePublisher] = field(default_factory=dict, init=False)

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        return allocate_near(self.listener, nbytes, torch.device("cpu"))

    def outbound(self, transport: FramedTransport, group: WorkerGroup) -> OutboundTransfer:
        if transport.maps:
            return MappedOutbound(group, MemoryAccess.VIEWED)
        assert isinstance(transport, TCPConnection)
        if group.pool.layout.nbytes <= self.inline:
            return InlineOutbound(group)
        if group not in self._publishers:
            self._publishers[group] = ObjectStorePublisher(group, self.keeper, self.tensor_transport)
        return ObjectStoreOutbound(transport, self._publishers[group])

    def inbound(self, layout: Layout, transport: FramedTransport, source: torch.device) -> InboundTransfer:
        if transport.maps:
            return MappedInbound(layout, MemoryAccess.VIEWED)
        return ObjectStoreInbound(layout, self.keeper)

    def close(self) -> None:
        publishers, self._publishers = self._publishers, {}
        for publisher in publishers.values():
            publisher.close()


@dataclass(eq=False, repr=False)
class ObjectStorePublisher:
    """Puts a group's newest version into the object store, and keeps older ones that a worker still reads.

    At most one older version per worker is kept.
    """

    group: WorkerGroup
    keeper: Any  # the actor that keeps the references
    tensor_transport: str
    name: str = field(default_factory=partial(secrets.token_hex, 8), init=False)  # of the keeper's references
    number: int = field(default=-1, init=False)  # the newest object; -1: it was dropped, or there is none
    _round: int = field(default=-1, init=False)  # of that object's version
    _puts: int = field(default=0, init=False)
    _putting: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    # Workers that wait for the running put; and worker -> the number of the object that it reads.
    _waiting: set[ObjectStoreOutbound] = field(default_factory=set, init=False)
    _readers: dict[ObjectStoreOutbound, int] = field(default_factory=dict, init=False)
    _thread: DetachedThread = field(default_factory=partial(DetachedThread, "aiosync-ray"), init=False)

    def has(self, published: SlotVersion, reader: ObjectStoreOutbound) -> bool:
        """Whether a version is in the store. If so, the worker is sent it at once.

        If not, it is put, and the worker is offered it after that. Only one version is put at a time, so at
        most one slot has a lease for this: a put cannot be cancelled.
        """
        if not self._putting:
            if self.number >= 0 and self._round == published.round:
                return True
            if published.copying is not None and not published.copying.whole:
                return False  # asked again once the version is whole
            self._put(published)
        self._waiting.add(reader)
        return False

    def _put(self, published: SlotVersion) -> None:
        nbytes, number = self.group.pool.layout.nbytes, self._puts
        buffer = published.slot.segment.buffer[:nbytes]
        self._puts += 1
        self._putting = True

        def store() -> None:
            if number == 0:
                warn_if_tight(nbytes)
            # A worker's request for this object waits at the keeper until this call has arrived there.
            self.keeper.keep.remote(self.name, number, [put(buffer, self.tensor_transport)])

        def stored(future: Future[Any]) -> None:
            self._putting = False
            if self._closed:
                return
            error = future.exception()
            before, self.number = self.number, number if error is None else -1
            self._round = published.round
            self._drop_if_unread(before)
            waiting, self._waiting = self._waiting, set()
            for reader in waiting:
                reader.stored(published, error)
            self._drop_if_unread(number)

        self.group.pool.keep_until(self._thread.submit(store), published.slot, stored)

    def start_reading(self, reader: ObjectStoreOutbound) -> None:
        """A worker was sent the newest version."""
        self._readers[reader] = self.number

    def stop_reading(self, reader: ObjectStoreOutbound) -> None:
        """A worker no longer needs its version. Drop the object if no other worker reads it."""
        self._waiting.discard(reader)
        self._drop_if_unread(self._readers.pop(reader, -1))

    def _drop_if_unread(self, number: int) -> None:
        if number >= 0 and number not in self._readers.values():
            notify_keeper(self.keeper, "drop", self.name, number)
            if number == self.number:
                self.number = -1

    def close(self) -> None:
        """Drop all objects, also the one that is being put."""
        self._closed = True
        self._waiting.clear()
        self._readers.clear()
        self.number = -1
        self._thread.submit(lambda: notify_keeper(self.keeper, "forget", self.name))
        self._thread.close()


@dataclass(eq=False, repr=False)
class ObjectStoreOutbound(OutboundTransfer):
    """The sender's side: a worker is sent a version once the object store has it."""

    transport: TCPConnection
    publisher: ObjectStorePublisher
    _connection: TransferConnection | None = field(default=None, init=False)
    # The version that the worker has waited for, while it is offered.
    _stored: SlotVersion | None = field(default=None, init=False)

    def attach(self, connection: TransferConnection) -> None:
        self._connection = connection

    def can_start(self, published: SlotVersion) -> bool:
        return self.substitute(published) is not published or self.publisher.has(published, self)

    def substitute(self, notified: SlotVersion) -> SlotVersion:
        """The version that the worker has waited for, even if there is a newer one.

        Otherwise a sender that publishes faster than objects are put would never get a version across.
        """
        stored = self._stored
        if stored is None or stored.joint is not None or notified.joint is not None:
            return notified
        return stored

    def stored(self, published: SlotVersion, error: BaseException | None) -> None:
        """Called when the version was put that this worker waits for, or when that failed."""
        if self._connection is None:
            return
        if error is not None:
            self.transport.give_up(f"Ray's object store did not take a version: {error}")
            return
        self._stored = published
        self._connection.offer_next()
        self._stored = None

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        return encode_payload(ObjectPayload(self.publisher.name, self.publisher.number))

    def start(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        self.publisher.start_reading(self)
        on_sent()

    def answered(self) -> None:
        self.publisher.stop_reading(self)

    def detach(self) -> None:
        self._connection = None
        self.publisher.stop_reading(self)


@dataclass(eq=False, repr=False)
class ObjectStoreInbound(BackgroundInbound):
    """The worker's side. An object is never written again, so parameters may view it."""

    layout: Layout
    keeper: Any  # the actor that keeps the references
    # The last objects: (first address, bytes).
    _objects: deque[tuple[int, int]] = field(default_factory=partial(deque, maxlen=64), init=False)
    _thread: DetachedThread = field(default_factory=partial(DetachedThread, "aiosync-ray"), init=False)

    access = MemoryAccess.IMMUTABLE

    def expect(self, update: Update) -> None:
        """Start to get the object, which may have to come from another node."""
        payload = decode_either(update, ObjectPayload, InlinePayload)
        if isinstance(payload, InlinePayload):
            work = completed(torch.frombuffer(bytearray(payload.data), dtype=torch.uint8))
        else:
            work = self._thread.submit(lambda: fetch(self.keeper, payload.object, payload.number))
        self.follow(update, work)

    def is_quick(self, update: Update) -> bool:
        return True

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._arriving is not None
        buffer: Tensor = self._arriving[1].result()
        if buffer.numel() < self.layout.nbytes:
            raise ProtocolError(
                f"an object has {buffer.numel()} bytes, the layout needs {self.layout.nbytes}"
            )
        self._objects.append((buffer.data_ptr(), buffer.numel()))
        return buffer, self.layout.views(buffer)

    def is_lent(self, address: int) -> bool:
        """Whether the address is in an object: the store frees objects when the connection ends."""
        # A copy: another thread may be adding one.
        return any(0 <= address - start < nbytes for start, nbytes in tuple(self._objects))

    def forget(self) -> None:
        self._arriving = None

    def committed(self, names: Collection[str] | None) -> None:
        self._arriving = None  # the tensors in service keep the object alive

    def close(self) -> None:
        self._arriving = None
        self._thread.close()
