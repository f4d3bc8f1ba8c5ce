"""Where workers and senders that take part in torch RPC find each other.

A worker asks where its sender is, by one call; frames go over a socket then, and the weights from rank to
rank. What lies in each process: :data:`_desk`, where those ask who look for a sender that this process
has, and :data:`_tickets`, for the answers to those who had to wait. A sender that starts
answers the processes that have asked for it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError
from aiosync.transports._offload import handover
from aiosync.transports.base import Transport
from aiosync.transports.torch_distributed.connection import RankedListener, RankedTransport, SenderAddress
from aiosync.transports.torch_distributed.store import StoreAddress
from aiosync.transports.torch_rpc.calls import Call, agent_here, is_member, store_here, tell

__all__ = ["RPCListener", "RPCWorkerTransport", "SenderInfo"]


_REMEMBERED = 256
"""Tickets that were given up and may still be asked for."""


def _sender_name(given: str | None) -> str:
    """The name that the sender has in torch RPC: the one that is given, or that of rank 0.

    Raises:
        NotInitializedError: this process takes no part in torch RPC.
        InvalidArgumentError: no process has that rank.
    """
    if given is not None:
        return given
    for info in agent_here().get_worker_infos():
        if info.id == 0:
            return str(info.name)
    raise InvalidArgumentError("no process has rank 0 in torch RPC: name the sender's process with sender=")


class _Desk:
    """The senders of this process, each under its model's name and under a key of its own, and who has asked
    for one that is not here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, list[SenderAddress]] = {}
        self._asked: dict[str, dict[str, str]] = {}
        # Tickets that were given up before their question came: torch RPC runs calls in several threads.
        self._given_up: dict[str, None] = {}

    def open(self, names: tuple[str, ...], place: SenderAddress) -> None:
        """A sender is here."""
        with self._lock:
            asked: dict[str, str] = {}
            for name in names:
                self._places.setdefault(name, []).append(place)
                asked |= self._asked.pop(name, {})
        for ticket, worker in asked.items():
            tell(worker, _hear, ticket, place)

    def close(self, names: tuple[str, ...], place: SenderAddress) -> None:
        """It is not any more; idempotent."""
        with self._lock:
            for name in names:
                places = self._places.get(name, [])
                if place in places:
                    places.remove(place)
                if not places:
                    self._places.pop(name, None)

    def ask(self, name: str, ticket: str, worker: str) -> SenderAddress | None:
        """The newest sender of this name; None: the worker will be told."""
        with self._lock:
            if name in self._places:
                return self._places[name][-1]
            if ticket in self._given_up:
                del self._given_up[ticket]
                return None
            self._asked.setdefault(name, {})[ticket] = worker
            return None

    def forget(self, name: str, ticket: str) -> None:
        """Who asked has given up."""
        with self._lock:
            asked = self._asked.get(name, {})
            if asked.pop(ticket, None) is None:
                self._given_up[ticket] = None
                if len(self._given_up) > _REMEMBERED:
                    del self._given_up[next(iter(self._given_up))]
            if not asked:
                self._asked.pop(name, None)


_desk = _Desk()
_tickets: dict[str, Callable[[Callable[[], SenderAddress]], None]] = {}


def _ask(name: str, ticket: str, worker: str) -> SenderAddress | None:
    """Called by a worker, in the sender's process."""
    return _desk.ask(name, ticket, worker)


def _forget(name: str, ticket: str) -> None:
    """Called by a worker, in the sender's process."""
    _desk.forget(name, ticket)


def _hear(ticket: str, place: SenderAddress) -> None:
    """Called by the sender, in a worker's process."""
    settle = _tickets.pop(ticket, None)
    if settle is not None:
        settle(lambda: place)


@dataclass(frozen=True)
class SenderInfo:
    """What a pickled scheme tells of its sender.

    Attributes:
        sender: its process's name in torch RPC. key: its own, under which it is known there. place:
        where it is, and meeting: the store, for processes that take no part in torch RPC: one that
        takes the place of a worker
            that has died, say.
    """

    sender: str
    key: str
    place: SenderAddress
    meeting: StoreAddress


class RPCWorkerTransport(RankedTransport):
    """A worker's connection to its sender.

    Args:
        model_id: the model's name.
        sender: the sender's process in torch RPC; None: rank 0's.
        known: what the sender has published about itself.
        share_memory: whether the sender's memory may be viewed, if that can be done.
    """

    def __init__(
        self, model_id: str | None, sender: str | None, known: SenderInfo | None, *, share_memory: bool = True
    ) -> None:
        super().__init__(share_memory=share_memory)
        self._name = _named(model_id) if known is None else known.key
        self._sender = sender if known is None else known.sender
        self._known = known
        self._store: Any = None

    def connection(self) -> Any:
        if self._store is None:
            assert self._known is not None
            self._store = self._known.meeting.connect()
        return self._store.clone()

    async def _find(self, deadline: Deadline) -> SenderAddress:
        if self._known is not None and not is_member():
            return self._known.place
        self._store = store_here()
        return await self._ask(_sender_name(self._sender), deadline)

    async def _ask(self, sender: str, deadline: Deadline) -> SenderAddress:
        ticket, place = secrets.token_hex(8), None
        answer: asyncio.Future[SenderAddress]
        answer, _tickets[ticket] = handover()
        self.trouble = f"the process {sender!r} of torch RPC has no sender of this model"
        try:
            asking = Call(sender, _ask, (self._name, ticket, rpc.get_worker_info().name), deadline)
            place = await asking.answer()
            if place is None:
                async with asyncio.timeout(deadline.remaining()):
                    place = await answer
        except TimeoutError:
            raise deadline.error("connect", hint=self.trouble) from None
        finally:
            _tickets.pop(ticket, None)
            if place is None:
                tell(sender, _forget, self._name, ticket)
        assert isinstance(place, SenderAddress)
        return place


class RPCListener(RankedListener):
    """Where workers connect. It answers calls by torch RPC that ask for its address.

    Args:
        model_id: the model's name.
        token: what workers are to prove that they know.
        share_memory: whether workers on this machine may come by the shorter way.

    Attributes:
        known: what a pickled scheme tells of this.

    Raises:
        NotInitializedError: this process takes no part in torch RPC.
    """

    def __init__(self, model_id: str | None, token: bytes, *, share_memory: bool = True) -> None:
        super().__init__(StoreAddress(store=store_here()), token, share_memory=share_memory)
        self.known = SenderInfo(
            rpc.get_worker_info().name, secrets.token_hex(8), self.place, self.meeting.by_address()
        )
        self._names = (_named(model_id), self.known.key)

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        await super().listen(on_connection, on_lost)
        _desk.open(self._names, self.place)

    def stop(self) -> None:
        super().stop()
        _desk.close(self._names, self.place)


def _named(model_id: str | None) -> str:
    return f"model {model_id}"
