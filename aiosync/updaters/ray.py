"""Updates of remote collectors that are Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiosync.errors import InvalidArgumentError
from aiosync.transports.ray.calls import handle_of
from aiosync.transports.ray.transport import PutWeights, RayTransport, put_weights
from aiosync.updaters.base import WorkerId
from aiosync.updaters.remote import RemoteCollectorsUpdater

__all__ = ["RayWeightUpdater"]


class RayWeightUpdater(RemoteCollectorsUpdater):
    """Puts the weights into Ray's object store once, and calls ``update_policy_weights_(weights)`` of all
    remote collectors concurrently.

    Args:
        policy_weights: a module, a TensorDict or a dict; pushed if no weights are given.
        remote_collectors: the actors' handles.
        max_interval: how many pushes skip a worker between two that update it. 0: no push skips it.
    """

    def __init__(self, policy_weights: Any, remote_collectors: Sequence[Any], max_interval: int = 0) -> None:
        if isinstance(max_interval, bool) or not isinstance(max_interval, int):
            raise InvalidArgumentError(f"max_interval: expected an integer, got {max_interval!r}")
        super().__init__(policy_weights, len(remote_collectors))
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self._left_out = [0] * len(remote_collectors)

    def _skip_update(self, worker_id: WorkerId) -> bool:
        if not isinstance(worker_id, int) or not 0 <= worker_id < self.num_workers:
            return False  # unknown worker: the transport's lookup raises
        self._left_out[worker_id] += 1
        if self._left_out[worker_id] <= self.max_interval:
            return True
        self._left_out[worker_id] = 0
        return False

    async def _prepared(self, weights: Any) -> PutWeights:
        return await put_weights(weights)

    def _make_transport(self, worker: int) -> RayTransport:
        return RayTransport(handle_of(self.remote_collectors[worker]), worker_idx=worker)
