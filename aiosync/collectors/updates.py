"""How weights get from the trainer to the workers, and to the collector itself."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torch import nn

from aiosync._deadline import Deadline
from aiosync.collectors.config import WeightConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.proxy import WorkerProxy
from aiosync.collectors.worker import POLICY, cancel_all, policy_schemes
from aiosync.errors import InvalidArgumentError, NotInitializedError, SyncTimeoutError, WorkerLostError
from aiosync.receiver.listeners import in_format
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.joint import atomic
from aiosync.transports._offload import abandonable
from aiosync.weights.strategy import WeightStrategy

WorkerIds: TypeAlias = int | Sequence[int] | None
"""One worker, several, or None for all."""

_EXIT_SECONDS = 1.0
"""Seconds within which the error of a worker with a broken connection must arrive."""


class WeightUpdates:
    """A collector's weight sync schemes, or its weight updater. The collector has the models, so it is the
    context of all schemes. ``default`` is the policy's scheme if none is given and the policy has weights."""

    def __init__(self, collector: Any, default: WeightSyncScheme) -> None:
        config: WeightConfig = collector.config.weights
        self._collector = collector
        self.updater = _make_updater(config.weight_updater)
        if self.updater is not None:
            self.updater.register_collector(collector)
        self.schemes: dict[str, WeightSyncScheme] = dict(config.weight_sync_schemes or {})
        if config.weight_sync_schemes is None and self.updater is None and _has_weights(collector.policy):
            self.schemes[POLICY] = default
        self._default = default
        self._upstream = dict(config.weight_recv_schemes or {})
        self._stack = AsyncExitStack()
        self._extra_updates = 0  # updates of the policy that no scheme counts

    @property
    def version(self) -> int:
        """The newest version of the policy; 0 if the policy has no weights."""
        versions = [scheme.version for scheme in policy_schemes(self.schemes)]  # -1: not connected yet
        return self._extra_updates + max([0, *versions])

    def init_senders(self, ctx: BaseContext | None) -> None:
        """Initialise every scheme as a sender that is not one yet. Called before workers get the schemes.
        ``ctx`` is multiprocessing's context of the workers, if they are processes."""
        for model_id, scheme in self.schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self._collector, ctx=ctx)

    async def connect_receivers(self, pool: Pool, deadline: Deadline) -> None:
        """Connect ``weight_recv_schemes``, if there are any: this collector becomes a worker of another
        collector. Raises what ``connect`` of a scheme raises."""
        for model_id, scheme in self._upstream.items():
            if not scheme.initialized_on_receiver:
                index = self._collector.worker_idx
                scheme.init_on_receiver(model_id=model_id, context=self._collector, worker_idx=index)
            self._stack.push_async_callback(scheme.aclose)
            await scheme.connect(timeout=deadline.remaining())
            receiving = asyncio.create_task(_receive_until_closed(scheme, pool), name="aiosync-following")
            self._stack.push_async_callback(cancel_all, receiving)

    async def aclose(self) -> None:
        """Disconnect ``weight_recv_schemes``; idempotent."""
        await self._stack.aclose()

    async def send(self, pool: Pool, given: Mapping[str, Any], worker_ids: WorkerIds, timeout: float) -> None:
        """Send weights to the workers; see :meth:`Controls.update_policy_weights_`."""
        if self.updater is not None:
            deadline = Deadline.after(timeout)
            await self._push_by_updater(given, worker_ids, deadline)
            await self.count_update(pool, deadline)
            return
        if not given.keys() <= self.schemes.keys():
            unknown = sorted(given.keys() - self.schemes.keys())
            raise InvalidArgumentError(
                f"{', '.join(unknown)}: this collector has no scheme for such a model; expected some of "
                f"{', '.join(self.schemes) or 'none'}"
            )
        if len(given) != 1 and worker_ids is not None:
            raise InvalidArgumentError(
                "weights_dict: expected no worker_ids: several models go to all workers"
            )
        serving = list(pool.workers)
        try:
            if len(given) == 1:
                ((name, weights),) = given.items()
                if weights is None and self.schemes[name] is self._default:
                    weights = self._collector.get_model(name)  # the scheme would find the same, more slowly
                ids = worker_ids if worker_ids is None or isinstance(worker_ids, int) else list(worker_ids)
                await self.schemes[name].send(weights, ids, timeout=timeout)
            else:
                chosen = {self.schemes[name]: weights for name, weights in given.items()}
                async with atomic(*chosen, timeout=timeout) as update:
                    for scheme, weights in chosen.items():
                        update.send(scheme, weights)
        except WorkerLostError as exc:
            await self._raise_unless_replaced(pool, [serving[index] for index in exc.workers], exc)

    async def _raise_unless_replaced(
        self, pool: Pool, lost: list[WorkerProxy], error: WorkerLostError
    ) -> None:
        """Raise the error of a lost worker, or ``error`` if no reason is known. Return if each lost worker
        has a successor: it begins with the weights that were just published."""
        if all(pool.is_replaced(worker) for worker in lost):
            return
        try:
            deadline = Deadline.after(_EXIT_SECONDS)
            await pool.wait_for(lambda: all(each.error is not None for each in lost), deadline, "receive")
        except SyncTimeoutError:
            raise error from None
        pool.check()
        if not all(pool.is_replaced(worker) for worker in lost):
            raise error

    async def _push_by_updater(self, given: Mapping[str, Any], ids: WorkerIds, deadline: Deadline) -> None:
        if given.keys() != {POLICY}:
            raise InvalidArgumentError(
                f"a weight_updater updates {POLICY!r} only, got {', '.join(sorted(given))}"
            )
        push, weights = self.updater.push_weights, given[POLICY]
        if inspect.iscoroutinefunction(push):
            await push(weights, ids, timeout=deadline.remaining())
            return
        try:
            async with asyncio.timeout(deadline.remaining()):
                await abandonable(lambda: push(weights, ids), "aiosync-updater")
        except TimeoutError as exc:
            raise deadline.error("commit", hint="the updater has not returned") from exc

    async def count_update(self, pool: Pool, deadline: Deadline) -> None:
        """Count an update of the policy that went through no scheme, here and in the workers."""
        self._extra_updates += 1
        pool.extra_updates = self._extra_updates
        each = {worker.index: [self._extra_updates] for worker in pool.workers}
        await pool.call("set_extra_updates", each, deadline)

    async def receive(self, weights: Any, deadline: Deadline) -> None:
        """Update the collector's own policy; see :meth:`Controls.receive_weights`."""
        if self._upstream and weights is not None:
            raise InvalidArgumentError(
                "this collector has weight_recv_schemes: call receive_weights() without weights"
            )
        if self._upstream:
            for scheme in self._upstream.values():
                await scheme.receive(deadline.remaining())
            return
        if weights is None:
            raise NotInitializedError(
                "receive_weights() needs weights, or a collector with weight_recv_schemes="
            )
        model = self._collector.policy
        if not isinstance(model, nn.Module):
            raise NotInitializedError("receive_weights() needs a collector whose policy is a module")
        strategy = WeightStrategy()
        strategy.apply_weights(model, strategy.extract_weights(weights))

    def cached(self, model_id: str) -> TensorDictBase | None:
        """Return a copy of the weights that were published last; None if none were."""
        scheme = self.schemes.get(model_id)
        if scheme is None or scheme.version < 0:
            return None
        published = scheme.get_sender().weights_in_use
        if published is None:
            return None
        found = in_format(WeightStrategy(extract_as="tensordict"), published)
        assert isinstance(found, TensorDictBase)
        return found.clone()


async def _receive_until_closed(scheme: WeightSyncScheme, pool: Pool) -> None:
    """Receive until the sender closes. If the sender is lost, the collector's next call raises."""
    receiver = scheme.get_receiver()
    await receiver.run()
    if receiver.lost:
        pool.fail(WorkerLostError((), receiver.ended or "unknown"))


def _has_weights(policy: Any) -> bool:
    return isinstance(policy, nn.Module) and bool([*policy.parameters(), *policy.buffers()])


def _make_updater(given: Any) -> Any:
    is_one = callable(getattr(given, "push_weights", None)) and not isinstance(given, type)
    made = given() if callable(given) and not is_one else given
    if made is not None and not callable(getattr(made, "push_weights", None)):
        raise InvalidArgumentError(
            f"weight_updater: expected an updater with push_weights(), or a function that returns one; got "
            f"{type(made).__name__}"
        )
    return made
