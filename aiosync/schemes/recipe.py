"""From a pickled scheme to an endpoint: a scheme's hooks, its pickling, ``init_on_*`` and ``create_*``."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.context import BaseContext, get_spawning_popen
from typing import Any, ClassVar, Self

from tensordict import TensorDictBase
from torch import nn

from aiosync._options import OnSenderClose
from aiosync._processors import share_processors
from aiosync.errors import AlreadyConnectedError, InvalidArgumentError, NotInitializedError
from aiosync.receiver.applier import WeightApplier
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.receiver.listeners import UpdateListener
from aiosync.receiver.updates import Applier
from aiosync.schemes.contexts import first_worker, listener_for, wants_transient
from aiosync.schemes.state import SchemeState
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.extraction import WeightSource
from aiosync.sender.sharded.gather import GatherLeader, ShardContributor
from aiosync.sender.sharded.ranks import Shards, leads_ranks
from aiosync.sender.worker_plan import SenderArguments, SenderPlan, make_plan, model_of
from aiosync.transfer.base import Transfer
from aiosync.transports.base import FramedTransport, Listener
from aiosync.weights.binding import Binding
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import bind
from aiosync.weights.sharded import mesh_of
from aiosync.weights.strategy import WeightStrategy, to_tensordict

UNKNOWN_SENDER = (
    "this scheme does not know its sender: call init_on_sender() before copying it or handing it to workers"
)


class SchemeRecipe(SchemeState, ABC):
    """The part of a scheme that is pickled, and its steps to an endpoint in a process."""

    backends: ClassVar[tuple[str, ...]] = ()
    _registry: ClassVar[dict[str, type[SchemeRecipe]]] = {}
    _sender_type: ClassVar[type[WeightSender]] = WeightSender
    _receiver_type: ClassVar[type[WeightReceiver]] = WeightReceiver
    _elastic: ClassVar[bool] = False
    # Whether sender and workers are processes of one machine.
    _on_one_machine: ClassVar[bool] = False
    # Fields that the pickled scheme has: "address" is the attribute _address.
    _fields: ClassVar[tuple[str, ...]] = ()
    _reconnect_for: float = 0.0
    # None: the scheme has no address at which a worker could find a new sender.
    _on_sender_close: OnSenderClose | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("backends", ()):
            SchemeRecipe._registry[name] = cls

    # -- hooks of a scheme, implemented by its file --------------------------------------------------

    @abstractmethod
    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        """Start listening for workers. The recipe has the listener's address from now on."""

    @abstractmethod
    def create_transport(self, *, worker_idx: int) -> FramedTransport:
        """Create a worker's connection to the sender, not open yet; raise NotInitializedError or
        InvalidArgumentError if this scheme does not know its sender's address."""

    @abstractmethod
    def _make_transfer(self) -> Transfer:
        """Create an endpoint's transfer."""

    def _bind(self, layout: Layout) -> Binding:
        """Bind a worker's model to the sender's layout. Raises as :func:`bind` does."""
        return bind(self._model, layout, self._strategy, self._spec.commit)

    def _usual_index(self) -> int | None:
        """Return this process's worker index if the caller gives none; None: the sender chooses it."""
        return None

    @property
    def sender_enlists(self) -> bool:
        """Whether the sender will enlist this worker, so that it need not connect itself."""
        return False

    def _release(self) -> None:
        """Release what the recipe has beside its endpoint. Called when an endpoint closes."""
        return

    # -- pickling. Models, contexts and live endpoints stay behind -----------------------------------

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        """Return the fields to copy that this class adds, among them the sender's address.

        With ``inherit`` the copy stays in this process or goes to a child that is being started, and may have
        objects that can only be inherited.
        """
        return {name: getattr(self, f"_{name}") for name in self._fields}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        """Set the fields that :meth:`_recipe` returned."""
        for name, value in recipe.items():
            setattr(self, f"_{name}", value)

    def __getstate__(self) -> dict[str, Any]:
        return self._state(inherit=get_spawning_popen() is not None)

    def _state(self, *, inherit: bool) -> dict[str, Any]:
        return {
            "spec": self._spec,
            "model_id": self._model_id,
            "token": self._token,
            "strategy": self._strategy,
            "first_worker": self._first_worker,
            "sender": self._sender_process(),
            "recipe": self._recipe(inherit=inherit),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["spec"], state["model_id"], state["token"], state["strategy"])
        self._first_worker = state["first_worker"]
        self._sender = state["sender"]
        self._restore(state["recipe"])

    def __copy__(self) -> Self:
        """Copy the recipe, for another endpoint in this process."""
        twin = type(self).__new__(type(self))
        twin.__setstate__(self._state(inherit=True))
        return twin

    def _sender_process(self) -> tuple[int, int]:
        """Return the id of the sender's process and how many workers it has; (0, 0): not known."""
        return self._sender if self._plan is None else (self._pid, len(self._plan.workers))

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
        """Set the workers and the weights to send. Nothing is sent yet, but workers may already connect.

        A model that is sharded over the ranks of a trainer (FSDP2, DTensors) is sent by the first rank of its
        mesh. Every rank initialises the scheme, connects and sends at the same places of its program. The
        other ranks contribute their shards; their reports list no workers. If one rank fails, all of them
        raise. Repeat a ``send`` on all ranks or on none.

        Give one of: ``params_map``; ``context`` with ``model_id``; ``model`` or ``weights`` with
        ``devices``, with ``device_map_fn`` and ``num_workers``, or with ``num_workers`` alone (CPU).

        Args:
            model_id: the model's name; on a context, the path to it (``"policy"``, ``"env.net"``).
            context: an object with ``get_model(model_id)`` or the model as an attribute,
                ``policy_device`` (one, or one per worker), ``num_workers``, ``policy_factory``. The scheme
                refers to it weakly.
            model: the ``nn.Module`` with the weights to send.
            weights: a TensorDict or dict to send instead of a module's weights.
            params_map: worker -> weights; workers with the same weights object share one copy.
            devices: one per worker; workers on the same device share one copy.
            device_map_fn: takes (worker, weights) and returns the worker's weights, at each send.
            num_workers: the number of workers, with indices from 0; None: any number, in schemes that
                accept workers at any time.
            ctx: the multiprocessing context of the queues (MultiProcess only); default spawn, whose
                queues work under every start method.

        Raises:
            InvalidArgumentError: arguments that cannot be combined; the message names them.
            AlreadyConnectedError: this scheme has a live endpoint.
        """
        self._check_no_endpoint()
        arguments = SenderArguments(
            model_id,
            context,
            model,
            weights,
            params_map,
            devices,
            device_map_fn,
            num_workers,
            self._elastic,
            lambda source: to_tensordict(self._strategy.extract_weights(source)),
            transient=wants_transient(context),
        )
        plan = make_plan(arguments, per_worker=self._spec.per_worker_weights)
        self._drop_listener()
        self._forget_runtime()
        self._plan = plan
        self._model_id = model_id
        self._model = model
        self.context = context
        self._first_worker = first_worker(context)
        given = None if plan.made_here else self.model
        mesh = mesh_of((given, plan.weights, *(group.weights for group in plan.groups)))
        self._role = "sender"
        leads = mesh is None or leads_ranks(mesh)
        if leads:
            self._listener = self._make_listener(plan.workers, ctx)
        if mesh is not None:
            shards = Shards(mesh, model_id)
            if leads:
                self._leader = GatherLeader(shards)
            else:
                self._endpoint = ShardContributor(shards, self._weight_source(plan))

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set the model of this process that updates are applied to.

        Args:
            model_id: the model's name on the sender.
            context: an object that has the model, ``worker_idx``, and optionally
                ``update_policy_weights_`` (sync or async), which is called with each update.
            model: an ``nn.Module``, TensorDict or dict; with neither model nor context, :meth:`receive`
                returns the weights and they are not applied to a model.
            worker_idx: this worker's index; may also be given to :meth:`connect`.

        Raises:
            InvalidArgumentError: ``context`` without ``model_id``, or an invalid worker index or model.
            AlreadyConnectedError: this object has a live endpoint; use a copy of the scheme for the receiver.
        """
        self._check_no_endpoint()
        if self._listener is not None:  # a sender's scheme, in a forked child or before it has connected
            recipe, self._sender = self._recipe(inherit=True), self._sender_process()
            self._drop_listener()
            self._forget_runtime()
            self._restore(recipe)
        elif self._pid != os.getpid():
            self._forget_runtime()  # a receiver's object in a forked child
        if context is not None and model_id is None:
            raise InvalidArgumentError("context= needs model_id=, the name of the model on it")
        found_here = context is not None and model is None
        if found_here:
            model = model_of(context, str(model_id))
        if context is not None and worker_idx is None:
            worker_idx = getattr(context, "worker_idx", None)
        set_before = context is None and self.context is not None and self._role != "receiver"
        if set_before:
            context = self.context
        follower = UpdateListener() if context is None else listener_for(context, model_id)
        may_view = not (follower.writes and (found_here or set_before))
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

    def _drop_listener(self) -> None:
        """Release what an earlier ``init_on_sender`` has made, here or in the parent process."""
        if self._listener is not None and self._pid != os.getpid():
            self._listener.forget()
        elif self._listener is not None:
            self._listener.close()

    def _check_no_endpoint(self) -> None:
        if self._has_endpoint:
            raise AlreadyConnectedError(
                "this scheme object has a live endpoint; aclose() it first, or use a copy of the scheme"
            )

    # -- endpoints -----------------------------------------------------------------------------------

    def create_sender(self) -> WeightSender:
        """Return the sending endpoint, created by the first call (usually from :meth:`connect`); raise
        NotInitializedError if ``init_on_sender`` was not called."""
        if self._plan is None or self._listener is None:
            raise NotInitializedError("call init_on_sender() first")
        if not isinstance(self._endpoint, WeightSender):
            self._endpoint = self._sender_type(
                self._spec,
                self._weight_source(self._plan),
                self._model_id,
                self._listener,
                self._token,
                transfer=self._make_transfer(),
                events=self._events,
                leader=self._leader,
            )
            self._leader = None
        return self._endpoint

    def create_receiver(self, *, worker_idx: int | None = None) -> WeightReceiver:
        """Return the receiving endpoint, created by the first call (usually from :meth:`connect`); raise
        NotInitializedError if ``init_on_receiver`` was not called, or no worker index is known."""
        if self._role != "receiver":
            raise NotInitializedError("call init_on_receiver() first")
        if worker_idx is not None:
            self._worker_idx = self._index_of(worker_idx)
        if self._worker_idx is None and not self._elastic:
            raise NotInitializedError("a receiver needs its worker_idx, here or in init_on_receiver()")
        asked = -1 if self._worker_idx is None else self._worker_idx
        if not isinstance(self._endpoint, WeightReceiver):
            applier = WeightApplier(
                self._model,
                self._follower,
                self._strategy,
                self._model_id,
                asked,
                self._make_transfer(),
                may_view=self._may_view,
                make_binding=self._bind,
            )
            self._endpoint = self._make_receiver(applier, self._model_id)
            sender, workers = self._sender
            if self._on_one_machine and sender != os.getpid():
                share_processors(workers, warn=asked == 0)
        return self._endpoint

    def _make_receiver(self, applier: Applier, model_id: str | None) -> WeightReceiver:
        receiver = self._receiver_type(
            applier,
            model_id,
            applier.worker,
            partial(self.create_transport, worker_idx=applier.worker),
            self._token,
            reconnect_for=self._reconnect_for,
            on_sender_close=self._on_sender_close,
            events=self._events,
        )
        receiver.timeout = self._spec.timeout
        return receiver

    # -- weights -------------------------------------------------------------------------------------

    def prepare_weights(
        self,
        weights: Any = None,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Return the weights that :meth:`send` would send, in the strategy's form, not copied.

        Args:
            weights: as for :meth:`send`.
            model_id: the model to use if no weights are given.
            strategy: in place of the scheme's.
            context: in place of the scheme's.

        Raises:
            InvalidArgumentError: there is nothing to send.
            AttributeError: the context has no such model.
        """
        if context is not None and (weights is None or isinstance(weights, str)):
            name = weights or model_id or self._model_id
            if name is None:
                raise InvalidArgumentError("context= needs model_id=, the name of the model on it")
            weights = model_of(context, name)
        return (strategy or self._strategy).extract_weights(self._resolve(weights))

    def _weight_source(self, plan: SenderPlan) -> WeightSource:
        """Create the source of each send's weights. It uses the scheme's current strategy and model."""
        return WeightSource(plan, self._resolve, partial(getattr, self, "_strategy"))

    def _resolve(self, weights: Any) -> Any:
        """Return ``weights``, the object at that dotted path on the context, or the default for None."""
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
