"""Weights between processes that take part in torch RPC."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.context import BaseContext
from typing import Any, Unpack

from aiosync._deadline import Deadline
from aiosync._options import CopyOptions, StrategyName
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.attach import all_joined, enlist
from aiosync.schemes.contexts import adapter_for
from aiosync.schemes.distributed import ProcessGroupScheme
from aiosync.transfer.process_group import Collective
from aiosync.transports.base import Listener
from aiosync.transports.torch_rpc.rendezvous import RPCListener, RPCWorkerTransport, SenderInfo
from aiosync.transports.torch_rpc.transport import RPCObject, rank_here


class RPCWeightSyncScheme(ProcessGroupScheme):
    """Sends weights to workers that torch RPC connects, from rank to rank as
    :class:`~aiosync.DistributedWeightSyncScheme` does.

    The caller calls ``rpc.init_rpc()`` before initialising the scheme, and closes the scheme before
    ``rpc.shutdown()`` (which does not wait for it). A worker calls ``init_on_receiver`` and ``connect`` as
    with any other scheme. Or the sender's context has ``collector_infos``, ``collector_rrefs`` and
    ``collector_class``, as torchrl's RPCCollector does. Then :meth:`connect` starts a receiver beside each
    remote object, in a thread. It looks the model up by ``model_id``, never applies an update during the
    model's forward pass, and calls the object's ``update_policy_weights_`` with each update.

    The limits of process groups apply: see :class:`~aiosync.DistributedWeightSyncScheme`. torch RPC does not
    accept a new process in place of a dead one. Such a process finds the sender by the sender's pickled
    scheme, without torch RPC. All members of the RPC group are trusted, as in torch RPC itself, which
    unpickles what it receives.

    Args:
        strategy: see :class:`~aiosync.WeightSyncScheme`.
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until the weights are applied, if ``wait=`` is not given.
        sender: the sender's name in torch RPC, for workers without the sender's scheme; None: rank 0's.
        collective: ``"p2p"`` or ``"broadcast"``, see :class:`~aiosync.DistributedWeightSyncScheme`.
        share_memory: whether workers on the sender's machine view its slots, see the same class.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: the backend is not available.
    """

    backends = ("rpc",)
    _fields = (*ProcessGroupScheme._fields, "sender_name", "known")
    _known: SenderInfo | None = None

    def __init__(
        self,
        strategy: StrategyName = "tensordict",
        *,
        backend: str = "gloo",
        sync: bool = True,
        sender: str | None = None,
        collective: Collective = "p2p",
        share_memory: bool = True,
        reconnect_for: float = 60.0,
        **options: Unpack[CopyOptions],
    ) -> None:
        super().__init__(
            backend, collective, share_memory, reconnect_for, strategy=strategy, sync=sync, **options
        )
        self._sender_name = sender

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        # The remote objects that connect() enlists as workers.
        self._remote: tuple[RPCObject, ...] = ()

    @property
    def port_of_sender(self) -> int:
        return self._known.address.port if self._known is not None else 0

    def init_on_sender(self, **arguments: Any) -> None:
        """See :meth:`WeightSyncScheme.init_on_sender`; a ``context`` may have remote objects.

        Raises:
            NotInitializedError: this process has not joined torch RPC.
            InvalidArgumentError: the number of remote objects is not the number of workers.
        """
        super().init_on_sender(**arguments)
        context = arguments.get("context")
        rrefs = getattr(context, "collector_rrefs", None)
        if rrefs is None:
            return
        assert self._plan is not None
        infos, workers = getattr(context, "collector_infos", None) or (), self._plan.workers
        if not len(infos) == len(rrefs) == len(workers):
            raise InvalidArgumentError(
                f"the context has {len(infos)} collector_infos and {len(rrefs)} collector_rrefs for "
                f"{len(workers)} workers: expected one of each per worker"
            )
        owner = getattr(context, "collector_class", None)
        self._remote = tuple(
            RPCObject(info, rref, owner, worker_idx=worker)
            for worker, info, rref in zip(workers, infos, rrefs, strict=True)
        )

    async def _before_connect(self, weights: Any, deadline: Deadline) -> Any:
        await all_joined(
            remote.apply(enlist, self, self._model_id, remote.worker_idx, timeout=deadline.remaining())
            for remote in self._remote
        )
        return weights

    @property
    def sender_enlists(self) -> bool:
        peer = adapter_for(self.context)
        return self._known is None and peer is not None and peer.is_enlisted(self.context)

    def _usual_index(self) -> int | None:
        rank = rank_here()
        return rank - 1 if rank > 0 else None

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        listener = RPCListener(self._model_id, self._token, share_memory=self._shares)
        self._known = listener.sender_info
        return listener

    def create_transport(self, *, worker_idx: int) -> RPCWorkerTransport:
        return RPCWorkerTransport(self._model_id, self._sender_name, self._known, share_memory=self._shares)

    def _release(self) -> None:
        self._remote = ()
