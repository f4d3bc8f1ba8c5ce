"""What a collector's user may ask of its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from tensordict import TensorDictBase

from aiosync._deadline import Deadline
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.updates import WeightUpdates
from aiosync.collectors.worker import POLICY
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.weights.resolve import resolve_model

__all__ = ["Controls"]


class Controls(ABC):
    """The part of a collector that asks its workers; what they play is in another.

    Attributes:
        config: all options.
        num_workers: how many workers there are.
        policy: the trainer's.
        frames: how many have been handed out.
    """

    config: CollectorConfig
    num_workers: int
    policy: Any
    frames: int
    _requested: int
    _updates: WeightUpdates

    @property
    @abstractmethod
    def _connected_pool(self) -> Pool:
        """The workers; raises NotConnectedError if there are none."""

    @abstractmethod
    def _is_current(self, pool: Pool) -> bool:
        """Whether these are the workers still."""

    @abstractmethod
    def pause(self, timeout: float | None = None) -> AbstractAsyncContextManager[None]:
        """No worker steps inside."""

    @abstractmethod
    def _drop_delivered(self) -> None:
        """Forget the batches that have been delivered and not handed out."""

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
            policy_or_weights: None: the policy's.
            model_id: whose.
            worker_ids: for whom; None: all.
            weights_dict: several models' weights, by their names: each worker has all of them, or none.
            timeout: seconds.

        Raises:
            Exception: as :meth:`aiosync.WeightSyncScheme.send`. (That a worker was lost which is started
                again is no error: it begins with these weights.)
        """
        given = weights_dict if weights_dict is not None else {model_id: policy_or_weights}
        seconds = self.config.processes.seconds if timeout is None else timeout
        await self._updates.send(self._connected_pool, given, worker_ids, seconds)

    @property
    def policy_version(self) -> int:
        """The policy's newest version; 0 if it has no weights."""
        return self._updates.version

    async def increment_version(self, timeout: float | None = None) -> None:
        """Count the policy's version up, where weights got to the workers in a way that this collector knows
        nothing of. Frames are tagged with the new one from here on."""
        await self._updates.count_update(self._connected_pool, self._deadline(timeout))

    async def receive_weights(self, policy_or_weights: Any = None, *, timeout: float | None = None) -> None:
        """Bring this collector's own policy up to date.

        Args:
            policy_or_weights: a module, TensorDict or dict, which is applied to the policy here; workers get
                it with :meth:`update_policy_weights_`. None: wait until an update has come by
                ``weight_recv_schemes``, which goes to the workers too; there need not be one in time.
            timeout: seconds.

        Raises:
            InvalidArgumentError: weights were given, and there are ``weight_recv_schemes``.
            NotInitializedError: there are neither, or there is no policy here.
            LayoutMismatchError: they do not fit.
        """
        await self._updates.receive(policy_or_weights, self._deadline(timeout))

    def get_cached_weights(self, model_id: str = POLICY) -> TensorDictBase | None:
        """A copy of the weights that were sent last; None: there are none."""
        return self._updates.cached(model_id)

    @property
    def policy_device(self) -> list[Any] | None:
        """The device of each worker's policy; None: none was said."""
        each = [self.config.devices.of(worker).policy for worker in range(self.num_workers)]
        return each if any(device is not None for device in each) else None

    @property
    def worker_idx(self) -> int | None:
        """Which worker of another collector this is."""
        return self.config.weights.worker_idx

    async def set_seed(self, seed: int, static_seed: bool = False, timeout: float | None = None) -> int:
        """Begin anew, each environment with a seed of its own: ``seed``, ``seed + 1``, and so on; or each
        worker with the same, if ``static_seed``. Returns the next one."""
        pool = self._connected_pool
        await pool.wait_for(lambda: all(w.ready for w in pool.workers), self._deadline(timeout), "receive")
        strides = [self.config.processes.envs_per_worker * worker.width for worker in pool.workers]
        each = {w.index: seed if static_seed else seed + sum(strides[: w.index]) for w in pool.workers}
        await pool.call("set_seed", {index: [s] for index, s in each.items()}, self._deadline(timeout))
        for worker in pool.workers:
            worker.seed = each[worker.index]
        return each[self.num_workers - 1] + strides[-1]

    async def reset(self, reset_idx: Sequence[bool] | None = None, timeout: float | None = None) -> None:
        """Begin new episodes, in all workers or those where ``reset_idx`` is true."""
        chosen = [index for index in range(self.num_workers) if reset_idx is None or reset_idx[index]]
        await self._connected_pool.call("reset", {index: [] for index in chosen}, self._deadline(timeout))

    async def getattr_env(self, name: str, timeout: float | None = None) -> list[Any]:
        """What each worker's environment has under a name, which may be dotted."""
        return await self._call_all("get_attribute", timeout, "env", name)

    async def getattr_policy(self, name: str, timeout: float | None = None) -> list[Any]:
        """What each worker's policy has under a name, which may be dotted."""
        return await self._call_all("get_attribute", timeout, "policy", name)

    def getattr_rb(self, name: str) -> Any:
        """What the replay buffer has under a name, which may be dotted.

        Raises:
            NotInitializedError: there is none.
            AttributeError: it has no such thing.
        """
        if self.config.replay.replay_buffer is None:
            raise NotInitializedError("this collector has no replay buffer: give replay_buffer=")
        return resolve_model(self.config.replay.replay_buffer, name)

    async def _call_all(self, method: str, timeout: float | None, *arguments: Any) -> list[Any]:
        each = {index: arguments for index in range(self.num_workers)}
        return await self._connected_pool.call(method, each, self._deadline(timeout))

    async def state_dict(self, timeout: float | None = None) -> dict[str, Any]:
        """Where collection stands: how many frames there were, and each worker's environments and generators
        of random numbers, as far as they can be pickled. Take it when nothing is being collected: between two
        synchronous batches, or inside :meth:`pause`."""
        workers = await self._call_all("state", timeout)
        return {"frames": self.frames, "workers": workers}

    async def load_state_dict(self, state: Mapping[str, Any], timeout: float | None = None) -> None:
        """Go on from there; what was collected before and not handed out is dropped.

        Raises:
            InvalidArgumentError: it is that of another number of workers.
        """
        workers = state["workers"]
        if len(workers) != self.num_workers:
            raise InvalidArgumentError(
                f"state_dict: it has {len(workers)} workers, and this collector {self.num_workers}"
            )
        each = {index: [worker] for index, worker in enumerate(workers)}
        async with self.pause(timeout):
            self._drop_delivered()
            await self._connected_pool.call("load_state", each, self._deadline(timeout))
            self.frames = self._requested = state["frames"]
            next_ids = [max(rollout["next_traj_id"] for rollout in worker["rollouts"]) for worker in workers]
            self._connected_pool.start_trajectories_at(next_ids)

    def get_model(self, model_id: str = POLICY) -> Any:
        """The trainer's model of that name.

        Raises:
            AttributeError: there is none.
        """
        return self.policy if model_id == POLICY else resolve_model(self, model_id)
