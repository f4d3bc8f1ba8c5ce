"""The part of a scheme that is pickled: its options and the arguments of ``init_on_*``, checked."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext, get_spawning_popen
from typing import Any, ClassVar, Literal, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from aiosync._endpoint import Endpoint
from aiosync._options import OnFailure, OnSenderClose, SchemeOptions, StrategyName
from aiosync.errors import (
    AlreadyConnectedError,
    InvalidArgumentError,
    NotInitializedError,
)
from aiosync.events import EventHook, EventSource
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.listeners import UpdateListener, weakly
from aiosync.schemes.contexts import first_worker, listener_for
from aiosync.schemes.values import Secret, checked_index
from aiosync.sender.extraction import WeightSource
from aiosync.sender.sharded.gather import GatherLeader, ShardContributor
from aiosync.sender.sharded.ranks import Shards
from aiosync.sender.worker_plan import SenderArguments, SenderPlan, make_plan, model_of
from aiosync.transfer.base import Transfer
from aiosync.transports.base import Listener, Transport
from aiosync.weights.binding import Binding, CommitMode
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import bind
from aiosync.weights.sharded import mesh_of
from aiosync.weights.strategy import WeightStrategy

__all__ = ["SchemeRecipe"]


class SchemeRecipe(ABC):
    """What a scheme is before it is live: its options, its model, how it is pickled, and what it can be
    asked. :class:`~aiosync.WeightSyncScheme` adds what it does.
    """

    backends: ClassVar[tuple[str, ...]] = ()
    _registry: ClassVar[dict[str, type[SchemeRecipe]]] = {}
    _elastic: ClassVar[bool] = False
    _reconnect_for: float = 0.0
    # None: there is no address at which another sender could be found.
    _on_sender_close: OnSenderClose | None = None
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
        # Gathers the parts of a model that is spread over ranks, until the sender has it.
        self._leader: GatherLeader | None = None
        self._role: Literal["recipe", "sender", "receiver"] = "recipe"
        self._endpoint = Endpoint()
        # Whether connect() has succeeded.
        self._synchronized = False
        # What version and ended were when the endpoint was closed.
        self._last_version = -1
        self._last_ended: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("backends", ()):
            SchemeRecipe._registry[name] = cls

    # -- what a scheme is made of: filled in by its file ---------------------------------------------

    @abstractmethod
    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        """Where workers will connect; from now on the recipe says how to get there."""

    @abstractmethod
    def create_transport(self, *, worker_idx: int) -> Transport:
        """A worker's way to the sender, not open yet."""

    @abstractmethod
    def _make_transfer(self) -> Transfer:
        """How versions get across; made for each endpoint."""

    def _bind(self, layout: Layout) -> Binding:
        """How commits reach a worker's model, given the sender's layout; raises as :func:`bind`."""
        return bind(self._model, layout, self._strategy, self._spec.commit)

    def _usual_index(self) -> int | None:
        """This process's worker index where the caller gives none; None: the sender chooses."""
        return None

    @property
    def sender_enlists(self) -> bool:
        """Whether this is a worker whose sender will have it join, and which need not connect."""
        return False

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        """What else of the scheme is copied, and how a worker finds the sender.

        ``inherit``: the copy is for this process, or for one that is just being started, so it may
        hold what can only be inherited.
        """
        return {}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        """Take in what :meth:`_recipe` gave."""
        return

    def _release(self) -> None:
        """A receiver has closed: let go of what :meth:`_restore` took in and only the closing can free."""
        return

    # -- pickling ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self._state(inherit=get_spawning_popen() is not None)

    def _state(self, *, inherit: bool) -> dict[str, Any]:
        return {
            "spec": self._spec,
            "model_id": self._model_id,
            "token": self._token,
            "strategy": self._strategy,
            "first_worker": self._first_worker,
            "recipe": self._recipe(inherit=inherit),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["spec"], state["model_id"], state["token"], state["strategy"])
        self._first_worker = state["first_worker"]
        self._restore(state["recipe"])

    def __copy__(self) -> Self:
        """A copy of the recipe, for another endpoint in this process."""
        twin = type(self).__new__(type(self))
        twin.__setstate__(self._state(inherit=True))
        return twin

    # -- initialisation ------------------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        params_map: Mapping[int, Any] | None = None,
        devices: list[Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
        ctx: BaseContext | None = None,
    ) -> None:
        """Say whom to send to and what. Nothing is sent yet, but workers may already connect.

        A model that is spread over the ranks of a trainer (FSDP2, DTensors) is sent by one of them, the
        first of its mesh. The scheme is initialised, connected and sent with on all of them, at the same
        places of the program; the others lend their parts, and what their calls return says nothing of
        workers. Where rank 0 or another fails, all of them raise.

        Give one of: ``params_map``; ``context`` with ``model_id``; ``model`` or ``weights`` with
        ``devices``, with ``device_map_fn`` and ``num_workers``, or with ``num_workers`` alone (CPU).

        Args:
            model_id: the model's name; on a context, the way to it (``"policy"``, ``"env.net"``).
            context: an object with ``get_model(model_id)`` or the model as an attribute,
                ``policy_device`` (one, or one per worker), ``num_workers``, ``policy_factory``. Not
                kept alive by the scheme.
            model: an ``nn.Module`` to send the weights of.
            weights: a TensorDict or dict to send instead of a module's.
            params_map: worker -> weights; workers with the very same weights share one copy.
            devices: one per worker; workers on the same share one copy.
            device_map_fn: takes (worker, weights) and returns the worker's weights, at each send.
            num_workers: how many workers, numbered from 0; None, where the scheme says that it takes
                workers as they come: any number.
            ctx: the multiprocessing context of the queues (MultiProcess only); default spawn, whose
                queues work under every start method.

        Raises:
            InvalidArgumentError: a mix that makes no sense; the message names what clashes.
            AlreadyConnectedError: this scheme has a live endpoint.
        """
        self._check_no_endpoint()
        self._forget_runtime()
        arguments = SenderArguments(
            model_id, context, model, weights, params_map, devices, device_map_fn, num_workers, self._elastic
        )
        self._plan = make_plan(arguments, per_worker=self._spec.per_worker_weights)
        self._model_id = model_id
        self._model = model
        self.context = context
        self._first_worker = first_worker(context)
        given = None if self._plan.made_here else self.model
        mesh = mesh_of((given, self._plan.weights, *(group.weights for group in self._plan.groups)))
        self._role = "sender"
        shards = Shards(mesh) if mesh is not None else None
        if shards is not None and not shards.leads:
            self._endpoint = ShardContributor(shards, self._weight_source(self._plan))
            return
        self._leader = GatherLeader(shards) if shards is not None else None
        self._listener = self._make_listener(self._plan.workers, ctx)

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Say which model of this process to keep in step.

        Args:
            model_id: the model's name, as the sender calls it.
            context: an object that has the model, ``worker_idx``, and perhaps
                ``update_policy_weights_`` (sync or async), which is called with each update.
            model: an ``nn.Module``, TensorDict or dict; with neither model nor context the weights
                are only returned by :meth:`receive`.
            worker_idx: this worker's index; may also be given to :meth:`connect`.

        Raises:
            InvalidArgumentError: ``context`` without ``model_id``, a worker index that is none, or a model
                that is none.
            AlreadyConnectedError: this object has a live endpoint; give the receiver a copy of its own.
        """
        self._check_no_endpoint()
        if self._listener is not None:
            self._become_receiver(self._listener)
        elif self._pid != os.getpid():
            self._forget_runtime()  # a receiver's object in a forked child
        follower, may_view = UpdateListener(), True
        if context is not None:
            if model_id is None:
                raise InvalidArgumentError("context= needs model_id=, the name of the model on it")
            follower = listener_for(context, model_id)
            if model is None:
                model = model_of(context, model_id)
                may_view = not follower.writes
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        elif self.context is not None and self._role != "receiver":
            context = self.context  # it was said before
            follower = listener_for(context, model_id)
            may_view = not follower.writes
        if model is not None and not isinstance(model, nn.Module | TensorDictBase | Mapping):
            raise InvalidArgumentError(
                f"model: expected an nn.Module, a TensorDict or a dict, got {type(model).__name__}"
            )
        self._model_id = model_id
        self._model = model
        self.context = context
        self._follower, self._may_view = follower, may_view
        self._worker_idx = self._usual_index() if worker_idx is None else self._index_of(worker_idx)
        self._role = "receiver"

    init_on_worker = init_on_receiver

    def _index_of(self, told: int) -> int:
        """This worker's index, given one by a library that may count from another number."""
        return checked_index(checked_index(told) - self._first_worker)

    def _become_receiver(self, listener: Listener) -> None:
        """A sender's object in a forked child, or one that was never connected."""
        recipe = self._recipe(inherit=True)
        if self._pid != os.getpid():
            listener.forget()
        else:
            listener.close()
        self._forget_runtime()
        self._restore(recipe)

    def _check_no_endpoint(self) -> None:
        if self._pid != os.getpid():
            return  # what is live belongs to the parent; this process starts from the recipe
        lends = isinstance(self._endpoint, ShardContributor) and self._endpoint.version < 0
        if type(self._endpoint) is not Endpoint and not lends:
            raise AlreadyConnectedError(
                "this scheme object has a live endpoint; aclose() it first, or use a copy of the scheme"
            )

    def _weight_source(self, plan: SenderPlan) -> WeightSource:
        """Finds the weights of each call; follows the strategy and the model as the user sets them."""
        return WeightSource(plan, self._resolve, lambda: self._strategy)

    def _resolve(self, weights: Any) -> Any:
        """Weights that were given as such, as a dotted path on the context, or not at all.

        Raises:
            InvalidArgumentError: there are none.
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

    # -- what can be asked ---------------------------------------------------------------------------

    def on_event(self, hook: EventHook) -> Callable[[], None]:
        """Call ``hook`` with a :class:`~aiosync.SyncEvent` for all that happens; returns what ends that."""
        return self._events.register(hook)

    @property
    def timeout(self) -> float:
        """Seconds that a call may take where it does not say otherwise."""
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
        """The model: as given, or found on the context by ``model_id``; None if there is neither."""
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
        """Whether there was a context that has been freed."""
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
        """How weights are extracted and applied; one of your own is used as it is."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: WeightStrategy) -> None:
        self._strategy = strategy

    @property
    def strategy_str(self) -> str:
        """The strategy's name."""
        return self._strategy.extract_as
