"""The rendezvous of senders and workers over torch RPC.

A worker asks the sender's process for the sender's address, by one call. Frames then go over a socket, and a
process group sends the weights. A sender that starts later answers the workers that asked for it before.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import rpc

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError
from aiosync.transports._offload import handover
from aiosync.transports.base import OnConnection, OnLost
from aiosync.transports.torch_distributed.store import StoreAddress
from aiosync.transports.torch_distributed.transport import (
    SenderAddress,
    TorchDistributedListener,
    TorchDistributedTransport,
)
from aiosync.transports.torch_rpc.transport import Call, agent_here, is_member, notify, store_here

_REMEMBERED = 256  # most cancelled lookups that are remembered because their question may still arrive


def _sender_name(given: str | None) -> str:
    """Return the name of the sender's process in torch RPC: ``given``, or the name of rank 0."""
    if given is not None:
        return given
    for info in agent_here().get_worker_infos():
        if info.id == 0:
            return str(info.name)
    raise InvalidArgumentError("no process has rank 0 in torch RPC: name the sender's process with sender=")


class _Directory:
    """The senders of this process, and the lookups that wait for a sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The newest last. A sender has two names: its model's name and a key that only it has.
        self._senders: list[tuple[str, SenderAddress]] = []
        # Ticket of a lookup -> the sender's name, the worker's process, and when the lookup ends if no
        # cancellation arrives: the worker may have died, or left the job.
        self._asked: dict[str, tuple[str, str, float]] = {}
        # Tickets cancelled before their question arrived: torch RPC runs calls in several threads.
        self._cancelled: deque[str] = deque(maxlen=_REMEMBERED)

    def add(self, names: tuple[str, ...], address: SenderAddress) -> None:
        """Add a sender, and answer the lookups that wait for it."""
        with self._lock:
            self._senders += [(name, address) for name in names]
            answered = {ticket: worker for ticket, (name, worker, _) in self._asked.items() if name in names}
            for ticket in answered:
                del self._asked[ticket]
        for ticket, worker in answered.items():
            notify(worker, _receive_answer, ticket, address)

    def remove(self, address: SenderAddress) -> None:
        """Remove a sender; idempotent."""
        with self._lock:
            self._senders = [sender for sender in self._senders if sender[1] != address]

    def look_up(self, name: str, ticket: str, worker: str, patience: float) -> SenderAddress | None:
        """Return the address of the newest sender of this name; None: the answer is sent later.

        ``patience``: seconds that the worker waits.
        """
        now = time.monotonic()
        with self._lock:
            for known, address in reversed(self._senders):
                if known == name:
                    return address
            self._asked = {asking: lookup for asking, lookup in self._asked.items() if lookup[2] > now}
            if ticket in self._cancelled:
                self._cancelled.remove(ticket)
            else:
                self._asked[ticket] = name, worker, now + patience
            return None

    def cancel(self, ticket: str) -> None:
        """Remove a lookup that waits, or remember that it is cancelled if it has not arrived yet."""
        with self._lock:
            if self._asked.pop(ticket, None) is None:
                self._cancelled.append(ticket)


_directory = _Directory()
# The lookups of this process that wait for an answer: ticket -> resolves the future of the answer.
_pending: dict[str, Callable[[Callable[[], SenderAddress]], None]] = {}


def _look_up(name: str, ticket: str, worker: str, patience: float) -> SenderAddress | None:
    """Called by a worker through torch RPC, in the sender's process."""
    return _directory.look_up(name, ticket, worker, patience)


def _cancel(ticket: str) -> None:
    """Called by a worker through torch RPC, in the sender's process."""
    _directory.cancel(ticket)


def _receive_answer(ticket: str, address: SenderAddress) -> None:
    """Called by the sender through torch RPC, in a worker's process."""
    resolve = _pending.pop(ticket, None)
    if resolve is not None:
        resolve(lambda: address)


@dataclass(frozen=True)
class SenderInfo:
    """What a pickled scheme contains about its sender."""

    sender: str  # the name of the sender's process in torch RPC
    key: str  # the sender's own name in that process's directory

    # For workers that are not members of torch RPC, such as a respawned worker.
    address: SenderAddress
    store: StoreAddress


class RPCWorkerTransport(TorchDistributedTransport):
    """A worker's connection to its sender, whose process in torch RPC is ``sender``, or rank 0.

    ``info`` is what the sender has published about itself. None: look the sender up by ``model_id``.
    """

    def __init__(
        self, model_id: str | None, sender: str | None, info: SenderInfo | None, *, share_memory: bool = True
    ) -> None:
        super().__init__(share_memory=share_memory, store_address=None if info is None else info.store)
        self._name = _named(model_id) if info is None else info.key
        self._sender = sender if info is None else info.sender
        self._info = info

    async def _find(self, deadline: Deadline) -> SenderAddress:
        if self._info is not None and not is_member():
            return self._info.address
        self._store = store_here()
        return await self._ask(_sender_name(self._sender), deadline)

    async def _ask(self, sender: str, deadline: Deadline) -> SenderAddress:
        ticket, address = secrets.token_hex(8), None
        answer: asyncio.Future[SenderAddress]
        answer, _pending[ticket] = handover()
        self.trouble = f"the process {sender!r} of torch RPC has no sender of this model"
        try:
            asked = self._name, ticket, rpc.get_worker_info().name, deadline.remaining()
            address = await Call(sender, _look_up, asked, deadline).answer()
            if address is None:
                async with asyncio.timeout(deadline.remaining()):
                    address = await answer
        except TimeoutError:
            raise deadline.error("connect", hint=self.trouble) from None
        finally:
            _pending.pop(ticket, None)
            if address is None:
                notify(sender, _cancel, ticket)
        assert isinstance(address, SenderAddress)
        return address


class RPCListener(TorchDistributedListener):
    """Listens for workers of ``model_id``, which ask for its address by torch RPC."""

    def __init__(self, model_id: str | None, token: bytes, *, share_memory: bool = True) -> None:
        super().__init__(StoreAddress(store=store_here()), token, share_memory=share_memory)
        self.sender_info = SenderInfo(
            rpc.get_worker_info().name, secrets.token_hex(8), self.address, self.store_address.by_address()
        )
        self._names = (_named(model_id), self.sender_info.key)

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        await super().listen(on_connection, on_lost)
        _directory.add(self._names, self.address)

    def stop(self) -> None:
        super().stop()
        _directory.remove(self.address)


def _named(model_id: str | None) -> str:
    return f"model {model_id}"
