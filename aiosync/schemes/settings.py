"""A scheme's options, model and context."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any, Literal

import torch

from aiosync._endpoint import Endpoint
from aiosync._options import OnFailure, SchemeOptions, StrategyName
from aiosync.errors import AlreadyConnectedError, InvalidArgumentError, NotInitializedError
from aiosync.events import EventHook, EventSource
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.listeners import UpdateListener, weakly
from aiosync.schemes.values import Secret, checked_index
from aiosync.sender.extraction import WeightSource
from aiosync.sender.sharded.gather import GatherLeader
from aiosync.sender.worker_plan import SenderPlan, model_of
from aiosync.transports.base import Listener
from aiosync.weights.binding import CommitMode
from aiosync.weights.strategy import WeightStrategy

__all__ = ["SchemeSettings"]


class SchemeSettings:
    """The options of a scheme and what ``init_on_*`` was given."""

    _first_worker: int = 0

    def __init__(
        self,
        strategy: StrategyName = "tensordict",
        sync: bool = True,
        *,
        timeout: float | None = None,
        cast: torch.dtype | None = None,
        commit: CommitMode = "flip",
        on_failure: OnFailure = "raise",
        per_worker_weights: bool = False,
        max_slots: int = 3,
        first_version: int = 0,
        min_workers: int | None = None,
    ) -> None:
        spec = SchemeOptions(
            strategy,
            sync,
            timeout,
            cast,
            commit,
            on_failure,
            per_worker_weights,
            max_slots,
            first_version,
            min_workers,
        )
        self._start(spec, None, secrets.token_bytes(32), None)

    def _start(
        self, spec: SchemeOptions, model_id: str | None, token: bytes, strategy: WeightStrategy | None
    ) -> None:
        self._spec = spec
        self._model_id = model_id
        self._token = Secret(token)
        self._strategy = strategy or spec.make_strategy()
        self._events = EventSource()
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        self._pid = os.getpid()
        self._model: Any = None
        self._context: Callable[[], Any] | None = None
        self._follower = UpdateListener()
        self._may_view = True
        self._worker_idx: int | None = None
        self._plan: SenderPlan | None = None
        self._listener: Listener | None = None
        # Gathers the shards of a sharded model; create_sender() moves it to the sender.
        self._leader: GatherLeader | None = None
        self._role: Literal["recipe", "sender", "receiver"] = "recipe"
        self._endpoint: Endpoint = Endpoint()
        # Whether connect() has succeeded.
        self._synchronized = False
        # The values of version and ended when the endpoint was closed.
        self._last_version = -1
        self._last_ended: str | None = None

    def _index_of(self, told: int) -> int:
        """Convert the index that a library gives this worker: it may not number its workers from 0."""
        return checked_index(checked_index(told) - self._first_worker)

    def _weight_source(self, plan: SenderPlan) -> WeightSource:
        """Create the source of each send's weights. It uses the scheme's current strategy and model."""
        return WeightSource(plan, self._resolve, lambda: self._strategy)

    def _resolve(self, weights: Any) -> Any:
        """Return ``weights``, the object at that dotted path on the context, or the default for None.

        Raises:
            InvalidArgumentError: there are no weights.
            AttributeError: the context has nothing at that path.
        """
        if isinstance(weights, str):
            if self.context is None:
                raise InvalidArgumentError(f"weights={weights!r} is a path, and there is no context")
            return model_of(self.context, weights)
        if weights is not None:
            return weights
        if self._plan is not None and self._plan.weights is not None and self._model is None:
            return self._plan.weights
        model = self.model
        if model is None:
            gone = ": the context is gone, keep a reference to it" if self.context_is_gone else ""
            raise InvalidArgumentError(
                f"no weights were given, and there is no model to take them from{gone}"
            )
        return model

    # -- hooks and properties ------------------------------------------------------------------------

    def on_event(self, hook: EventHook) -> Callable[[], None]:
        """Call ``hook`` with each :class:`~aiosync.SyncEvent`. Return a function that removes the hook."""
        return self._events.register(hook)

    @property
    def timeout(self) -> float:
        """Seconds that a call may take if it has no ``timeout=``."""
        return self._spec.seconds(None)

    @property
    def sync(self) -> bool:
        """Whether ``send`` waits by default."""
        return self._spec.sync

    @property
    def model_id(self) -> str | None:
        """The model's name."""
        return self._model_id

    @model_id.setter
    def model_id(self, model_id: str | None) -> None:
        self._model_id = model_id

    @property
    def model(self) -> Any:
        """The given model, or the context's model ``model_id``; None if there is neither."""
        if self._model is None and self._model_id is not None and self.context is not None:
            return model_of(self.context, self._model_id)
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._check_not_receiving("model")
        self._model = model

    @property
    def context(self) -> Any:
        """The context, or None once it has been freed: the scheme refers to it weakly."""
        return self._context() if self._context is not None else None

    @context.setter
    def context(self, context: Any) -> None:
        self._check_not_receiving("context")
        self._context = None if context is None else weakly(context)

    def _check_not_receiving(self, what: str) -> None:
        if isinstance(self._endpoint, WeightReceiver) and self._pid == os.getpid():
            raise AlreadyConnectedError(
                f"a connected receiver gets another {what} by `await scheme.rebind({what}=...)`"
            )

    @property
    def context_is_gone(self) -> bool:
        """Whether the scheme's context has been freed."""
        return self._context is not None and self._context() is None

    @property
    def worker_idx(self) -> int | None:
        """This worker's index; None on the sender."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self._plan is not None and worker_idx is not None:
            raise NotInitializedError("worker_idx belongs to a receiver; this is the sender")
        self._worker_idx = None if worker_idx is None else self._index_of(worker_idx)

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are extracted and applied. May be set to an instance of a custom class."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: WeightStrategy) -> None:
        self._strategy = strategy

    @property
    def strategy_str(self) -> str:
        """The strategy's name."""
        return self._strategy.extract_as
