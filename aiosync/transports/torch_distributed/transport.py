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

import msgspec

from aiosync._deadline import Deadline
from aiosync.transports._offload import DetachedThread, abandonable, start_thread
from aiosync.transports.base import Transport
from aiosync.transports.tcp.address import Address
from aiosync.transports.torch_distributed.connection import RankedListener, RankedTransport, SenderAddress
from aiosync.transports.torch_distributed.store import StoreAddress, StoreLookup, StoreResponder

__all__ = ["DistributedListener", "DistributedTransport"]


class DistributedTransport(RankedTransport):
    """A worker's connection to its sender, by way of a store.

    Args:
        meeting: which store.
        model_id: the model's name.
        rank: the worker's.
        share_memory: whether the sender's memory may be viewed, if that can be done.

    Attributes:
        store: a connection to the store, once :meth:`open` has met the sender there.
    """

    def __init__(
        self, meeting: StoreAddress, model_id: str | None, rank: int, *, share_memory: bool = True
    ) -> None:
        super().__init__(share_memory=share_memory)
        self.rank = rank
        self.store: Any = None
        self._meeting = meeting
        self._model_id = model_id

    def connection(self) -> Any:
        return self.store.clone()

    async def _find(self, deadline: Deadline) -> SenderAddress:
        meeting = self._meeting
        search = StoreLookup(meeting, self._model_id)
        found = None
        try:
            async with asyncio.timeout(deadline.remaining()):
                meeting.check_known()
                if meeting.store is None:
                    # torch would wait for it in a call that cannot be interrupted.
                    self._address = Address(meeting.host, meeting.port)
                    (await self._dial(deadline)).close()
                self.trouble = "no sender of this model came to the store"
                found = await abandonable(search.run, "aiosync-meet")
        except TimeoutError:
            raise deadline.error("connect", hint=self.trouble) from None
        finally:
            if found is None:
                start_thread(search.give_up, "aiosync-meet")
        assert found is not None
        answer, self.store = found
        return msgspec.msgpack.decode(answer, type=SenderAddress)


class DistributedListener(RankedListener):
    """Where workers connect; a store tells them where that is.

    Args:
        meeting: which store.
        model_id: the model's name.
        token: what workers are to prove that they know.
        share_memory: whether workers on this machine may come by the shorter way.
    """

    def __init__(
        self, meeting: StoreAddress, model_id: str | None, token: bytes, *, share_memory: bool = True
    ) -> None:
        super().__init__(meeting, token, share_memory=share_memory)
        self._make_reception: Callable[[], StoreResponder] | None = partial(
            StoreResponder, self._store, model_id, msgspec.msgpack.encode(self.place)
        )
        self._reception: StoreResponder | None = None
        self._thread = DetachedThread("aiosync-reception")

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        assert self._make_reception is not None
        await super().listen(on_connection, on_lost)
        self._reception = await abandonable(self._make_reception, "aiosync-reception")
        self._thread.wake = self._reception.close
        self._thread.submit(self._reception.run)

    def stop(self) -> None:
        super().stop()
        reception, self._reception = self._reception, None
        if reception is not None:
            start_thread(reception.close, "aiosync-reception")
        self._thread.close()

    def close(self) -> None:
        super().close()
        self._make_reception = None
