"""The rendezvous of senders and workers over torch RPC.

A worker asks the sender's process for the sender's address, by one call. Frames then go over a socket, and a
process group sends the weights. A sender that starts later answers the workers that asked for it before.

Each process has two tables: :data:`_directory` has its senders and the lookups that wait for one, and
:data:`_pending` has its own lookups that wait for an answer.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
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
    """The senders of this process, and the lookups that wait for a sender.

    A sender has two names: its model's name and a key that only it has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[str, list[SenderAddress]] = {}
        # Sender's name -> ticket of a lookup -> the worker's process, and when the lookup ends if no
        # cancellation arrives: the worker may have died, or left the job.
        self._asked: dict[str, dict[str, tuple[str, float]]] = {}
        # Tickets cancelled before their question arrived: torch RPC runs calls in several threads.
        self._cancelled: dict[str, None] = {}

    def add(self, names: tuple[str, ...], address: SenderAddress) -> None:
        """Add a sender, and answer the lookups that wait for it."""
        with self._lock:
            self._drop_ended()
            asked: dict[str, tuple[str, float]] = {}
            for name in names:
                self._addresses.setdefault(name, []).append(address)
                asked |= self._asked.pop(name, {})
        for ticket, (worker, _) in asked.items():
            notify(worker, _receive_answer, ticket, address)

    def remove(self, names: tuple[str, ...], address: SenderAddress) -> None:
        """Remove a sender; idempotent."""
        with self._lock:
            for name in names:
                addresses = self._addresses.get(name, [])
                if address in addresses:
                    addresses.remove(address)
                if not addresses:
                    self._addresses.pop(name, None)

    def look_up(self, name: str, ticket: str, worker: str, patience: float) -> SenderAddress | None:
        """Return the address of the newest sender of this name; None: the answer is sent later.

        ``patience``: seconds that the worker waits.
        """
        with self._lock:
            self._drop_ended()
            if name in self._addresses:
                return self._addresses[name][-1]
            if ticket in self._cancelled:
                del self._cancelled[ticket]
                return None
            self._asked.setdefault(name, {})[ticket] = worker, time.monotonic() + patience
            return None

    def cancel(self, name: str, ticket: str) -> None:
        """Remove a lookup that waits, or remember that it is cancelled if it has not arrived yet."""
        with self._lock:
            asked = self._asked.get(name, {})
            if asked.pop(ticket, None) is None:
                self._cancelled[ticket] = None
                if len(self._cancelled) > _REMEMBERED:
                    del self._cancelled[next(iter(self._cancelled))]
            if not asked:
                self._asked.pop(name, None)

    def _drop_ended(self) -> None:
        now = time.monotonic()
        for name, asked in list(self._asked.items()):
            waiting = {ticket: asking for ticket, asking in asked.items() if asking[1] > now}
            if waiting:
                self._asked[name] = waiting
            else:
                del self._asked[name]


_directory = _Directory()
_pending: dict[str, Callable[[Callable[[], SenderAddress]], None]] = {}


def _look_up(name: str, ticket: str, worker: str, patience: float) -> SenderAddress | None:
    """Called by a worker through torch RPC, in the sender's process."""
    return _directory.look_up(name, ticket, worker, patience)


def _cancel(name: str, ticket: str) -> None:
    """Called by a worker through torch RPC, in the sender's process."""
    _directory.cancel(name, ticket)


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
    """A worker's connection to its sender.

    Args:
        model_id: the model's name.
        sender: the name of the sender's process in torch RPC; None: rank 0.
        info: what the sender has published about itself; None: look the sender up by ``model_id``.
        share_memory: whether the worker may map the sender's memory, if it can.
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
                notify(sender, _cancel, self._name, ticket)
        assert isinstance(address, SenderAddress)
        return address


class RPCListener(TorchDistributedListener):
    """Listens for workers of ``model_id``, which ask for its address by torch RPC.

    Raises:
        NotInitializedError: torch RPC is not initialised in this process.
    """

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
        _directory.remove(self._names, self.address)


def _named(model_id: str | None) -> str:
    return f"model {model_id}"
