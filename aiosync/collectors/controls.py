"""The calls of a collector beside iteration: weights, pause, seed, reset, attributes, state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from aiosync._deadline import Deadline
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.updates import WeightUpdates
from aiosync.collectors.worker import POLICY
from aiosync.errors import NotConnectedError, NotInitializedError
from aiosync.weights.resolve import resolve_model


class Controls:
    """Base of the collectors: the calls that send weights and commands to the workers."""

    config: CollectorConfig
    num_workers: int
    policy: Any  # the trainer's
    _updates: WeightUpdates
    _pool: Pool | None = None

    @property
    def _connected_pool(self) -> Pool:
        if self._pool is None:
            raise NotConnectedError("no workers: call connect() first, or use `async with`")
        self._pool.check()
        return self._pool

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self.config.processes.seconds if timeout is None else timeout)

    async def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        model_id: str = POLICY,
        worker_ids: int | Sequence[int] | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send weights to the workers.

        Args:
            policy_or_weights: a module, TensorDict or dict; None: the trainer's policy.
            model_id: the model that these weights belong to.
            worker_ids: a worker or several; None: all.
            weights_dict: model id -> weights. Each worker applies all of them or none.
            timeout: seconds.

        Raises:
            Exception: as :meth:`aiosync.WeightSyncScheme.send`. (A lost worker that is started again is no
                error: it begins with these weights.)
        """
        given = weights_dict if weights_dict is not None else {model_id: policy_or_weights}
        seconds = self.config.processes.seconds if timeout is None else timeout
        await self._updates.send(self._connected_pool, given, worker_ids, seconds)

    @property
    def policy_version(self) -> int:
        """The newest version of the policy; 0 if the policy has no weights."""
        return self._updates.version

    async def increment_version(self, timeout: float | None = None) -> None:
        """Increment the policy's version, after weights reached the workers without this collector. Later
        frames are tagged with the new version. ``timeout``: seconds.
        """
        await self._updates.count_update(self._connected_pool, self._deadline(timeout))

    async def receive_weights(self, policy_or_weights: Any = None, *, timeout: float | None = None) -> None:
        """Update this collector's own policy.

        Args:
            policy_or_weights: a module, TensorDict or dict to apply to the policy in this process;
                :meth:`update_policy_weights_` sends it to the workers. None: wait for an update through
                ``weight_recv_schemes``, which also reaches the workers. Returns without one at the timeout.
            timeout: seconds.

        Raises:
            InvalidArgumentError: weights were given although there are ``weight_recv_schemes``.
            NotInitializedError: neither weights nor ``weight_recv_schemes`` were given, or this process has
                no policy.
            LayoutMismatchError: the weights do not fit the policy.
        """
        await self._updates.receive(policy_or_weights, self._deadline(timeout))

    def get_cached_weights(self, model_id: str = POLICY) -> TensorDictBase | None:
        """Return a copy of the weights that were sent last; None if none were sent."""
        return self._updates.cached(model_id)

    @property
    def policy_device(self) -> list[Any] | None:
        """The device of each worker's policy; None if no device was given."""
        each = [self.config.devices.of(worker).policy for worker in range(self.num_workers)]
        return each if any(device is not None for device in each) else None

    @property
    def worker_idx(self) -> int | None:
        """The index of this collector among the workers of another collector."""
        return self.config.weights.worker_idx

    async def set_seed(self, seed: int, static_seed: bool = False, timeout: float | None = None) -> int:
        """Seed the environments and begin new episodes.

        Args:
            seed: seed of the first environment. The next one gets ``seed + 1``, and so on.
            static_seed: every worker begins with ``seed``.
            timeout: seconds.

        Returns:
            The first unused seed.
        """
        pool = self._connected_pool
        await pool.wait_for(lambda: all(w.ready for w in pool.workers), self._deadline(timeout), "receive")
        strides = [self.config.processes.envs_per_worker * worker.width for worker in pool.workers]
        each = {w.index: seed if static_seed else seed + sum(strides[: w.index]) for w in pool.workers}
        await pool.call("set_seed", {index: [s] for index, s in each.items()}, self._deadline(timeout))
        for worker in pool.workers:
            worker.seed = each[worker.index]
        return each[self.num_workers - 1] + strides[-1]

    async def reset(self, reset_idx: Sequence[bool] | None = None, timeout: float | None = None) -> None:
        """Begin new episodes.

        Args:
            reset_idx: for each worker, whether to reset its environments; None: all.
            timeout: seconds.
        """
        chosen = [index for index in range(self.num_workers) if reset_idx is None or reset_idx[index]]
        await self._connected_pool.call("reset", {index: [] for index in chosen}, self._deadline(timeout))

    async def getattr_env(self, name: str, timeout: float | None = None) -> list[Any]:
        """Return an attribute of each worker's environment. Dots in ``name`` go to nested attributes.
        ``timeout``: seconds.
        """
        return await self._call_all("get_attribute", timeout, "env", name)

    async def getattr_policy(self, name: str, timeout: float | None = None) -> list[Any]:
        """Return an attribute of each worker's policy. Dots in ``name`` go to nested attributes.
        ``timeout``: seconds.
        """
        return await self._call_all("get_attribute", timeout, "policy", name)

    def getattr_rb(self, name: str) -> Any:
        """Return an attribute of the replay buffer. Dots in ``name`` go to nested attributes.

        Raises:
            NotInitializedError: there is no replay buffer.
            AttributeError: the replay buffer has no such attribute.
        """
        if self.config.replay.replay_buffer is None:
            raise NotInitializedError("this collector has no replay buffer: give replay_buffer=")
        return resolve_model(self.config.replay.replay_buffer, name)

    async def _call_all(self, method: str, timeout: float | None, *arguments: Any) -> list[Any]:
        each = {index: arguments for index in range(self.num_workers)}
        return await self._connected_pool.call(method, each, self._deadline(timeout))

    def get_model(self, model_id: str = POLICY) -> Any:
        """Return the trainer's model with this id.

        Raises:
            AttributeError: there is no such model.
        """
        return self.policy if model_id == POLICY else resolve_model(self, model_id)
