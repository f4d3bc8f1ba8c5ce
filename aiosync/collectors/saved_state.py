"""The state of a collector as a dict with the keys of torchrl's, and what of torchrl's can be restored."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from aiosync.collectors.trajectories import TrajectoryIterator
from aiosync.collectors.versions import VERSION
from aiosync.collectors.worker_spec import POLICY
from aiosync.errors import InvalidArgumentError
from aiosync.weights.strategy import WeightStrategy


@dataclass(frozen=True)
class SavedState:
    """The state of a collector.

    Attributes:
        workers: what each worker returned; of torchrl's collector, its worker's ``state_dict()``.
        frames: how many frames the iterator had returned.
        batches: how many batches the iterator had returned.
        version: the policy's version, by its name; None: it was not tracked.
        trajectories: with trajs_per_batch: those that are complete or have begun.
        next_traj_id: of torchrl's collector: the number of the next trajectory of all workers.
    """

    workers: list[Mapping[str, Any]]
    frames: int
    batches: int
    version: Any = None
    next_traj_id: int = 0
    trajectories: Mapping[str, Any] | None = None

    def as_dict(self, weights: Mapping[str, Tensor] | None) -> OrderedDict[str, Any]:
        """Return the state with torchrl's keys. ``weights``: those that all workers act with, if any."""
        found: OrderedDict[str, Any] = OrderedDict()
        for index, worker in enumerate(self.workers):
            policy = {} if weights is None else {"policy_state_dict": OrderedDict(weights)}
            found[f"worker{index}"] = policy | dict(worker)
        found |= {"frames": self.frames, "iter": self.batches - 1}
        if self.version is not None:
            found[VERSION] = self.version
        if self.trajectories is not None:
            found["trajectories"] = self.trajectories
        return found

    @classmethod
    def of(cls, state: Mapping[str, Any], workers: int, envs_per_worker: int) -> Self:
        """Read a state that :meth:`as_dict` or torchrl's collector made.

        Raises:
            InvalidArgumentError: it is no such state, or one of another number of workers or environments.
        """
        found = [state[f"worker{i}"] for i in range(len(state)) if f"worker{i}" in state]
        if not found or "frames" not in state:
            raise InvalidArgumentError(
                f"state_dict: expected the keys worker0, worker1, ... and frames, got "
                f"{', '.join(state) or 'none'}"
            )
        if len(found) != workers:
            raise InvalidArgumentError(
                f"state_dict: the state has {len(found)} workers, and this collector {workers}"
            )
        for count in (len(each["rollouts"]) for each in found if "rollouts" in each):
            if count != envs_per_worker:
                raise InvalidArgumentError(
                    f"state_dict: expected {envs_per_worker} environments per worker, got {count}"
                )
        pool = state.get("traj_pool") or {}
        first = int(pool.get("traj_id", 0))
        batches, version = state.get("iter", -1) + 1, state.get(VERSION)
        return cls(found, state["frames"], batches, version, first, state.get("trajectories"))

    def next_traj_ids(self) -> list[int]:
        """Return for each worker the lowest number that its next trajectory may have."""
        return [
            max((each["next_traj_id"] for each in worker.get("rollouts", ())), default=self.next_traj_id)
            for worker in self.workers
        ]

    def of_workers(self) -> dict[int, list[Any]]:
        """Return the arguments of each worker's ``load_state``."""
        each = enumerate(self.workers)
        return {
            i: [{key: value for key, value in state.items() if key != "policy_state_dict"}, self.next_traj_id]
            for i, state in each
        }

    def weights(self, policy: Any) -> list[Mapping[str, Any] | None]:
        """Return for each worker the weights of its policy in this state, by the names in ``policy``."""
        return [_named_as(policy, worker.get("policy_state_dict")) for worker in self.workers]


