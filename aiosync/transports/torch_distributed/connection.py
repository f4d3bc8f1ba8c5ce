"""Connections whose weights go from rank to rank.

Frames go over a socket, whose address the worker gets by other means. The process groups meet in a store of
torch.distributed.

A worker on the sender's machine that can read the sender's memory gets another connection, the one that
:class:`~aiosync.SharedMemWeightSyncScheme` has: then there is nothing to be sent.
"""

from __future__ import annotations

import os
import secrets
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from aiosync._deadline import Deadline
from aiosync.errors import ArenaAllocationError, ProtocolError, WorkerLostError
from aiosync.protocol.framing import Inbound
from aiosync.transports.base import Listener, Transport
from aiosync.transports.tcp.address import Address
from aiosync.transports.tcp.connection import DialledTransport
from aiosync.transports.tcp.listener import TCPListener
from aiosync.transports.torch_distributed.store import StoreAddress
from aiosync.transports.unix_socket import SharedMemTransport, UnixListener
from aiosync.weights.segment import Segment

__all__ = ["RankedListener", "RankedTransport", "SenderAddress"]


class Near(msgspec.Struct, frozen=True):
    """How workers on the sender's machine get to it.

    Attributes:
        address: of the socket.
        user: whose it is. Other users cannot connect.
        sample: the handle of some memory of the sender's.
        mark: what is in there. (Process ids, and numbers of files, mean something else in another container.)
    """

    address: str
    user: int
    sample: dict[str, int | str]
    mark: bytes

    def within_reach(self) -> bool:
        """Whether this process would be let in, and can map the sender's memory."""
        match self.sample:
            case {"kind": "memfd", "pid": int(pid), "fd": int(fd)} if self.user == os.geteuid():
                try:
                    # Opening something else might wait, or do something.
                    if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:"):
                        return False
                    found = Segment.attach(dict(self.sample)).buffer
                except (OSError, ProtocolError):
                    return False
                return found.numpy().tobytes()[: len(self.mark)] == self.mark
        return False


class SenderAddress(msgspec.Struct, frozen=True):
    """Where a sender listens, and what it is to be told there."""

    host: str
    port: int
    token: bytes
    near: Near | None = None

    def __repr__(self) -> str:
        return f"SenderAddress({self.host!r}, {self.port}, <secret>)"


class RankedTransport(DialledTransport):
    """A worker's connection to its sender; a subclass finds out where that is.

    Args:
        share_memory: whether the sender's memory may be viewed, if that can be done.
    """

    def __init__(self, *, share_memory: bool) -> None:
        super().__init__(Address("127.0.0.1", 0))
        self._share_memory = share_memory

    async def reach(self, deadline: Deadline) -> Transport:
        """Find the sender, and connect to it; by the shorter way, if it is on this machine.

        Raises:
            InvalidArgumentError, NotInitializedError: there is no way to find it.
            WorkerLostError: it is not there, or no more.
            SyncTimeoutError: it did not come in time.
        """
        place = await self._find(deadline)
        near = place.near if self._share_memory else None
        if near is not None and near.within_reach():
            shorter = SharedMemTransport(near.address)
            shorter.secret = place.token
            try:
                await shorter.open(deadline)
            except WorkerLostError:
                await shorter.aclose()  # going the longer way, one finds out why
            except BaseException:
                await shorter.aclose()
                raise
            else:
                shorter.reached = True
                return shorter
        await self._go_to(place, deadline)
        return self

    async def open(self, deadline: Deadline) -> None:
        """Find the sender, and connect to it; raises as :meth:`reach`."""
        await self._go_to(await self._find(deadline), deadline)

    async def _go_to(self, place: SenderAddress, deadline: Deadline) -> None:
        self.trouble = ""
        self.secret = place.token
        self._address = Address(place.host, place.port)
        self.peer_name = f"rank 0 at {self._address}"
        await super().open(deadline)

    @abstractmethod
    async def _find(self, deadline: Deadline) -> SenderAddress:
        """Where the sender is; raises as :meth:`reach` does."""

    @abstractmethod
    def connection(self) -> Any:
        """A connection to the store for a thread that blocks in it. Blocking."""

    def trust(self, inbound: Inbound) -> None:
        """The sender has authenticated: its updates may come, and what they bring comes another way."""
        super().trust(inbound)
        if self._socket is not None:
            self._socket.decoder.bare = True


class RankedListener(Listener):
    """Where workers connect; a subclass tells them where that is.

    Args:
        meeting: the store.
        token: what workers are to prove that they know.
        share_memory: whether workers on this machine may come by the shorter way.

    Attributes:
        meeting: how workers get to the store.
        place: how they get here.
    """

    def __init__(self, meeting: StoreAddress, token: bytes, *, share_memory: bool) -> None:
        self.meeting, self._store = meeting.open()
        host = self.meeting.reachable
        tcp = TCPListener(Address(self.meeting.bind, 0))
        self._doors: list[TCPListener | UnixListener] = [tcp]
        self.patience = tcp.patience
        self._sample: Segment | None = None
        near = self._open_near() if share_memory and "memfd_create" in dir(os) else None
        self.place = SenderAddress(host, tcp.address.port, bytes(bytearray(token)), near)

    def _open_near(self) -> Near | None:
        mark = secrets.token_bytes(32)
        with suppress(ArenaAllocationError, OSError):  # not allowed to, perhaps; it is not needed
            self._sample = sample = Segment.shared(len(mark))
            door = UnixListener()
            self._doors.append(door)
            sample.buffer.numpy().data[:] = mark
            return Near(door.address, os.geteuid(), dict(sample.handle or {}), mark)
        return None

    def connection(self) -> Any:
        """A connection to the store for a thread that blocks in it."""
        return self._store.clone()

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        for door in self._doors:
            await door.listen(on_connection, on_lost)

    def forget(self) -> None:
        for door in self._doors:
            door.forget()
        if self._sample is not None:
            self._sample.close()

    def stop(self) -> None:
        for door in self._doors:
            door.stop()

    def close(self) -> None:
        self.stop()
        for door in self._doors:
            door.close()
        if self._sample is not None:
            self._sample.close()
        self._store = None
