"""Connections whose weights are sent by a process group.

Frames go over a TCP socket: a store does not report the death of a process, and a thread that waits in a
store can be woken only through the store. A subclass finds the socket's address; StoreConnection finds
it in a store. The process groups are made through a store of torch.distributed.

A worker on the sender's machine that can map the sender's memory gets a Unix-socket connection instead, as
with :class:`~aiosync.SharedMemWeightSyncScheme`. No weights are sent then.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import abstractmethod
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import msgspec

from aiosync._deadline import Deadline
from aiosync.errors import ArenaAllocationError, InvalidArgumentError, ProtocolError, WorkerLostError
from aiosync.protocol.frames import Inbound
from aiosync.transports._offload import DetachedThread, abandonable, start_thread
from aiosync.transports.base import FramedTransport, Listener, OnConnection, OnLost
from aiosync.transports.tcp.address import Address
from aiosync.transports.tcp.connection import DialledTransport
from aiosync.transports.tcp.listener import TCPListener
from aiosync.transports.torch_distributed.store import StoreAddress, StoreLookup, StoreResponder
from aiosync.transports.unix_socket import UnixConnection, UnixListener
from aiosync.weights.segment import Segment


class LocalAddress(msgspec.Struct, frozen=True):
    """Where a sender listens for workers on its own machine."""

    address: str  # of the Unix socket
    user: int  # the sender's user id. Processes of other users cannot connect
    sample: dict[str, int | str]  # handle of a small segment of the sender's memory
    # Content of that segment. A worker compares it, because in another container the handle's process id may
    # belong to another process.
    mark: bytes

    def within_reach(self) -> bool:
        """Return whether this process may connect, and can map the sender's memory."""
        match self.sample:
            case {"kind": "memfd", "pid": int(pid), "fd": int(fd)} if self.user == os.geteuid():
                try:
                    # Opening another kind of file may block or have side effects.
                    if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:"):
                        return False
                    found = Segment.attach(dict(self.sample)).buffer
                except (OSError, ProtocolError):
                    return False
                return found.numpy().tobytes()[: len(self.mark)] == self.mark
        return False


_LOCAL_ATTEMPT = 1.0
"""Seconds in which a sender on this machine has to accept a connection over its Unix socket."""


class SenderAddress(msgspec.Struct, frozen=True):
    """Where a sender listens, and the secret that a worker proves to know."""

    host: str
    port: int
    token: bytes

    # For workers on the sender's machine. Its key is "near" in what the sender writes into the store.
    local: LocalAddress | None = msgspec.field(default=None, name="near")

    def __repr__(self) -> str:
        return f"SenderAddress({self.host!r}, {self.port}, <secret>)"


class TorchDistributedTransport(DialledTransport):
    """A worker's connection to its sender. A subclass finds the sender's address in :meth:`_find`."""

    def __init__(self, *, share_memory: bool, store_address: StoreAddress | None = None) -> None:
        super().__init__(Address("127.0.0.1", 0))
        self._share_memory = share_memory
        self._store_address = store_address  # None: the subclass connects to the store itself
        self._store: Any = None
        self._bare = True  # whether updates have no chunks on this socket

    async def reach(self, deadline: Deadline) -> FramedTransport:
        """Find the sender and connect to it, over a Unix socket if its memory can be mapped; else over TCP.

        Raises:
            InvalidArgumentError: the scheme does not know where to look for the sender.
            NotInitializedError: this process has not joined the job.
            WorkerLostError: the sender or the store is not there.
            SyncTimeoutError: the sender did not appear in time.
        """
        address = await self._find(deadline)
        local = address.local if self._share_memory else None
        if local is not None and local.within_reach():
            transport = UnixConnection(local.address)
            transport.secret = address.token
            try:
                return await transport.reach(Deadline.after(min(_LOCAL_ATTEMPT, deadline.remaining())))
            except BaseException as exc:
                await transport.aclose()
                if not isinstance(exc, WorkerLostError | TimeoutError):  # TCP gives the reason
                    raise
        await self._connect_to(address, deadline)
        return self

    async def open(self, deadline: Deadline) -> None:
        """Find the sender and connect to it over TCP. Raises as :meth:`reach`."""
        await self._connect_to(await self._find(deadline), deadline)

    async def _connect_to(self, address: SenderAddress, deadline: Deadline) -> None:
        self.trouble = ""
        self.secret = address.token
        self._address = Address(address.host, address.port)
        self.peer_name = f"rank 0 at {self._address}"
        await super().open(deadline)

    @abstractmethod
    async def _find(self, deadline: Deadline) -> SenderAddress:
        """Return the sender's address. Raises as :meth:`reach`."""

    def connection(self) -> Any:
        """Make a connection to the store, for a thread that blocks in it. Blocking."""
        if self._store is None:
            assert self._store_address is not None
            self._store = self._store_address.connect()
        return self._store.clone()

    def trust(self, inbound: Inbound) -> None:
        super().trust(inbound)
        if self._socket is not None:
            self._socket.decoder.bare = self._bare


