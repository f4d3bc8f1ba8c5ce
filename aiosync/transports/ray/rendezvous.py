"""How a worker gets to a sender that takes part in a Ray cluster: the pickled scheme says it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiosync._deadline import Deadline
from aiosync.protocol.framing import Inbound
from aiosync.transports.ray.calls import ray_here
from aiosync.transports.ray.object_store import open_office
from aiosync.transports.tcp.connection import DialledTransport
from aiosync.transports.torch_distributed.connection import RankedListener, RankedTransport, SenderAddress
from aiosync.transports.torch_distributed.store import StoreAddress

__all__ = ["RayListener", "RayWorkerTransport", "SenderInfo"]


@dataclass(frozen=True)
class SenderInfo:
    """What a pickled scheme tells of its sender.

    Attributes:
        place: where it is.
        meeting: the store in which process groups meet.
        office: keeps references to what lies in the object store.
    """

    place: SenderAddress
    meeting: StoreAddress
    office: Any


class RayWorkerTransport(RankedTransport):
    """A worker's connection to its sender.

    Args:
        known: what the sender has published about itself.
        share_memory: whether the sender's memory may be viewed, if that can be done.
        carries: whether the connection itself carries the weights.
    """

    def __init__(self, known: SenderInfo, *, share_memory: bool, carries: bool) -> None:
        super().__init__(share_memory=share_memory)
        self._known = known
        self._carries = carries
        self._store: Any = None

    def connection(self) -> Any:
        if self._store is None:
            self._store = self._known.meeting.connect()
        return self._store.clone()

    def trust(self, inbound: Inbound) -> None:
        if self._carries:
            DialledTransport.trust(self, inbound)
        else:
            super().trust(inbound)

    async def _find(self, deadline: Deadline) -> SenderAddress:
        return self._known.place


class RayListener(RankedListener):
    """Where workers connect: on this node of the cluster.

    Args:
        token: what workers are to prove that they know.
        bring_back: called with the index of a worker that is gone.
        share_memory: whether workers on this machine may come by the shorter way.
        stores: whether versions go through the object store.

    Attributes:
        known: what a pickled scheme tells of this.

    Raises:
        NotInitializedError: this process takes no part in a cluster.
    """

    def __init__(
        self,
        token: bytes,
        bring_back: Callable[[int], Awaitable[None]],
        *,
        share_memory: bool,
        stores: bool,
    ) -> None:
        node = ray_here().util.get_node_ip_address()
        super().__init__(StoreAddress(None, node), token, share_memory=share_memory)
        self.known = SenderInfo(self.place, self.meeting, open_office() if stores else None)
        self._bring_back = bring_back

    async def lost(self, worker: int) -> None:
        await self._bring_back(worker)
