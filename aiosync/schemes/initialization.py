"""The part of a scheme that is pickled, and ``init_on_sender`` and ``init_on_receiver``."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch import nn

from aiosync._endpoint import Endpoint
from aiosync._options import OnSenderClose
from aiosync.errors import (
    AlreadyConnectedError,
    InvalidArgumentError,
)
from aiosync.receiver.listeners import UpdateListener
from aiosync.schemes.contexts import first_worker, listener_for
from aiosync.schemes.pickling import PickledScheme
from aiosync.sender.sharded.gather import GatherLeader, ShardContributor
from aiosync.sender.sharded.ranks import Shards
from aiosync.sender.worker_plan import SenderArguments, make_plan, model_of
from aiosync.transfer.base import Transfer
from aiosync.transports.base import Listener, Transport
from aiosync.weights.binding import Binding
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import bind
from aiosync.weights.sharded import mesh_of

__all__ = ["SchemeRecipe"]


class SchemeRecipe(PickledScheme, ABC):
    """A scheme without an endpoint: its options, its model and how it is pickled."""

    backends: ClassVar[tuple[str, ...]] = ()
    _registry: ClassVar[dict[str, type[SchemeRecipe]]] = {}
    _elastic: ClassVar[bool] = False
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
    def create_transport(self, *, worker_idx: int) -> Transport:
        """Create a worker's connection to the sender, not open yet."""

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
        """Release what :meth:`_restore` has set. Called when an endpoint closes."""
        return

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
        raise.

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
        self._forget_runtime()
        arguments = SenderArguments(
            model_id, context, model, weights, params_map, devices, device_map_fn, num_workers, self._elastic
        )
        self._plan_sending(arguments, ctx)

    def _plan_sending(self, arguments: SenderArguments, ctx: BaseContext | None) -> None:
        self._plan = make_plan(arguments, per_worker=self._spec.per_worker_weights)
        self._model_id = arguments.model_id
        self._model = arguments.model
        self.context = arguments.context
        self._first_worker = first_worker(arguments.context)
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
        if self._listener is not None:
            self._become_receiver(self._listener)
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

    def _become_receiver(self, listener: Listener) -> None:
        """Turn a sender's scheme into a recipe again, in a forked child or before it has connected."""
        recipe = self._recipe(inherit=True)
        if self._pid != os.getpid():
            listener.forget()
        else:
            listener.close()
        self._forget_runtime()
        self._restore(recipe)

    def _check_no_endpoint(self) -> None:
        if self._pid != os.getpid():
            return  # the endpoint belongs to the parent process
        lends = isinstance(self._endpoint, ShardContributor) and self._endpoint.version < 0
        if type(self._endpoint) is not Endpoint and not lends:
            raise AlreadyConnectedError(
                "this scheme object has a live endpoint; aclose() it first, or use a copy of the scheme"
            )
