"""Models inside Ray actors that take weights by a method of their own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.schemes.ray import RayWeightSyncScheme, TensorTransport
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.worker_plan import model_of
from aiosync.transports.ray.calls import ActorCall, in_actor
from aiosync.transports.ray.object_store import as_tensor, packed
from aiosync.transports.ray.transport import UpdateMethod
from aiosync.weights.binding import Binding
from aiosync.weights.layout import Layout
from aiosync.weights.method_binding import MethodBinding
from aiosync.weights.target import receiver_tensors

__all__ = ["RayModuleTransformReceiver", "RayModuleTransformScheme", "RayModuleTransformSender"]


class RayModuleTransformSender(WeightSender):
    """The live sending endpoint of :class:`RayModuleTransformScheme`; it can read an actor's weights."""

    async def fetch(self, worker: int, actor: Any, deadline: Deadline) -> Mapping[str, torch.Tensor]:
        """The weights of an actor's module: name -> tensor, in the object store's memory.

        Args:
            worker: which worker it is.
            actor: its handle.
            deadline: for the answer.

        Raises:
            RemoteApplyError: it has no ``module``.
            WorkerLostError: it is gone.
            SyncTimeoutError: it did not answer in time.
        """
        wire, array = await ActorCall(worker, in_actor(actor, _weights_of), deadline).answer()
        return Layout.from_wire(wire).views(as_tensor(array))