class TorchDistributedListener(Listener):
    """Listens for workers over TCP, and over a Unix socket for those that may map the sender's memory.

    A subclass publishes the address.
    """

    def __init__(self, store_address: StoreAddress, token: bytes, *, share_memory: bool) -> None:
        # The store as workers reach it, and a connection to it.
        self.store_address, self._store = store_address.open()
        bind, host = self.store_address.hosts()
        tcp = TCPListener(Address(bind, 0))
        self._listeners: list[TCPListener | UnixListener] = [tcp]
        self.patience = tcp.patience
        self._sample: Segment | None = None
        local = self._listen_locally() if share_memory and "memfd_create" in dir(os) else None
        self.address = SenderAddress(host, tcp.address.port, bytes(bytearray(token)), local)

    def _listen_locally(self) -> LocalAddress | None:
        mark = secrets.token_bytes(32)
        with suppress(ArenaAllocationError, OSError):  # perhaps not permitted; workers use TCP then
            self._sample = sample = Segment.shared(len(mark))
            listener = UnixListener()
            self._listeners.append(listener)
            sample.buffer.numpy().data[:] = mark
            return LocalAddress(listener.address, os.geteuid(), dict(sample.handle or {}), mark)
        return None

    def connection(self) -> Any:
        """Make a connection to the store, for a thread that blocks in the store. Blocking.

        Raises:
            RuntimeError: this listener has closed, or the store is gone.
        """
        store = self._store
        if store is None:
            raise RuntimeError("the sender has closed its connection to the store")
        return store.clone()

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        for listener in self._listeners:
            await listener.listen(on_connection, on_lost)

    def forget(self) -> None:
        for listener in self._listeners:
            listener.forget()
        if self._sample is not None:
            self._sample.close()

    def stop(self) -> None:
        for listener in self._listeners:
            listener.stop()

    def close(self) -> None:
        self.stop()
        for listener in self._listeners:
            listener.close()
        if self._sample is not None:
            self._sample.close()
        self._store = None


class StoreConnection(TorchDistributedTransport):
    """A worker's connection to its sender, which it finds in a store.

    Args:
        store_address: the store.
        model_id: the model's name.
        rank: the worker's rank.
        share_memory: whether the worker may map the sender's memory, if it can.
    """

    def __init__(
        self, store_address: StoreAddress, model_id: str | None, rank: int, *, share_memory: bool = True
    ) -> None:
        super().__init__(share_memory=share_memory, store_address=store_address)
        self.rank = rank
        self._model_id = model_id

    async def _find(self, deadline: Deadline) -> SenderAddress:
        store_address = self._store_address
        assert store_address is not None
        lookup = StoreLookup(store_address, self._model_id)
        found = None
        try:
            async with asyncio.timeout(deadline.remaining()):
                store_address.check_known()
                if store_address.store is None:
                    # torch would wait for the store in a call that cannot be interrupted.
                    self._address = Address(store_address.host, store_address.port)
                    (await self._dial(deadline)).close()
                self.trouble = "no sender of this model came to the store"
                found = await abandonable(lookup.run, "aiosync-meet")
        except TimeoutError:
            raise deadline.error("connect", hint=self.trouble) from None
        finally:
            if found is None:
                start_thread(lookup.cancel, "aiosync-meet")
        assert found is not None
        answer, self._store = found
        return msgspec.msgpack.decode(answer, type=SenderAddress)


class DistributedListener(TorchDistributedListener):
    """Listens for workers of ``model_id``, and publishes its address in a store."""

    # Those of this process that answer workers.
    _answering: ClassVar[WeakSet[DistributedListener]] = WeakSet()

    def __init__(
        self, store_address: StoreAddress, model_id: str | None, token: bytes, *, share_memory: bool = True
    ) -> None:
        super().__init__(store_address, token, share_memory=share_memory)
        self._model_id = model_id
        self._responder: StoreResponder | None = None
        self._thread = DetachedThread("aiosync-store")
        # Set by listen(): what no other sender may have, and where this one lives.
        self._key: object = None
        self._loop: asyncio.AbstractEventLoop

    async def listen(self, on_connection: OnConnection, on_lost: OnLost) -> None:
        # With the process: in a forked child the parent's do not answer.
        self._key = self.store_address.identity, self._model_id, os.getpid()
        self._loop = asyncio.get_running_loop()
        self._check_alone()
        self._answering.add(self)
        try:
            await super().listen(on_connection, on_lost)
            answer = msgspec.msgpack.encode(self.address)
            respond = partial(StoreResponder, self._store, self._model_id, answer)
            self._responder = await abandonable(respond, "aiosync-store")
        except BaseException:
            self._answering.discard(self)
            raise
        self._thread.wake = self._responder.close
        self._thread.submit(self._responder.run)

    def _check_alone(self) -> None:
        """Raise InvalidArgumentError if another sender of this process answers this one's workers."""
        others = [each for each in list(self._answering) if not each._loop.is_closed()]
        if any(other._key == self._key for other in others):
            raise InvalidArgumentError(
                f"model_id={self._model_id!r}: another sender of this process has it, and the same store. A "
                "worker could get the weights of either: give each a model_id= of its own, or aclose() the "
                "earlier one"
            )

    def stop(self) -> None:
        super().stop()
        self._answering.discard(self)
        responder, self._responder = self._responder, None
        if responder is not None:
            start_thread(responder.close, "aiosync-store")
        self._thread.close()
