"""Updaters for weights that this process can write to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from tensordict import TensorDict, TensorDictBase
from torch import nn

from aiosync.errors import NotInitializedError, UnknownWorkerError
from aiosync.transports._offload import offloaded
from aiosync.updaters.base import WeightUpdaterBase, WorkerId
from aiosync.weights.strategy import WeightStrategy


async def _apply(destination: Any, weights: Any) -> None:
    """Write weights in place, in a thread: all that are given, or none if one does not fit."""
    work = partial(WeightStrategy().apply_weights, destination, weights, strict=False)
    await offloaded(work, "aiosync-updater")


class VanillaWeightUpdater(WeightUpdaterBase):
    """Updates one local policy in place.

    Args:
        weight_getter: returns the weights if none are given; None: a push without weights does nothing.
        policy_weights: the policy's own weights, as a TensorDict; written in place.
    """

    _may_lack_weights = True

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: TensorDictBase
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> Self | None:
        """Return an updater of this policy's parameters and buffers."""
        return cls(policy_weights=TensorDict.from_module(policy).lock_())

    def _get_server_weights(self) -> Any:
        return self.weight_getter() if self.weight_getter is not None else None

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if server_weights is not None:
            await _apply(self.policy_weights, server_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Updates weights that worker processes share with this process, one worker after the other, in place. A
    worker may see half an update.

    Args:
        get_server_weights: returns the weights if none are given; None, or if it returns None: a push without
            weights does nothing.
        policy_weights: worker (a device or an index) -> its weights as a TensorDict; written in place.
    """

    _may_lack_weights = True

    def __init__(
        self, *, get_server_weights: Callable[[], Any] | None, policy_weights: Mapping[Any, TensorDictBase]
    ) -> None:
        self.weights_getter = get_server_weights
        self._policy_weights = dict(policy_weights)

    def all_worker_ids(self) -> list[Any]:
        """Return the devices or indices."""
        return list(self._policy_weights)

    def _get_server_weights(self) -> Any:
        return self.weights_getter() if self.weights_getter is not None else None

    async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if worker_id not in self._policy_weights:
            raise UnknownWorkerError(worker_id, list(self._policy_weights))
        if server_weights is not None:
            await _apply(self._policy_weights[worker_id], server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """For workers that update themselves: a push only checks that weights are given."""

    _may_lack_weights = True

    def _sync_weights_with_worker(self, *, worker_id: WorkerId | None = None, server_weights: Any) -> None:
        if server_weights is None:
            raise NotInitializedError(
                "a RemoteModuleWeightUpdater has no weights of its own: call push_weights(weights)"
            )
