"""What a collector's user may ask of its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from aiosync._deadline import Deadline
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.pool import Pool
from aiosync.collectors.worker import POLICY
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
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
    _schemes: dict[str, WeightSyncScheme]

    @property
    @abstractmethod
    def _live(self) -> Pool:
        """The workers; raises NotConnectedError if there are none."""

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
            weights_dict: several models' weights, by their names.
            timeout: seconds.

        Raises:
            Exception: as :meth:`aiosync.WeightSyncScheme.send`.
        """
        given = weights_dict if weights_dict is not None else {model_id: policy_or_weights}
        unknown = given.keys() - self._schemes.keys()
        if unknown:
            raise InvalidArgumentError(
                f"{', '.join(sorted(unknown))}: there is no scheme for such a model here; expected some of "
                f"{', '.join(self._schemes) or 'none'}"
            )
        ids = list(worker_ids) if isinstance(worker_ids, Sequence) else worker_ids
        for name, weights in given.items():
            await self._schemes[name].send(weights, ids, timeout=timeout)

    @property
    def policy_version(self) -> int:
        """The policy's newest version; 0 if it has no weights."""
        scheme = self._schemes.get(POLICY)
        return scheme.version if scheme is not None else 0

    async def set_seed(self, seed: int, static_seed: bool = False, timeout: float | None = None) -> int:
        """Begin anew, each environment with a seed of its own: ``seed``, ``seed + 1``, and so on; or each
        worker with the same, if ``static_seed``. Returns the next one."""
        pool = self._live
        stride = self.config.processes.envs_per_worker
        each = {w.index: seed if static_seed else seed + w.index * stride for w in pool.workers}
        await pool.call("set_seed", {index: [s] for index, s in each.items()}, self._deadline(timeout))
        for worker in pool.workers:
            worker.seed = each[worker.index]
        return max(each.values()) + stride

    async def reset(self, reset_idx: Sequence[bool] | None = None, timeout: float | None = None) -> None:
        """Begin new episodes, in all workers or those where ``reset_idx`` is true."""
        chosen = [index for index in range(self.num_workers) if reset_idx is None or reset_idx[index]]
        await self._live.call("reset", {index: [] for index in chosen}, self._deadline(timeout))

    async def getattr_env(self, name: str, timeout: float | None = None) -> list[Any]:
        """What each worker's environment has under a name, which may be dotted."""
        return await self._of_each("attribute_of", timeout, "env", name)

    async def getattr_policy(self, name: str, timeout: float | None = None) -> list[Any]:
        """What each worker's policy has under a name, which may be dotted."""
        return await self._of_each("attribute_of", timeout, "policy", name)

    async def _of_each(self, method: str, timeout: float | None, *arguments: Any) -> list[Any]:
        each = {index: arguments for index in range(self.num_workers)}
        return await self._live.call(method, each, self._deadline(timeout))

    async def state_dict(self, timeout: float | None = None) -> dict[str, Any]:
        """Where collection stands: how many frames there were, and each worker's environments and generators
        of random numbers, as far as they can be pickled. Take it when nothing is being collected: between two
        synchronous batches, or inside :meth:`pause`."""
        workers = await self._of_each("state", timeout)
        return {"frames": self.frames, "requested": self._requested, "workers": workers}

    async def load_state_dict(self, state: Mapping[str, Any], timeout: float | None = None) -> None:
        """Go on from there.

        Raises:
            InvalidArgumentError: it is that of another number of workers.
        """
        workers = state["workers"]
        if len(workers) != self.num_workers:
            raise InvalidArgumentError(
                f"state_dict: it has {len(workers)} workers, and this collector {self.num_workers}"
            )
        each = {index: [worker] for index, worker in enumerate(workers)}
        await self._live.call("load_state", each, self._deadline(timeout))
        self.frames, self._requested = state["frames"], state["requested"]

    def get_model(self, model_id: str = POLICY) -> Any:
        """The trainer's model of that name.

        Raises:
            AttributeError: there is none.
        """
        return self.policy if model_id == POLICY else resolve_model(self, model_id)
