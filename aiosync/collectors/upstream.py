"""A collector as a worker of another collector, or of a trainer: the calls that receive weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from aiosync._deadline import Deadline
from aiosync.collectors.controls import Controls
from aiosync.collectors.pool import Pool
from aiosync.collectors.worker import cancel_all
from aiosync.collectors.worker_spec import POLICY
from aiosync.errors import InvalidArgumentError, NotInitializedError, WorkerLostError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.weights.strategy import WeightStrategy


class UpstreamControls(Controls):
    """The calls that receive weights. An update goes to the collector's own workers first."""

    @property
    def worker_idx(self) -> int | None:
        """The index of this collector among the workers of another collector."""
        return self.config.weights.worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        weights = replace(self.config.weights, worker_idx=value)
        self.config = replace(self.config, weights=weights)

    async def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Make this collector a worker of another collector, or of a trainer; as ``weight_recv_schemes=``.

        Args:
            weight_recv_schemes: model id -> scheme. A scheme that received a model until now is closed.
            synchronize_weights: connect the schemes, if this collector is connected; otherwise
                :meth:`receive_weights` connects them.
            timeout: seconds.

        Raises:
            Exception: what ``init_on_receiver`` and ``connect`` of a scheme raise.
        """
        for model_id, scheme in weight_recv_schemes.items():
            previous = self._upstream.get(model_id)
            if previous is not None and previous is not scheme:
                await previous.aclose()
            self._init_receiver(model_id, scheme)
            self._upstream[model_id] = scheme
        if synchronize_weights and self._pool is not None:
            await self._connect_receivers(self._connected_pool, self._deadline(timeout))

    def _init_receiver(self, model_id: str, scheme: WeightSyncScheme) -> None:
        if not scheme.initialized_on_receiver:
            below = model_id in self._schemes or (self._updater is not None and model_id == POLICY)
            # With a context, updates also go to the workers.
            where = {"context": self} if below else {"model": self.get_model(model_id)}
            index = self.config.weights.worker_idx
            scheme.init_on_receiver(model_id=model_id, worker_idx=index, **where)

    async def _connect_receivers(self, pool: Pool, deadline: Deadline) -> None:
        """Connect those of ``weight_recv_schemes`` that are not: this collector becomes a worker of another
        collector. Raises what ``connect`` of a scheme raises."""
        for model_id, scheme in self._upstream.items():
            if scheme.synchronized_on_receiver:
                continue
            self._init_receiver(model_id, scheme)
            self._following.push_async_callback(scheme.aclose)
            await scheme.connect(timeout=deadline.remaining())
            receiving = asyncio.create_task(_receive_until_closed(scheme, pool), name="aiosync-following")
            self._following.push_async_callback(cancel_all, receiving)

    async def receive_weights(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Update this collector's own policy.

        Args:
            policy_or_weights: a module, TensorDict or dict to apply to the policy in this process;
                :meth:`update_policy_weights_` sends it to the workers. None: wait for an update through
                ``weight_recv_schemes``, which also reaches the workers. Returns without one at the timeout.
            weights: the same, as a keyword.
            policy: the same, as a keyword.
            timeout: seconds.

        Raises:
            InvalidArgumentError: weights were given twice, or although there are ``weight_recv_schemes``.
            NotInitializedError: neither weights nor ``weight_recv_schemes`` were given, or this process has
                no policy.
            LayoutMismatchError: the weights do not fit the policy.
        """
        given = [each for each in (policy_or_weights, weights, policy) if each is not None]
        if len(given) > 1:
            raise InvalidArgumentError("got several of policy_or_weights, weights and policy: expected one")
        policy_or_weights = given[0] if given else None
        deadline = self._deadline(timeout)
        if self._upstream and policy_or_weights is not None:
            raise InvalidArgumentError(
                "this collector has weight_recv_schemes: call receive_weights() without weights"
            )
        if self._upstream:
            await self._connect_receivers(self._connected_pool, deadline)
            for scheme in self._upstream.values():
                await scheme.receive(deadline.remaining())
            return
        if policy_or_weights is None:
            raise NotInitializedError(
                "receive_weights() needs weights, or a collector with weight_recv_schemes="
            )
        model = self.policy
        if not isinstance(model, nn.Module):
            raise NotInitializedError("receive_weights() needs a collector whose policy is a module")
        strategy = WeightStrategy(peft="as_is")
        strategy.apply_weights(model, strategy.extract_weights(policy_or_weights))


async def _receive_until_closed(scheme: WeightSyncScheme, pool: Pool) -> None:
    """Receive until the sender closes. If the sender is lost, the collector's next call raises."""
    receiver = scheme.get_receiver()
    await receiver.run()
    if receiver.lost:
        pool.fail(WorkerLostError((), receiver.ended or "unknown"))
