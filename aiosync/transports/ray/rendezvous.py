"""The rendezvous of senders and workers under Ray: the pickled scheme contains the sender's address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiosync._deadline import Deadline
from aiosync.transports.ray import ray_here
from aiosync.transports.ray.object_store import open_keeper
from aiosync.transports.torch_distributed.store import StoreAddress
from aiosync.transports.torch_distributed.transport import (
    SenderAddress,
    TorchDistributedListener,
    TorchDistributedTransport,
)


@dataclass(frozen=True)
class SenderInfo:
    """What a pickled scheme contains about its sender."""

    address: SenderAddress
    store: StoreAddress  # through which process groups are made
    ref_keeper: Any  # handle of the actor that keeps references to versions; None: the store is not used


class RayWorkerTransport(TorchDistributedTransport):
    """A worker's connection to its sender. ``carries``: whether the weights are sent over it."""

    def __init__(self, sender: SenderInfo, *, share_memory: bool, carries: bool) -> None:
        super().__init__(share_memory=share_memory, store_address=sender.store)
        self._sender = sender
        self._bare = not carries

    async def _find(self, deadline: Deadline) -> SenderAddress:
        return self._sender.address


class RayListener(TorchDistributedListener):
    """Listens for workers at the IP address of this node of the cluster.

    ``bring_back`` is called with a worker's index when the worker disconnects, and restarts it. ``stores``:
    whether versions are put into the object store.
    """

    def __init__(
        self, token: bytes, bring_back: Callable[[int], Awaitable[None]], *, share_memory: bool, stores: bool
    ) -> None:
        node = ray_here().util.get_node_ip_address()
        super().__init__(StoreAddress(None, node), token, share_memory=share_memory)
        self.sender_info = SenderInfo(self.address, self.store_address, open_keeper() if stores else None)
        self._bring_back = bring_back

    async def lost(self, worker: int) -> None:
        await self._bring_back(worker)
