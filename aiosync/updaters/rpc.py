"""Remote collectors of torch RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiosync.errors import UnknownWorkerError
from aiosync.transports.rpc import RPCTransport
from aiosync.updaters.base import WeightUpdaterBase, WorkerId, WorkerIds, remaining

__all__ = ["RPCWeightUpdater"]

_EARLIER = 0.05
"""Seconds that a call is given less than the push has, so that it can still say which worker it was."""


class RPCWeightUpdater(WeightUpdaterBase):
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
        self.collector_infos = collector_infos
        self.collector_class = collector_class
        self.collector_rrefs = collector_rrefs
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self._transports: dict[int, RPCTransport] = {}

    def all_worker_ids(self) -> list[int]:
        """The workers' indices, from 0."""
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
        """See :meth:`WeightUpdaterBase.push_weights`. The healthy workers are updated also where others fail.

        Args:
            policy_or_weights: an ``nn.Module``, a TensorDict or a dict; None: :attr:`policy_weights`.
            worker_ids: a worker, several, or None for all.
            weights: another name of ``policy_or_weights``.
            wait: whether to wait until they have been applied; otherwise the next push does, and raises
                what was raised.
            timeout: seconds; None: the environment's ``AIOSYNC_TIMEOUT``, else 120.

        Raises:
            UnknownWorkerError: there is no such worker.
            RemoteApplyError: a collector raised.
            WorkerLostError: its process is gone.
            SyncTimeoutError: it did not answer in time.
        """
        given = policy_or_weights if policy_or_weights is not None else weights
        await self._push(given, worker_ids, timeout, wait=wait)

    async def _push_weights(
        self, *, policy_or_weights: Any, worker_ids: WorkerIds, wait: bool = True
    ) -> None:
        weights = policy_or_weights
        if weights is None:
            weights = await self._settle(self._get_server_weights())
        weights = await self._settle(self._maybe_map_weights(weights))
        workers = [
            worker
            for worker in self._workers(worker_ids) or ()
            if not await self._settle(self._skip_update(worker))
        ]
        await self._settle(self._send(weights, workers, wait))

    async def _send(self, weights: Any, workers: Sequence[WorkerId], wait: bool) -> None:
        transports = [self._transport(worker) for worker in workers]
        timeout = max(0.0, remaining() - _EARLIER)
        results = await asyncio.gather(
            *(
                transport.send_weights(weights, timeout=timeout)
                if wait
                else transport.send_weights_async(weights, timeout=timeout)
                for transport in transports
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _transport(self, worker: WorkerId) -> RPCTransport:
        if not isinstance(worker, int) or not 0 <= worker < self.num_workers:
            raise UnknownWorkerError(worker, range(self.num_workers))
        if worker not in self._transports:
            info, rref = self.collector_infos[worker], self.collector_rrefs[worker]
            self._transports[worker] = RPCTransport(info, rref, self.collector_class, worker_idx=worker)
        return self._transports[worker]

    async def _sync_weights_with_worker(
        self, *, worker_id: WorkerId | None = None, server_weights: Any
    ) -> None:
        workers = self.all_worker_ids() if worker_id is None else [worker_id]
        await self._send(server_weights, workers, True)

    async def aclose(self) -> None:
        """See :class:`WeightUpdaterBase`; the collectors stay."""
        await self._settle(self._close())

    async def _close(self) -> None:
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.aclose()
