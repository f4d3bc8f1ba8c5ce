"""Versions that lie in Ray's object store, as :mod:`aiosync.transports.ray.object_store` keeps them."""

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
from aiosync.protocol.events import Fetched
from aiosync.protocol.frames import Update
from aiosync.transfer.base import BroadcastMember, InboundTransfer, OutboundTransfer
from aiosync.transfer.slots import SlotVersion
from aiosync.transports._offload import DetachedThread, call_when_done
from aiosync.transports.base import Transport
from aiosync.transports.ray.object_store import fetch, notify_keeper, put, warn_if_tight
from aiosync.transports.tcp.connection import TCPTransport
from aiosync.weights.layout import Layout

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WeightGroup

__all__ = ["ObjectStoreInbound", "ObjectStoreOutbound", "ObjectStorePublisher"]


class ObjectStorePublisher:
    """A group's newest version as an object, and older versions that a worker still reads (one at most per
    worker).

    Args:
        group: whose versions.
        office: keeps the reference.
        tensor_transport: how Ray moves it.

    Attributes:
        name: by which the office keeps it.
        number: which of all that were put there is the newest, if that is there; else -1.
    """

    def __init__(self, group: WeightGroup, office: Any, tensor_transport: str) -> None:
        self.name = secrets.token_hex(8)
        self._group = group
        self._office = office
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
        return self._group.arena.layout.nbytes

    def offers(self, published: SlotVersion, reader: ObjectStoreOutbound) -> bool:
        """Whether a version is there for a reader: who, if so, is to begin at once, and to be :meth:`done`.

        If not it is put, and the reader served again when it is there. Only one is put at a time, so that no
        more than one slot is held by that (under a holder of its own, because a put cannot be cancelled).
        """
        if self._storing:
            self._waiting.add(reader)
            return False
        if (self.number >= 0 and self._round == published.round) or self.instead(
            published, reader
        ) is not published:
            return True
        if published.copying is None or published.copying.whole:
            self._waiting.add(reader)
            self._store(published)
        return False

    def instead(self, due: SlotVersion, reader: ObjectStoreOutbound) -> SlotVersion:
        """What a reader gets that has waited for a version, where there is a newer one by now: if each put
        were for nothing when it is done, a sender that is quicker than that would never be heard of."""
        waited = self._last if reader in self._served else None
        return due if waited is None or due.joint is not None or waited.joint is not None else waited

    def _store(self, published: SlotVersion) -> None:
        slot, holder = published.slot, ("sending", object())
        slot.holders.add(holder)
        self._group.unstoppable.add(holder)
        buffer, number = slot.segment.buffer[: self.nbytes], self._puts
        self._puts += 1
        self._storing = True

        def store() -> None:
            if number == 0:
                warn_if_tight(self.nbytes)
            # A worker that asks for it waits at the office until this call has arrived there.
            self._office.keep.remote(self.name, number, [put(buffer, self._tensor_transport)])

        def stored(future: Future[Any]) -> None:
            self._group.unstoppable.discard(holder)
            self._group.release(holder)
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

        call_when_done(self._thread.submit(store), stored)

    def reads(self, reader: ObjectStoreOutbound) -> None:
        """It has been sent this version."""
        self._readers[reader] = self.number

    def done(self, reader: ObjectStoreOutbound) -> None:
        """It has looked, or does not any more: the last one lets it go."""
        self._waiting.discard(reader)
        self._drop_if_unread(self._readers.pop(reader, -1))

    def _drop_if_unread(self, number: int) -> None:
        if number >= 0 and number not in self._readers.values():
            notify_keeper(self._office, "drop", self.name, number)
            if number == self.number:
                self.number = -1

    def close(self) -> None:
        """Let go of all, also of what is being put now."""
        self._closed = True
        self._waiting.clear()
        self._readers.clear()
        self.number = -1
        self._thread.submit(lambda: notify_keeper(self._office, "forget", self.name))
        self._thread.close()


