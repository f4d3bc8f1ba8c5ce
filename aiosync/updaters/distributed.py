"""Updates of workers as torchrl's DistributedCollector sends them: announced in a store."""

from __future__ import annotations

from typing import Any

from aiosync.errors import WorkerError
from aiosync.transports._offload import DetachedThread, detached
from aiosync.updaters.base import WeightUpdaterBase, WorkerId, WorkerIds
from aiosync.weights.strategy import to_tensordict

__all__ = ["DistributedWeightUpdater"]

_DONE = (b"updated", "updated")


class DistributedWeightUpdater(WeightUpdaterBase):
    """Sends weights from rank 0 to workers over the default process group, to one worker after the other.

    For each worker: set ``NODE_<rank>_in`` to ``update_weights`` in the store, send the weights with
    TensorDict's ``send``, and wait until ``NODE_<rank>_out`` is ``updated``. All of this blocks, in a thread.
    After a timeout or a cancellation the thread runs on until torch.distributed returns. Between a trainer
    and workers of aiosync, use :class:`~aiosync.DistributedWeightSyncScheme`.

    Args:
        store: a torch.distributed store, or any object with its ``set``, ``get`` and ``delete_key``.
        policy_weights: a TensorDict; pushed if no weights are given.
        num_workers: the number of workers; their ranks begin at 1.
        sync: wait until torch.distributed has sent the weights before waiting for the answer.
    """

    def __init__(self, store: Any, policy_weights: Any, num_workers: int, sync: bool) -> None:
        self._store = store
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self._sync = sync
        self._thread = DetachedThread("aiosync-updater")

    def all_worker_ids(self) -> list[int]:
        """Return the workers' ranks, from 1."""
        return list(range(1, self.num_workers + 1))

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        # An object with a ``send`` method is sent unchanged.
        given = policy_or_weights
        return given if hasattr(given, "send") else to_tensordict(super()._maybe_map_weights(given))

    async def _push_weights(self, *, policy_or_weights: Any, worker_ids: WorkerIds) -> None:
        ranks = self._workers(worker_ids) or ()
        for rank in ranks:
            self._check(rank)  # before the first worker is notified
        await super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=ranks)

    def _check(self, rank: WorkerId | None) -> None:
        if not isinstance(rank, int) or not 1 <= rank <= self.num_workers:
            raise WorkerError(f"worker ranks are 1 to {self.num_workers}, got {rank!r}")

    async def _sync_weights_with_worker(
        self, *, worker_id: WorkerId | None = None, server_weights: Any
    ) -> None:
        self._check(worker_id)
        await detached(self._thread, lambda: self._tell(worker_id, server_weights))

    async def aclose(self) -> None:
        self._thread.close()

    def _tell(self, rank: Any, weights: Any) -> None:
        store, answer = self._store, f"NODE_{rank}_out"
        store.set(f"NODE_{rank}_in", b"update_weights")
        (weights.send if self._sync else weights.isend)(rank)
        status = store.get(answer)
        if status not in _DONE:
            raise WorkerError(f"rank {rank}: expected the status 'updated' in the store, got {status!r}")
        store.delete_key(answer)