class RayModuleTransformReceiver(WeightReceiver):
    """The live receiving endpoint of :class:`RayModuleTransformScheme`, in the actor's process: its commits
    are calls of the actor's method."""

    @staticmethod
    def method_of(actor: Any, update_method: UpdateMethod) -> Any:
        """The actor's method.

        Args:
            actor: the object itself.
            update_method: ``"tensordict"`` or ``"state_dict"``.

        Raises:
            InvalidArgumentError: it has none, or one that would have to be awaited.
        """
        name = f"_update_weights_{update_method}"
        argument = "params" if update_method == "tensordict" else "state_dict"
        method = getattr(actor, name, None)
        if not callable(method):
            raise InvalidArgumentError(f"{type(actor).__name__} has no method {name}({argument}=)")
        if inspect.iscoroutinefunction(method):
            raise InvalidArgumentError(
                f"{type(actor).__name__}.{name}() is async: a commit cannot wait, make it a plain method"
            )
        return lambda weights: method(**{argument: weights})


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Models that live inside Ray actors, as in torchrl's ``RayModuleTransform``: actors with
    ``_update_weights_tensordict(params=)`` or ``_update_weights_state_dict(state_dict=)``.

    Each update is one call of that method in the actor's process, of the newest weights, all at once and
    between two forward passes of the actor's ``module``, if it has one under that name. What the method is
    given views Ray's object store: as parameters of a TensorDict that it may put in place of the module's,
    and that is read only. Where it raises it is called again, with what was in service before, and
    the sender gets the error. All else is as with :class:`RayWeightSyncScheme`.

    The actors are found by ``init_on_sender(actors=...)``, which takes handles and what has one as
    ``_actor``; by ``context=`` with ``model_id=``, the way to such an object (``"env.transform[0]"``); or
    the scheme is handed to ``RayModuleTransform(weight_sync_scheme=...)`` as its blocking twin. Where
    there are neither a model nor weights to begin with, version 0 is what the first actor has.

    Args:
        update_method: ``"tensordict"`` or ``"state_dict"``.
        tensor_transport: see :class:`RayWeightSyncScheme`.
        sync: whether ``send`` waits until the weights are applied, where ``wait=`` does not say.
        options: see :class:`RayWeightSyncScheme`.

    Raises:
        InvalidArgumentError: an argument that is none, or nixl where that is not installed.
    """

    backends = ("ray_module",)
    _sender_type: ClassVar[type[WeightSender]] = RayModuleTransformSender
    _receiver_type: ClassVar[type[WeightReceiver]] = RayModuleTransformReceiver

    def __init__(
        self,
        update_method: UpdateMethod = "tensordict",
        tensor_transport: TensorTransport = "object_store",
        sync: bool = True,
        **options: Any,
    ) -> None:
        if update_method not in ("tensordict", "state_dict"):
            raise InvalidArgumentError(
                f"update_method={update_method!r}: expected 'tensordict' or 'state_dict'"
            )
        if options.get("commit", "flip") != "flip":
            raise InvalidArgumentError(
                f"commit={options['commit']!r}: how weights get into the model is up to the actor's method; "
                "one that copies them is _update_weights_state_dict, update_method='state_dict'"
            )
        super().__init__(tensor_transport, sync, **{"strategy": update_method, **options})
        self._update_method: UpdateMethod = update_method
        self._transform: Any = None

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        self._update: Any = None

    def _set_transform(self, ray_transform: Any) -> None:
        """Called by torchrl's ``RayModuleTransform``, which is the one to update."""
        self._transform = ray_transform

    def init_on_sender(
        self,
        *,
        actors: Sequence[Any] | None = None,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        **arguments: Any,
    ) -> None:
        """See :meth:`WeightSyncScheme.init_on_sender`; worker ``i`` is the ``i``-th of ``actors``.

        Args:
            actors: handles, or what has one as ``_actor``; None: what ``model_id`` leads to on
                ``context``, or the ``RayModuleTransform`` that the scheme was handed to.
            model_id: the model's name, or the way to it on ``context``.
            context: what has the transform.
            model: the module whose weights are sent.
            weights: what is sent in place of a module's.
            arguments: see there.

        Raises:
            NotInitializedError: this process takes no part in a Ray cluster.
            InvalidArgumentError: there is no actor.
            AttributeError: ``model_id`` leads nowhere on ``context``.
        """
        if actors is None and context is not None and model_id is not None:
            actors = [model_of(context, model_id)]
        elif actors is None and self._transform is not None:
            actors = [self._transform]
        if not actors:
            raise InvalidArgumentError(
                "there is no actor to send to: give actors=, or context= with model_id= (the way to the "
                "transform, such as 'env.transform[0]'), or hand the scheme to RayModuleTransform"
            )
        source = {"model": model} if model is not None else {"weights": {} if weights is None else weights}
        super().init_on_sender(actors=actors, model_id=model_id, **source, **arguments)
        self._begins_empty = model is None and weights is None
        if self._begins_empty:
            assert self._plan is not None
            self._plan = replace(
                self._plan, weights=None
            )  # a send without weights raises an error that says so

    async def _before_connect(self, weights: Any, deadline: Deadline) -> Any:
        """Make workers of the actors. Find out what version 0 is if it was not given."""
        if weights is None and self._begins_empty:
            sender = self.create_sender()
            assert isinstance(sender, RayModuleTransformSender)
            worker, actor = next(iter(self._actors.items()))
            weights = await sender.fetch(worker, actor, deadline)
        return await super()._before_connect(weights, deadline)

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """See :meth:`WeightSyncScheme.init_on_receiver`; done by the sender where it knows the actors.

        Args:
            model_id: the model's name, as the sender calls it.
            context: the actor: it has the method, and perhaps the model as ``module``.
            model: what the method puts weights into, if it is not ``context.module``.
            worker_idx: this worker's index.

        Raises:
            InvalidArgumentError: it has no such method.
        """
        found = model if model is not None else getattr(context, "module", None)
        update = RayModuleTransformReceiver.method_of(context, self._update_method)
        named = context if model_id is not None and found is not None else None
        super().init_on_receiver(model_id=model_id, context=named, model=found, worker_idx=worker_idx)
        self._update = update

    init_on_worker = init_on_receiver

    def _bind(self, layout: Layout) -> Binding:
        model = self._model if isinstance(self._model, nn.Module) else None
        if model is not None:
            super()._bind(layout)  # checks that it fits
        nested = self._update_method == "tensordict"
        return MethodBinding(self._update, model, layout, self._strategy, nested=nested)

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        return {**super()._recipe(inherit=inherit), "update_method": self._update_method}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        super()._restore(recipe)
        self._update_method = recipe["update_method"]
        self._transform = None


def _weights_of(actor: Any) -> tuple[object, Any]:
    """In the actor: its module's layout, and its weights as one array."""
    module = getattr(actor, "module", None)
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(
            f"{type(actor).__name__} has no module to begin with: give init_on_sender() model= or weights="
        )
    layout, buffer = packed({name: target.detach() for name, target in receiver_tensors(module).items()})
    return layout.to_wire(), buffer.numpy()