def _same(first: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return whether two workers have the same weights."""
    if first is None or other is None:
        return first is other
    pairs = ((value, other.get(name)) for name, value in first.items())
    return first.keys() == other.keys() and all(
        a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and a.equal(b)) for a, b in pairs
    )


def _named_as(policy: Any, weights: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return weights by the names of ``policy``. torchrl's workers name those of a module that is no
    TensorDictModule ``module.<name>``, because they wrap it."""
    if not weights or not isinstance(policy, nn.Module):
        return weights or None
    own = WeightStrategy(extract_as="state_dict").extract_weights(policy).keys()
    inner = {name.removeprefix("module."): value for name, value in weights.items()}
    return inner if not weights.keys() & own and inner.keys() & own else weights


def _warn_unused(what: Iterable[str]) -> None:
    """Warn about parts of a state that were not restored."""
    found = sorted(set(what))
    if found:
        warnings.warn(f"load_state_dict: not restored: {'; '.join(found)}", stacklevel=4)


class RestorableIterator(TrajectoryIterator):
    """An iterator whose state can be saved and restored."""

    async def state_dict(self, timeout: float | None = None) -> OrderedDict[str, Any]:
        """Return the state of collection. Call it while no worker collects: between two synchronous batches,
        or inside :meth:`pause`.

        Args:
            timeout: seconds.

        Returns:
            ``worker0``, ``worker1`` and so on: each worker's random number generators and environments, as
            far as these can be pickled, and as ``policy_state_dict`` the weights that were sent last;
            ``frames``; ``iter``, the number of the last batch, from 0 on; ``policy_version``; with
            ``trajs_per_batch`` as ``trajectories`` those that are complete or have begun.
        """
        states = await self._call_all("state", timeout)
        self._name_versions()
        weights = self._published_weights(POLICY)
        trajectories = None if self._assembler is None else self._assembler.state_dict()
        saved = SavedState(states, self.frames, self.batches, self.policy_version, trajectories=trajectories)
        return saved.as_dict(weights)

    async def load_state_dict(self, state_dict: Mapping[str, Any], timeout: float | None = None) -> None:
        """Restore a state of :meth:`state_dict`, or of torchrl's multi-process collectors. Batches that
        workers have delivered and the iterator has not returned are dropped.

        The policy's weights in the state are sent to the workers. torchrl's state has no environments and no
        random number generators, so workers begin new episodes. A warning names what is not restored.

        Workers close the environments that are replaced. One that was given to a :class:`Collector` as an
        object is closed with the collector, unless :meth:`shutdown` gets ``close_env=False``.

        Args:
            state_dict: the state.
            timeout: seconds.

        Raises:
            InvalidArgumentError: it is no state, or one of another number of workers or environments.
                Nothing has changed.
            LayoutMismatchError: the state's weights do not fit the policy. Nothing has changed.
        """
        saved = SavedState.of(state_dict, self.num_workers, self.config.processes.envs_per_worker)
        pool = self._connected_pool
        async with self.pause(timeout):
            unused = await self._send_saved(saved.weights(self.policy), timeout)
            found = await pool.call("load_state", saved.of_workers(), self._deadline(timeout))
            # Only now: if a worker cannot restore its state, no batch is lost.
            self._finished.clear()
            if self._assembler is not None:
                self._assembler.load_state_dict(saved.trajectories)
            for batch in [batch for worker in pool.workers for batch in worker.batches]:
                batch.release()
            self.frames = self._requested = saved.frames
            self.batches = saved.batches
            pool.start_trajectories_at(saved.next_traj_ids())
            unused += await self._restore_version(saved.version, timeout)
        _warn_unused([*unused, *(each for part in found for each in part)])

    async def _send_saved(self, each: Sequence[Mapping[str, Any] | None], timeout: float | None) -> list[str]:
        """Send each worker's weights of a saved state. Returns what cannot be sent."""
        if all(weights is None for weights in each):
            return []
        if POLICY not in self._schemes:
            return ["policy_state_dict: this collector has no scheme that sends the policy's weights"]
        if all(_same(weights, each[0]) for weights in each):
            await self.update_policy_weights_(each[0], timeout=timeout)
            return []
        for worker, weights in enumerate(each):
            if weights is not None:
                await self.update_policy_weights_(weights, worker_ids=worker, timeout=timeout)
        return []

    async def _restore_version(self, name: Any, timeout: float | None) -> list[str]:
        """Let the newest version be the one of a saved state. Returns what cannot be restored."""
        if name is None or not self._versions.enabled:
            return []
        if isinstance(name, int) != self._versions.counts:
            expected = "an integer" if self._versions.counts else "a UUID"
            return [f"policy_version: expected {expected}, got {name!r}"]
        if self._versions.counts:
            self._extra_updates += name - self._version_number
        self._versions.restore(self._version_number, name)
        await self._publish_extra_updates(self._connected_pool, self._deadline(timeout))
        return []
