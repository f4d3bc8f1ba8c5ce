"""The connection of :class:`~aiosync.DistributedWeightSyncScheme`: frames over a socket, found by a store.

A store cannot tell that the process at the other end has died, and who waits in one cannot be woken but by
it; a socket can, on the event loop. So the store is where the two sides meet, frames go over a socket, and
the weights from rank to rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiosync._deadline import Deadline
from aiosync.transports._offload import DetachedThread, abandonable, aside
from aiosync.transports.address import Address
from aiosync.transports.base import Listener, Transport
from aiosync.transports.rendezvous import Meeting, Place, Reception, Search
from aiosync.transports.tcp import DialledTransport
from aiosync.transports.tcp_listener import TCPListener

__all__ = ["DistributedListener", "DistributedTransport"]


class DistributedTransport(DialledTransport):
    """A worker's connection to its sender, by way of a store.

    Args:
        meeting: which store.
        model_id: the model's name.
        rank: the worker's.

    Attributes:
        store: a connection to the store, once :meth:`open` has met the sender there.
    """

    def __init__(self, meeting: Meeting, model_id: str | None, rank: int) -> None:
        super().__init__(Address("127.0.0.1", 0))
        self.rank = rank
        self.store: Any = None
        self._meeting = meeting
        self._model_id = model_id

    async def open(self, deadline: Deadline) -> None:
        """Meet the sender in the store, and connect to it.

        Raises:
            InvalidArgumentError: nobody said where the store is.
            WorkerLostError: there is no store, or it is no more.
            SyncTimeoutError: the sender did not come in time.
        """
        place = await self._meet(deadline)
        self.secret = place.token
        self._address = Address(place.host, place.port)
        self.peer_name = f"rank 0 at {self._address}"
        await super().open(deadline)

    def connection(self) -> Any:
        """A connection to the store for whoever blocks in it."""
        return self.store.clone()

    def trust(self) -> None:
        """The sender has authenticated: its updates may come, and what they bring comes another way."""
        super().trust()
        if self._channel is not None:
            self._channel.decoder.bare = True

    async def _meet(self, deadline: Deadline) -> Place:
        meeting = self._meeting
        search = Search(meeting, self._model_id)
        found = None
        try:
            async with asyncio.timeout(deadline.remaining()):
                meeting.check_known()
                if meeting.store is None:
                    # torch would wait for it where nobody can tell it to stop.
                    self._address = Address(meeting.host, meeting.port)
                    (await self._dial(deadline)).close()
                self.trouble = "no sender of this model came to the store"
                found = await abandonable(search.run, "aiosync-meet")
        except TimeoutError:
            raise deadline.error("connect", hint=self.trouble) from None
        finally:
            if found is None:
                aside(search.give_up, "aiosync-meet")
        assert found is not None
        place, self.store = found
        self.trouble = ""
        return place


class DistributedListener(Listener):
    """Where workers connect; a store tells them where that is.

    Args:
        meeting: which store.
        model_id: the model's name.
        token: what workers are to prove that they know.

    Attributes:
        meeting: how workers get to the store.
    """

    def __init__(self, meeting: Meeting, model_id: str | None, token: bytes) -> None:
        self.meeting, self._store = meeting.open()
        self._tcp = TCPListener(Address(self.meeting.bind, 0))
        self.patience = self._tcp.patience
        place = Place(self.meeting.reachable, self._tcp.address.port, bytes(bytearray(token)))
        self._make_reception: Callable[[], Reception] | None = partial(
            Reception, self._store, model_id, place
        )
        self._reception: Reception | None = None
        self._thread = DetachedThread("aiosync-reception")

    def connection(self) -> Any:
        """A connection to the store for whoever blocks in it."""
        return self._store.clone()

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        """See :class:`Listener`."""
        assert self._make_reception is not None
        await self._tcp.listen(on_connection, on_lost)
        self._reception = await abandonable(self._make_reception, "aiosync-reception")
        self._thread.wake = self._reception.close
        self._thread.submit(self._reception.run)

    def forget(self) -> None:
        """See :class:`Listener`."""
        self._tcp.forget()

    def stop(self) -> None:
        """See :class:`Listener`."""
        self._tcp.stop()
        reception, self._reception = self._reception, None
        if reception is not None:
            aside(reception.close, "aiosync-reception")
        self._thread.close()

    def close(self) -> None:
        """See :class:`Listener`."""
        self.stop()
        self._tcp.close()
        self._store = self._make_reception = None
