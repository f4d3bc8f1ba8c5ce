"""Versions that lie in Ray's object store: both sides of what :mod:`aiosync.transports.ray_objects` keeps."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from aiosync.errors import ProtocolError, WorkerLostError
from aiosync.protocol.events import Fetched
from aiosync.protocol.frames import Update
from aiosync.schemes.arrival import Arrival
from aiosync.schemes.delivery import Delivery
from aiosync.schemes.ensemble import Member
from aiosync.schemes.group import Published, WeightGroup
from aiosync.transports._offload import DetachedThread, call_when_done
from aiosync.transports.base import Transport
from aiosync.transports.ray_calls import ActorCall
from aiosync.transports.ray_objects import Inbox, hand_over, put
from aiosync.transports.tcp import TCPTransport
from aiosync.weights.layout import Layout

__all__ = ["ByObject", "Shelf", "Stored"]


class Shelf:
    """A group's newest version as an object, for as long as somebody is to be handed it.

    Args:
        group: whose versions.
        tensor_transport: how Ray moves it.
    """

    def __init__(self, group: WeightGroup, tensor_transport: str) -> None:
        self._group = group
        self._tensor_transport = tensor_transport
        self._thread = DetachedThread("aiosync-ray")
        self._round = -1
        self._object: Future[Any] | None = None
        self._wanted = 0

    def take(self, published: Published) -> Future[Any]:
        """The object of a version, which is put if it is not there; :meth:`done` is to follow.

        The slot is held in a name of its own until it has been read: nobody can tell Ray to stop.
        """
        if self._object is None or self._round != published.round:
            self._round, self._wanted = published.round, 0
            self._object = self._put(published)
        self._wanted += 1
        return self._object

    def _put(self, published: Published) -> Future[Any]:
        slot, holder = published.slot, ("sending", object())
        slot.holders.add(holder)
        self._group.unstoppable.add(holder)
        buffer = slot.segment.buffer[: self._group.arena.layout.nbytes]
        future = self._thread.submit(lambda: put(buffer, self._tensor_transport))

        def over(_: Future[Any]) -> None:
            self._group.unstoppable.discard(holder)
            self._group.release(holder)

        call_when_done(future, over)
        return future

    def done(self, published: Published) -> None:
        """One of those who took it has handed it over, or given up: the last one lets it go."""
        if published.round == self._round:
            self._wanted -= 1
            if self._wanted == 0:
                self._object = None

    def close(self) -> None:
        """Let go of it."""
        self._object = None
        self._thread.close()


class ByObject(Delivery):
    """The sender's side: a worker is told of a version when its process has been handed the object.

    Args:
        transport: the worker's.
        shelf: of its group.
        handle_of: gives a worker's actor; None: it is in this process.
    """

    maps = False

    def __init__(self, transport: TCPTransport, shelf: Shelf, handle_of: Callable[[int], Any]) -> None:
        self._transport = transport
        self._shelf = shelf
        self._handle_of = handle_of
        self._name = secrets.token_hex(8)
        self._link: Member | None = None
        self._giving: Published | None = None
        self._given = -1

    def enter(self, link: Member) -> None:
        """See :class:`Delivery`."""
        self._link = link

    def may_begin(self, published: Published) -> bool:
        """Whether it has been handed over; if not, it will be."""
        if self._given == published.round:
            return True
        if self._giving is not published and (published.copying is None or published.copying.whole):
            self._giving = published
            call_when_done(self._shelf.take(published), lambda done: self._hand_over(published, done))
        return False

    def _hand_over(self, published: Published, put: Future[Any]) -> None:
        if self._link is None or self._giving is not published:  # there is a newer one by now
            self._shelf.done(published)
            return
        error = put.exception()
        if error is not None:
            self._handed_over(published, error)
            return
        worker, refs = self._link.worker, [put.result()]
        handle = self._handle_of(worker)
        if handle is None:
            hand_over(None, self._name, published.round, refs)
            self._handed_over(published, None)
            return
        try:
            call = ActorCall(worker, handle, hand_over, self._name, published.round, refs)
        except Exception as exc:  # noqa: BLE001 - a handle that Ray refuses to call
            self._handed_over(published, exc)
        else:
            call.on_answer(lambda error: self._handed_over(published, error))

    def _handed_over(self, published: Published, error: BaseException | None) -> None:
        self._shelf.done(published)
        if self._link is None or self._giving is not published:
            return
        self._giving = None
        if error is None:
            self._given = published.round
            self._link.serve()
        else:
            self._transport.give_up(error.reason if isinstance(error, WorkerLostError) else str(error))

    def payload(self, published: Published, fetched: Fetched) -> dict[str, Any]:
        """Under which name it was handed over."""
        return {"object": self._name, "number": published.round}

    def begin(self, published: Published, on_sent: Callable[[], None]) -> None:
        """Nothing more is to be sent; who comes for it again has to be handed it again."""
        self._given = -1
        on_sent()

    def leave(self) -> None:
        """See :class:`Delivery`."""
        self._link = None


class Stored(Arrival):
    """The worker's side. An object is never written again: parameters view it for as long as they like.

    Args:
        layout: what an object holds.
    """

    borrowed = False

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._inbox = Inbox()
        self._thread = DetachedThread("aiosync-ray")
        self._transport: Transport | None = None
        self._arriving: tuple[Update, Future[Tensor]] | None = None

    def attach(self, transport: Transport) -> None:
        """See :class:`Arrival`."""
        self._transport = transport

    def expect(self, update: Update) -> None:
        """Look at it at once: it is here, or on its way from another node."""
        match update.payload:
            case {"object": str(name), "number": int(number)}:
                future = self._thread.submit(lambda: self._inbox.take(name, number))
                self._arriving = update, future
            case _:
                raise ProtocolError(f"an update names no object: {update.payload!r:.80}")

    def is_here(self, update: Update) -> bool:
        """See :class:`Arrival`."""
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
        """See :class:`Arrival`."""
        assert self._arriving is not None
        buffer = self._arriving[1].result()
        if buffer.numel() < self._layout.nbytes:
            raise ProtocolError(
                f"an object has {buffer.numel()} bytes, the layout needs {self._layout.nbytes}"
            )
        return buffer, self._layout.views(buffer)

    def note(self, payload: Mapping[str, Any]) -> None:
        """It is not used."""
        self._arriving = None

    def committed(self) -> None:
        """The tensors in service keep it alive."""
        self._arriving = None

    def close(self) -> None:
        """See :class:`Arrival`."""
        self._arriving = None
        self._inbox.close()
        self._thread.close()
