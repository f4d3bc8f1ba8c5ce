"""Connections whose weights go from rank to rank: frames over a socket, that much is told of how to get there
by somebody else; the process groups meet in a store of torch.distributed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from aiosync._deadline import Deadline
from aiosync.transports.address import Address
from aiosync.transports.base import Listener, Transport
from aiosync.transports.rendezvous import Meeting
from aiosync.transports.tcp import DialledTransport
from aiosync.transports.tcp_listener import TCPListener

__all__ = ["Place", "RankedListener", "RankedTransport"]


class Place(msgspec.Struct, frozen=True):
    """Where a sender listens, and what it is to be told there."""

    host: str
    port: int
    token: bytes

    def __repr__(self) -> str:
        return f"Place({self.host!r}, {self.port}, <secret>)"


class RankedTransport(DialledTransport):
    """A worker's connection to its sender; a subclass finds out where that is."""

    def __init__(self) -> None:
        super().__init__(Address("127.0.0.1", 0))

    async def open(self, deadline: Deadline) -> None:
        """Find the sender, and connect to it.

        Raises:
            InvalidArgumentError, NotInitializedError: there is no way to find it.
            WorkerLostError: it is not there, or no more.
            SyncTimeoutError: it did not come in time.
        """
        place = await self._find(deadline)
        self.trouble = ""
        self.secret = place.token
        self._address = Address(place.host, place.port)
        self.peer_name = f"rank 0 at {self._address}"
        await super().open(deadline)

    @abstractmethod
    async def _find(self, deadline: Deadline) -> Place:
        """Where the sender is; raises as :meth:`open` does."""

    @abstractmethod
    def connection(self) -> Any:
        """A connection to the store for whoever blocks in it. Blocking."""

    def trust(self) -> None:
        """The sender has authenticated: its updates may come, and what they bring comes another way."""
        super().trust()
        if self._channel is not None:
            self._channel.decoder.bare = True


class RankedListener(Listener):
    """Where workers connect; a subclass tells them where that is.

    Args:
        meeting: the store.
        token: what workers are to prove that they know.

    Attributes:
        meeting: how workers get to the store.
        place: how they get here.
    """

    def __init__(self, meeting: Meeting, token: bytes) -> None:
        self.meeting, self._store = meeting.open()
        self._tcp = TCPListener(Address(self.meeting.bind, 0))
        self.patience = self._tcp.patience
        self.place = Place(self.meeting.reachable, self._tcp.address.port, bytes(bytearray(token)))

    def connection(self) -> Any:
        """A connection to the store for whoever blocks in it."""
        return self._store.clone()

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """See :class:`Listener`."""
        await self._tcp.listen(on_connection, on_lost)

    def forget(self) -> None:
        """See :class:`Listener`."""
        self._tcp.forget()

    def stop(self) -> None:
        """See :class:`Listener`."""
        self._tcp.stop()

    def close(self) -> None:
        """See :class:`Listener`."""
        self.stop()
        self._tcp.close()
        self._store = None
