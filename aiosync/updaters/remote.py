"""Base of the updaters of remote collectors."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from aiosync.errors import UnknownWorkerError
from aiosync.transports.remote_calls import CallingTransport
from aiosync.updaters.base import WeightUpdaterBase, WorkerId, WorkerIds, remaining

__all__ = ["RemoteCollectorsUpdater"]

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
        self._transports: dict[int, CallingTransport] = {}

    @abstractmethod
    def _make_transport(self, worker: int) -> CallingTransport:
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
        if not transports:
            return
        weights = await self._prepared(weights)
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

    def _transport(self, worker: WorkerId) -> CallingTransport:
        if not isinstance(worker, int) or not 0 <= worker < self.num_workers:
            raise UnknownWorkerError(worker, range(self.num_workers))
        if worker not in self._transports:
            self._transports[worker] = self._make_transport(worker)
        return self._transports[worker]

    async def _sync_weights_with_worker(
        self, *, worker_id: WorkerId | None = None, server_weights: Any
    ) -> None:
        workers = self.all_worker_ids() if worker_id is None else [worker_id]
        await self._send(server_weights, workers, True)

    async def aclose(self) -> None:
        """Release all resources; idempotent. The collectors stay open."""
        await self._settle(self._close())

    async def _close(self) -> None:
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.aclose()
