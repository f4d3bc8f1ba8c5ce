"""torch RPC, used alone."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from aiosync._deadline import Deadline
from aiosync.errors import NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.rpc import RPCWeightSyncScheme
from aiosync.schemes.standalone.base import init_sender
from aiosync.schemes.standalone.offers import Key, offer
from aiosync.schemes.standalone.remote import RemoteTransport
from aiosync.transports.torch_rpc.transport import RPCObject

_MODEL = "policy"


class RPCTransport(RemoteTransport):
    """Sends weights to one object in another process of torch RPC, without a scheme.

    The sender gives all arguments. The weights are sent from rank to rank, or viewed in the sender's memory
    by a worker on the same machine; see :class:`~aiosync.RPCWeightSyncScheme`. In the worker's process either
    an ``RPCTransport()`` without arguments receives, which was created before the first send; or the object
    has the model, as ``policy`` or by ``get_model("policy")``, and a receiver starts beside it.

    Args:
        collector_info: the WorkerInfo, or the name, of the process that owns the object.
        collector_rref: the RRef of the object. Without info and RRef, calls that send do nothing.
        collector_class: the class whose methods ``call()`` calls; None: the object's class.
        worker_rank: the process's rank. The sender has to give it.
        timeout: seconds that a call may take by default; None: the environment's ``AIOSYNC_TIMEOUT``, else
            120.
    """

    _fills_buffer: ClassVar[bool] = True

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: type[Any] | None = None,
        worker_rank: int | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        self.collector_info = collector_info
        self.collector_rref = collector_rref
        self.collector_class = collector_class
        self.worker_rank = worker_rank
        self._expect()

    @property
    def offer_key(self) -> Key:
        """Under which the sender offers its address in this process."""
        return "torch RPC", 0

    def _remote(self) -> RPCObject | None:
        if self.collector_info is None or self.collector_rref is None:
            return None
        return RPCObject(self.collector_info, self.collector_rref, self.collector_class)

    async def wait_ack(self, *, timeout: float | None = None) -> None:
        """As the base class; without an object to send to it does nothing."""
        if self._may_send:
            await super().wait_ack(timeout=timeout)

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        if self.worker_rank is None:
            raise NotInitializedError("worker_rank must be set: it is the rank of the object's process")
        remote = self._remote()
        assert remote is not None
        return init_sender(_ObjectScheme(remote, self.offer_key), model, model_id=_MODEL)


class _ObjectScheme(RPCWeightSyncScheme):
    """Its one worker is in the process of a remote object."""

    def __init__(self, remote: RPCObject, key: Key) -> None:
        super().__init__()
        self._object, self._key = remote, key

    async def _before_connect(self, weights: Any, deadline: Deadline) -> Any:
        await self._object.apply(offer, self, self._key, _MODEL, timeout=deadline.remaining())
        return weights
