"""Updaters of workers in other processes: Ray actors, torch RPC, ranks of torch.distributed."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from aiosync.errors import InvalidArgumentError, UnknownWorkerError, WorkerError
from aiosync.sender.failures import with_notes
from aiosync.transports._offload import DetachedThread, detached
from aiosync.transports.ray.transport import PutWeights, RayActor, handle_of, put_weights
from aiosync.transports.remote_calls import RemoteObject
from aiosync.transports.torch_rpc.transport import RPCObject
from aiosync.updaters.base import WeightUpdaterBase, WorkerId, WorkerIds, current_deadline
from aiosync.weights.strategy import to_tensordict

_EARLIER = 0.05
"""Seconds that a call's timeout is shorter than the push's, so that the error can still name the worker."""


class RemoteCollectorsUpdater(WeightUpdaterBase):
    """Calls ``update_policy_weights_(weights)`` of all remote collectors concurrently.

    Args:
        policy_weights: a module, a TensorDict or a dict; pushed if no weights are given.
        num_workers: the number of collectors.
    """

    def __init__(self, policy_weights: Any, num_workers: int) -> None:
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self._transports: dict[int, RemoteObject] = {}

    @abstractmethod
    def _make_transport(self, worker: int) -> RemoteObject:
        """Return a transport to a worker's collector."""

    async def _prepared(self, weights: Any) -> Any:
        """Return what the transports send; called once per push."""
        return weights

    def all_worker_ids(self) -> list[int]:
        """Return the workers' indices, from 0."""
        return list(range(self.num_workers))

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    async def push_weights(
        self,
        policy_or_weights: Any = None,
        worker_ids: WorkerIds = None,
        *,
        weights: Any = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Update workers, then call the hooks. The healthy workers are updated even if others fail.

        Args:
            policy_or_weights: an ``nn.Module``, a TensorDict or a dict; None: :attr:`policy_weights`.
            worker_ids: a worker, several, or None for all.
            weights: another name of ``policy_or_weights``.
            wait: wait until the weights are applied. If False, the next push waits, and raises the errors of
                this one.
            timeout: seconds for the whole push; None: the environment variable ``AIOSYNC_TIMEOUT``, else 120.

        Raises:
            UnknownWorkerError: there is no such worker.
            RemoteApplyError: a collector raised.
            WorkerLostError: the process of a collector has ended.
            SyncTimeoutError: a collector did not answer in time.
        """
        given = policy_or_weights if policy_or_weights is not None else weights
        await self._push(given, worker_ids, timeout, wait=wait)

    async def _push_weights(
        self, *, policy_or_weights: Any, worker_ids: WorkerIds, wait: bool = True
    ) -> None:
        weights = await self._mapped(policy_or_weights)
        workers = [
            worker
            for worker in self._workers(worker_ids) or ()
            if not await self._settle(self._skip_update(worker))
        ]
        await self._settle(self._send(weights, workers, wait))

    async def _send(self, weights: Any, workers: Sequence[WorkerId], wait: bool) -> None:
        transports = [self._transport(worker) for worker in workers]
        if not transports:
            return
        weights = await self._prepared(weights)
        timeout = max(0.0, current_deadline().remaining() - _EARLIER)
        sends = [each.send_weights if wait else each.send_weights_async for each in transports]
        sending = (send(weights, timeout=timeout) for send in sends)
        results = await asyncio.gather(*sending, return_exceptions=True)
        if failures := [result for result in results if isinstance(result, BaseException)]:
            raise with_notes(failures)

    def _transport(self, worker: WorkerId) -> RemoteObject:
        if not isinstance(worker, int) or not 0 <= worker < self.num_workers:
            raise UnknownWorkerError(worker, range(self.num_workers))
        if worker not in self._transports:
            self._transports[worker] = self._make_transport(worker)
        return self._transports[worker]

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        workers = self.all_worker_ids() if worker_id is None else [worker_id]
        await self._send(server_weights, workers, True)

    async def aclose(self) -> None:
        """Release all resources; idempotent. The collectors stay open."""
        await self._settle(self._close())

    async def _close(self) -> None:
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.aclose()


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

    def _make_transport(self, worker: int) -> RayActor:
        return RayActor(handle_of(self.remote_collectors[worker]), worker_idx=worker)


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

    def _make_transport(self, worker: int) -> RPCObject:
        info, rref = self.collector_infos[worker], self.collector_rrefs[worker]
        return RPCObject(info, rref, self.collector_class, worker_idx=worker)


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
        # Ranks whose answer did not come in time. The next push would take it for its own.
        self._unanswered: set[Any] = set()

    def all_worker_ids(self) -> list[int]:
        """Return the workers' ranks, from 1."""
        return list(range(1, self.num_workers + 1))

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        if hasattr(policy_or_weights, "send"):
            return policy_or_weights
        return to_tensordict(super()._maybe_map_weights(policy_or_weights))

    async def _push_weights(self, *, policy_or_weights: Any, worker_ids: WorkerIds) -> None:
        ranks = self._workers(worker_ids) or ()
        for rank in ranks:
            self._check(rank)  # before the first worker is notified
        await super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=ranks)

    def _check(self, rank: WorkerId | None) -> None:
        if not isinstance(rank, int) or not 1 <= rank <= self.num_workers:
            raise WorkerError(f"worker ranks are 1 to {self.num_workers}, got {rank!r}")

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self._check(worker_id)
        await detached(self._thread, lambda: self._update_rank(worker_id, server_weights))

    async def aclose(self) -> None:
        self._thread.close()

    def _update_rank(self, rank: Any, weights: Any) -> None:
        store = self._store
        if rank in self._unanswered:
            self._unanswered.discard(rank)  # if none comes again, the rank may have been started again
            self._answer_of(rank)
        store.set(f"NODE_{rank}_in", b"update_weights")
        (weights.send if self._sync else weights.isend)(rank)
        self._unanswered.add(rank)
        status = self._answer_of(rank)
        if status not in (b"updated", "updated"):
            raise WorkerError(f"rank {rank}: expected the status 'updated' in the store, got {status!r}")

    def _answer_of(self, rank: Any) -> Any:
        answer = f"NODE_{rank}_out"
        status = self._store.get(answer)
        self._store.delete_key(answer)  # also a refusal: the next push would take it for its own answer
        self._unanswered.discard(rank)
        return status
