"""Remote collectors of torch RPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiosync.transports.torch_rpc.transport import RPCTransport
from aiosync.updaters.remote import RemoteCollectorsUpdater

__all__ = ["RPCWeightUpdater"]


class RPCWeightUpdater(RemoteCollectorsUpdater):
    """Calls ``update_policy_weights_(weights)`` of each remote collector; of all at the same time.

    Args:
        collector_infos: the WorkerInfos, or names, of the processes that have them.
        collector_class: their class.
        collector_rrefs: the RRefs to them.
        policy_weights: what is pushed where nothing is given: a module, a TensorDict or a dict.
        num_workers: how many there are.
    """

    def __init__(
        self,
        collector_infos: Sequence[Any],
        collector_class: type[Any] | None,
        collector_rrefs: Sequence[Any],
        policy_weights: Any,
        num_workers: int,
    ) -> None:
        super().__init__(policy_weights, num_workers)
        self.collector_infos = collector_infos
        self.collector_class = collector_class
        self.collector_rrefs = collector_rrefs

    def _make_transport(self, worker: int) -> RPCTransport:
        info, rref = self.collector_infos[worker], self.collector_rrefs[worker]
        return RPCTransport(info, rref, self.collector_class, worker_idx=worker)
