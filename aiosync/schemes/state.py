"""What a scheme consists of: its options, what ``init_on_*`` was given, and its endpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, Unpack

import torch

from aiosync._endpoint import Endpoint
from aiosync._options import (
    NoOptions,
    OnFailure,
    SchemeOptions,
    StrategyName,
    check_count,
    unknown_option,
)
from aiosync.errors import AlreadyConnectedError, InvalidArgumentError, NotInitializedError
from aiosync.events import EventHook, EventSource
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.listeners import UpdateListener, in_format, weakly
from aiosync.reports import WorkerState
from aiosync.sender.sharded.gather import GatherLeader, ShardContributor
from aiosync.sender.worker_plan import SenderPlan, model_of
from aiosync.stats import SchemeStats
from aiosync.transports.base import FramedTransport, Listener
from aiosync.weights.binding import CommitMode
from aiosync.weights.peft import PeftMode
from aiosync.weights.strategy import WeightStrategy, get_strategy


class Secret(bytes):
    """Bytes with a repr that does not show them."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


class SchemeState:
    """The fields of a scheme, and the properties that show them."""

    # The index that the sender's context gives its first worker.
    _first_worker: int = 0
    # The id of the sender's process, and how many workers it has; (0, 0): not known.
    _sender: tuple[int, int] = (0, 0)

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
        peft: PeftMode = "merged",
        **unknown: Unpack[NoOptions],
    ) -> None:
        if unknown:
            raise unknown_option(next(iter(unknown)), self._option_names(), type(self).__name__)
        options = SchemeOptions(
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
            peft,
        )
        self._start(options, None, secrets.token_bytes(32), get_strategy(strategy, peft))

    def _option_names(self) -> set[str]:
        """Return the names of all options of this scheme's constructor."""
        # A subclass passes on the keywords that its own signature does not have.
        constructors = [vars(base)["__init__"] for base in type(self).__mro__ if "__init__" in vars(base)]
        parameters = [each for one in constructors[:-1] for each in signature(one).parameters.values()]
        return {each.name for each in parameters if each.kind != each.VAR_KEYWORD} - {"self"}

    def _start(
        self, options: SchemeOptions, model_id: str | None, token: bytes, strategy: WeightStrategy
    ) -> None:
        self._spec = options
        self._model_id = model_id
        self._token = Secret(token)
        self._strategy = strategy
        self._events = EventSource()
        self._epoch = 0  # see state_dict()
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        """Set the fields that are not pickled to those of a recipe without an endpoint."""
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

    def __repr__(self) -> str:
        if "_endpoint" not in vars(self):
            return f"<{type(self).__name__}, whose constructor failed>"
        return f"<{type(self).__name__} {self._role} model_id={self._model_id!r} version={self.version}>"

    def _index_of(self, given: int) -> int:
        """Convert the index that a library gives this worker: it may not number its workers from 0."""
        check_count("worker_idx", given)
        check_count("worker_idx", given - self._first_worker)
        return given - self._first_worker

    def _check_not_receiving(self, what: str) -> None:
        if isinstance(self._endpoint, WeightReceiver) and self._pid == os.getpid():
            raise AlreadyConnectedError(
                f"a connected receiver gets another {what} by `await scheme.rebind({what}=...)`"
            )

    # -- what the user has set ---------------------------------------------------------------------------

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

    @property
    def initialized_on_sender(self) -> bool:
        """Whether ``init_on_sender`` was called."""
        return self._role == "sender"

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether ``init_on_receiver`` was called."""
        return self._role == "receiver"

    # -- the endpoint ------------------------------------------------------------------------------------

    def on_event(self, hook: EventHook) -> Callable[[], None]:
        """Call ``hook`` with each :class:`~aiosync.SyncEvent`. Return a function that removes the hook."""
        return self._events.register(hook)

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether ``connect`` succeeded, on the sender."""
        return self._synchronized and self._role == "sender"

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether ``connect`` succeeded, on a receiver."""
        return self._synchronized and self._role == "receiver"

    @property
    def stats(self) -> SchemeStats:
        """Counters and timings of the connected endpoint; empty before ``connect``."""
        return self._endpoint.stats

    @property
    def version(self) -> int:
        """The version last published (sender) or current (receiver), also if closed; -1 before the first."""
        return self._last_version if type(self._endpoint) is Endpoint else self._endpoint.version

    def state_dict(self) -> dict[str, int]:
        """Return what a trainer's checkpoint has to keep: ``version``, the last version that was sent, and
        ``epoch``, how many trainers have gone on from an earlier one's checkpoint."""
        version = self.version if self.version >= 0 else self._spec.first_version - 1
        return {"version": version, "epoch": self._epoch}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a checkpoint: the first version that this sender publishes has the number after the
        saved one, in place of ``first_version``. Call it before :meth:`connect`.

        Raises:
            AlreadyConnectedError: the scheme is connected, or its sender has been created.
            InvalidArgumentError: ``state_dict`` is not what :meth:`state_dict` has returned.
        """
        if self._synchronized or self._has_endpoint:
            raise AlreadyConnectedError(
                "load_state_dict() sets the first version: call it before connect() and get_sender()"
            )
        version, epoch = (state_dict.get(name) for name in ("version", "epoch"))
        if not isinstance(version, int) or not isinstance(epoch, int) or version < -1 or epoch < 0:
            raise InvalidArgumentError(
                f"load_state_dict(): expected a state_dict() with version and epoch, got {dict(state_dict)!r}"
            )
        self._spec = replace(self._spec, first_version=version + 1)
        self._epoch = epoch + 1

    @property
    def _has_endpoint(self) -> bool:
        """Whether this process has an endpoint, which has the scheme's options already. A rank that only
        contributes has one from init_on_sender() on; before connect() they do not matter."""
        idle = isinstance(self._endpoint, ShardContributor) and not self._endpoint.is_matched
        return self._pid == os.getpid() and type(self._endpoint) is not Endpoint and not idle

    @property
    def workers(self) -> dict[int, WorkerState]:
        """On the sender: worker -> whether it is connected, its version and its lag. Else empty."""
        return self._endpoint.workers

    @property
    def ended(self) -> str | None:
        """On a receiver: why no more updates will come, also if closed; None while there is a sender."""
        return self._last_ended if type(self._endpoint) is Endpoint else self._endpoint.ended

    @property
    def worker_versions(self) -> dict[int, int]:
        """On the sender: worker -> the version that it last acknowledged, or -1. Else empty."""
        return {worker: state.version for worker, state in self._endpoint.workers.items()}

    @property
    def weights(self) -> Any:
        """The current weights (receiver) or those last published (sender), in the strategy's form; before
        ``connect`` the model's. Read only."""
        found = self._endpoint.weights_in_use
        if found is not None:
            return in_format(self._strategy, found)
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @property
    def sender_transports(self) -> dict[int, FramedTransport]:
        """On the sender: worker -> its connection, for the connected workers."""
        return self._endpoint.transports

    @property
    def receiver_transport(self) -> FramedTransport | None:
        """On a receiver: the connection to the sender."""
        return self._endpoint.transport if isinstance(self._endpoint, WeightReceiver) else None

    @property
    def shared_transport(self) -> Listener | None:
        """On the sender: the listener that its workers connect to."""
        return self._listener
