"""The connection of :class:`~aiosync.DistributedWeightSyncScheme`.

The two sides find each other in a store. Frames then go over a socket, because a store does not report the
death of a process, and a thread that waits in a store can be woken only through the store. A process group
sends the weights.
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
from aiosync.transports.torch_distributed.connection import (
    SenderAddress,
    TorchDistributedListener,
    TorchDistributedTransport,
)
from aiosync.transports.torch_distributed.store import StoreAddress, StoreLookup, StoreResponder

__all__ = ["DistributedListener", "DistributedTransport"]


class DistributedTransport(TorchDistributedTransport):
    """A worker's connection to its sender, which it finds in a store.

    Args:
        store_address: the store.
        model_id: the model's name.
        rank: the worker's rank.
        share_memory: whether the worker may map the sender's memory, if it can.

    Attributes:
        store: a connection to the store; None until the sender has answered.
    """

    def __init__(
        self, store_address: StoreAddress, model_id: str | None, rank: int, *, share_memory: bool = True
    ) -> None:
        super().__init__(share_memory=share_memory)
        self.rank = rank
        self.store: Any = None
        self._store_address = store_address
        self._model_id = model_id

    def connection(self) -> Any:
        return self.store.clone()

    async def _find(self, deadline: Deadline) -> SenderAddress:
        store_address = self._store_address
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
        answer, self.store = found
        return msgspec.msgpack.decode(answer, type=SenderAddress)


class DistributedListener(TorchDistributedListener):
    """Listens for workers, and publishes its address in a store.

    Args:
        store_address: the store.
        model_id: the model's name.
        token: the secret that workers prove to know.
        share_memory: whether workers on this machine may map the sender's memory.
    """

    def __init__(
        self, store_address: StoreAddress, model_id: str | None, token: bytes, *, share_memory: bool = True
    ) -> None:
        super().__init__(store_address, token, share_memory=share_memory)
        self._make_responder: Callable[[], StoreResponder] | None = partial(
            StoreResponder, self._store, model_id, msgspec.msgpack.encode(self.address)
        )
        self._responder: StoreResponder | None = None
        self._thread = DetachedThread("aiosync-store")

    async def listen(
        self, on_connection: Callable[[Transport], None], on_lost: Callable[[int, str], None]
    ) -> None:
        assert self._make_responder is not None
        await super().listen(on_connection, on_lost)
        self._responder = await abandonable(self._make_responder, "aiosync-store")
        self._thread.wake = self._responder.close
        self._thread.submit(self._responder.run)

    def stop(self) -> None:
        super().stop()
        responder, self._responder = self._responder, None
        if responder is not None:
            start_thread(responder.close, "aiosync-store")
        self._thread.close()

    def close(self) -> None:
        super().close()
        self._make_responder = None
