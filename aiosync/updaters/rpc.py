"""Updates of remote collectors of torch RPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiosync.transports.torch_rpc.transport import RPCTransport
from aiosync.updaters.remote import RemoteCollectorsUpdater

__all__ = ["RPCWeightUpdater"]


class RPCWeightUpdater(RemoteCollectorsUpdater):
    """Calls ``update_policy_weights_(weights)`` of all remote collectors concurrently.

    Args:
        collector_infos: WorkerInfo or name of each collector's process.
        collector_class: the collectors' class.
        collector_rrefs: an RRef to each collector.
        policy_weights: a module, a TensorDict or a dict; pushed if no weights are given.
        num_workers: the number of collectors.
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