class ObjectStoreOutbound(OutboundTransfer):
    """The sender's side: a worker is sent a version once the object store has it.

    Args:
        transport: the worker's.
        publisher: of its group.
        inline: bytes up to which a version goes with the word of it: putting it takes longer.
    """

    maps = False

    def __init__(self, transport: TCPTransport, publisher: ObjectStorePublisher, inline: int) -> None:
        self._transport = transport
        self._publisher = publisher
        self._inline = publisher.nbytes <= inline
        self._connection: BroadcastMember | None = None

    def enter(self, connection: BroadcastMember) -> None:
        self._connection = connection

    def may_begin(self, published: SlotVersion) -> bool:
        """Whether it is in the store; if not, it will be."""
        return self._inline or self._publisher.offers(published, self)

    def instead(self, due: SlotVersion) -> SlotVersion:
        return due if self._inline else self._publisher.instead(due, self)

    def stored(self, error: BaseException | None) -> None:
        """The shelf has something else, or could not."""
        if self._connection is None:
            return
        if error is None:
            self._connection.serve()
        else:
            self._transport.give_up(f"Ray's object store did not take a version: {error}")

    def payload(self, published: SlotVersion, fetched: Fetched) -> dict[str, Any]:
        """By which name it is kept; or the bytes themselves."""
        if self._inline:
            return {"bytes": published.slot.segment.buffer[: self._publisher.nbytes].numpy().tobytes()}
        return {"object": self._publisher.name, "number": self._publisher.number}

    def begin(self, published: SlotVersion, on_sent: Callable[[], None]) -> None:
        """Nothing more is to be sent."""
        if not self._inline:
            self._publisher.reads(self)
        on_sent()

    def answered(self) -> None:
        """It has looked."""
        self._publisher.done(self)

    def leave(self) -> None:
        self._connection = None
        self._publisher.done(self)


class ObjectStoreInbound(InboundTransfer):
    """The worker's side. An object is never written again: parameters view it for as long as they like.

    Args:
        layout: what an object holds.
        office: keeps the references.
    """

    borrowed = False
    holds = True  # who leaves has the model take its weights along

    def __init__(self, layout: Layout, office: Any) -> None:
        self._layout = layout
        self._office = office
        self._thread = DetachedThread("aiosync-ray")
        self._transport: Transport | None = None
        self._arriving: tuple[Update, Future[Tensor]] | None = None
        # Where the last objects lie: (first address, bytes).
        self._places: deque[tuple[int, int]] = deque(maxlen=64)

    def attach(self, transport: Transport) -> None:
        self._transport = transport

    def expect(self, update: Update) -> None:
        """Look at it at once: it is here, or on its way from another node."""
        match update.payload:
            case {"object": str(name), "number": int(number)}:
                future = self._thread.submit(lambda: fetch(self._office, name, number))
            case {"bytes": bytes(data)}:
                future = Future()
                future.set_result(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            case _:
                raise ProtocolError(f"an update names no object: {update.payload!r:.80}")
        self._arriving = update, future

    def is_here(self, update: Update) -> bool:
        return self._arriving is not None and self._arriving[0] is update and self._arriving[1].done()

    async def arrive(self, update: Update) -> None:
        """Wait for it."""
        assert self._arriving is not None and self._arriving[0] is update
        ended = asyncio.Event()
        call_when_done(self._arriving[1], lambda _: ended.set())
        await ended.wait()

    def is_quick(self, update: Update) -> bool:
        """Always: it is here by then."""
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
        """Whether it lies in an object: these are the store's, and go with the connection."""
        return any(0 <= address - start < nbytes for start, nbytes in self._places)

    def forget(self) -> None:
        self._arriving = None

    def committed(self, names: Collection[str] | None) -> None:
        """The tensors in service keep it alive."""
        self._arriving = None

    def close(self) -> None:
        self._arriving = None
        self._thread.close()
