"""What users of a receiver read and call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from aiosync._deadline import Deadline, seconds_of
from aiosync._endpoint import Endpoint
from aiosync.errors import NotInitializedError
from aiosync.receiver.applier import WeightApplier
from aiosync.receiver.listeners import in_format
from aiosync.receiver.updates import Applier


class ReceivingEndpoint(Endpoint):
    """The part of a receiver that shows its weights. Calls have the same arguments as the scheme's calls of
    these names."""

    applier: Applier
    timeout: float | None = None  # seconds that a call may take by default; None: the environment's

    @property
    def version(self) -> int:
        return self.applier.in_service

    @property
    def weights_in_use(self) -> Mapping[str, Tensor] | None:
        return self.applier.weights or None

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors in service, name -> tensor; read only."""
        return self.applier.weights

    @property
    def model_applier(self) -> WeightApplier:
        """The applier of a receiver that applies updates to a model, as all but a relay's do."""
        assert isinstance(self.applier, WeightApplier)
        return self.applier

    @abstractmethod
    async def receive_until(self, deadline: Deadline) -> Mapping[str, Tensor] | None:
        """Wait for an update. Return the current weights by name, or None if no update came in time."""

    async def receive(self, timeout: float | None = None) -> TensorDictBase | dict[str, Tensor] | None:
        """Wait for the next update and return its weights: see :meth:`aiosync.WeightSyncScheme.receive`."""
        views = await self.receive_until(Deadline.after(seconds_of(timeout, self.timeout)))
        return None if views is None else in_format(self.model_applier.strategy, views)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the model by hand. No version is counted. ``inplace``: whether to write into the
        model's memory, unless updates let the model view the sender's, which other workers read.

        Raises:
            NotInitializedError: this receiver has no model.
            LayoutMismatchError: the weights do not fit the model.
        """
        applier = self.model_applier
        if applier.model is None:
            raise NotInitializedError("apply_weights() needs init_on_receiver() with a model")
        inplace = inplace and self.keeps_memory
        applier.strategy.apply_weights(applier.model, weights, inplace=inplace)

    @property
    def keeps_memory(self) -> bool:
        """Whether the model's tensors stay in memory of their own: no commit, which another thread may run at
        any time, lets them view the sender's, which other workers read."""
        applier = self.model_applier
        return not (applier.may_view_sender and applier.binding.needs())
