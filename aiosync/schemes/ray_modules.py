"""Models inside Ray actors, updated by calling a method of the actor."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack, get_args

import torch
from torch import nn

from aiosync._deadline import Deadline
from aiosync._options import check_choice
from aiosync.errors import InvalidArgumentError
from aiosync.receiver.endpoint import WeightReceiver
from aiosync.schemes.ray import RayOptions, RayWeightSyncScheme, actors_of
from aiosync.sender.endpoint import WeightSender
from aiosync.sender.worker_plan import model_of
from aiosync.transports.ray.object_store import as_tensor, packed
from aiosync.transports.ray.transport import ActorCall, UpdateMethod, in_actor
from aiosync.weights.binding import Binding, MethodBinding
from aiosync.weights.layout import Layout
from aiosync.weights.target import receiver_tensors


class RayModuleTransformSender(WeightSender):
    """The live sending endpoint of :class:`RayModuleTransformScheme`; it can read an actor's weights."""

    async def fetch(self, worker: int, actor: Any, deadline: Deadline) -> Mapping[str, torch.Tensor]:
        """Return the weights of an actor's module: name -> tensor, in the object store's memory.

        Raises:
            RemoteApplyError: the actor has no ``module``.
            WorkerLostError: the actor is gone.
            SyncTimeoutError: the actor did not answer in time.
        """
        wire, array = await ActorCall(worker, in_actor(actor, _weights_of), deadline).answer()
        return Layout.from_wire(wire).views(as_tensor(array))


class RayModuleTransformReceiver(WeightReceiver):
    """The receiving endpoint of :class:`RayModuleTransformScheme`: a commit calls the actor's method."""

    @staticmethod
    def method_of(actor: Any, update_method: UpdateMethod) -> Any:
        """Return a function that calls an actor object's update method with the weights.

        Raises:
            InvalidArgumentError: the actor has no such method, or it is async.
        """
        name = f"_update_weights_{update_method}"
        argument = "params" if update_method == "tensordict" else "state_dict"
        method = getattr(actor, name, None)
        if not callable(method):
            raise InvalidArgumentError(f"{type(actor).__name__} has no method {name}({argument}=)")
        is_async = f"{type(actor).__name__}.{name}() is async: a commit cannot wait, make it a plain method"
        if inspect.iscoroutinefunction(method):
            raise InvalidArgumentError(is_async)

        def update(weights: Any) -> None:
            result = method(**{argument: weights})
            if inspect.iscoroutine(result):  # a decorator may hide that the method is async
                result.close()
                raise InvalidArgumentError(is_async)

        return update


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to models inside Ray actors, as in torchrl's ``RayModuleTransform``: actors with
    ``_update_weights_tensordict(params=)`` or ``_update_weights_state_dict(state_dict=)``.

    Each update is one call of that method in the actor's process, with all of the newest weights. The call
    happens between two forward passes of the actor's ``module``, if it has that attribute. The weights view
    Ray's object store and are read only; a TensorDict has them as parameters, so that the method may put it
    in place of the module's. If the method raises, it is called again with the previous weights, and the
    sender gets the error. All else is as with :class:`RayWeightSyncScheme`.

    The actors are given as ``init_on_sender(actors=...)``, which takes handles and objects with a handle as
    ``_actor``; as ``context=`` with ``model_id=``, the path to such an object (``"env.transform[0]"``); or by
    passing the scheme's blocking twin to ``RayModuleTransform(weight_sync_scheme=...)``. If neither a model
    nor weights are given, version 0 is the first actor's weights.

    Args:
        strategy: which method updates the actor: ``"tensordict"`` or ``"state_dict"``.
        backend: see :class:`RayWeightSyncScheme`.
        update_method: another name of ``strategy``.
        options: see :class:`RayWeightSyncScheme`.

    Raises:
        InvalidArgumentError: an invalid argument, or nixl is not installed.
    """

    backends = ("ray_module",)
    _fields = (*RayWeightSyncScheme._fields, "update_method")
    _sender_type: ClassVar[type[WeightSender]] = RayModuleTransformSender
    _receiver_type: ClassVar[type[WeightReceiver]] = RayModuleTransformReceiver
    # The transform to update, if torchrl's RayModuleTransform has set it.
    _transform: Any = None

    def __init__(
        self,
        strategy: UpdateMethod = "tensordict",
        backend: str = "gloo",
        *,
        update_method: UpdateMethod | None = None,
        **options: Unpack[RayOptions],
    ) -> None:
        update_method = strategy if update_method is None else update_method
        check_choice("update_method", update_method, get_args(UpdateMethod))
        if options.get("commit", "flip") != "flip":
            raise InvalidArgumentError(
                f"commit={options['commit']!r}: how weights get into the model is up to the actor's method; "
                "one that copies them is _update_weights_state_dict, update_method='state_dict'"
            )
        super().__init__(update_method, backend, **options)
        self._update_method: UpdateMethod = update_method

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        self._update: Any = None

    def _set_transform(self, ray_transform: Any) -> None:
        """Set the transform to update. Called by torchrl's ``RayModuleTransform``."""
        self._transform = ray_transform

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        actors: Sequence[Any] | None = None,
        ray_transform: Any = None,
        model: Any = None,
        weights: Any = None,
        **arguments: Any,
    ) -> None:
        """See :meth:`WeightSyncScheme.init_on_sender`; worker ``i`` is the ``i``-th of ``actors``.

        Args:
            model_id: the model's name; with ``context`` alone, the path to the actor's object on it.
            context: an object that has actors as ``remote_collectors`` or ``actor_refs``, or the object at
                ``model_id``; and optionally the module to send as ``source_model``.
            actors: handles, or objects with a handle as ``_actor``. Other names: ``actor_refs``,
                ``remote_collectors``. None: the ``RayModuleTransform`` that the scheme was passed to, or
                those of ``context``.
            ray_transform: a ``RayModuleTransform``, in place of ``actors``.
            model: the module to send. Another name: ``source_model``.
            weights: tensors to send instead.
            arguments: see :meth:`WeightSyncScheme.init_on_sender`.

        Raises:
            NotInitializedError: this process is not connected to a Ray cluster.
            InvalidArgumentError: there is no actor.
            AttributeError: ``context`` has nothing at ``model_id``.
        """
        for name in ("actor_refs", "remote_collectors"):
            other = arguments.pop(name, None)
            actors = actors if other is None else other
        transform = self._transform if ray_transform is None else ray_transform
        if actors is None and transform is not None:
            actors = [transform]
        if actors is None:
            actors = actors_of(context)
        if actors is None and context is not None and model_id is not None:
            actors = [model_of(context, model_id)]
        if not actors:
            raise InvalidArgumentError(
                "there is no actor to send to: give actors=, or context= with model_id= (the way to the "
                "transform, such as 'env.transform[0]'), or hand the scheme to RayModuleTransform"
            )
        found = (arguments.pop("source_model", None), model, getattr(context, "source_model", None))
        model = next((each for each in found if each is not None), None)
        source = {"model": model} if model is not None else {"weights": {} if weights is None else weights}
        super().init_on_sender(actors=actors, model_id=model_id, **source, **arguments)
        self._begins_empty = model is None and weights is None
        if self._begins_empty:
            assert self._plan is not None
            # A send without weights then raises an error that says so.
            self._plan = replace(self._plan, weights=None)

    async def _before_connect(self, weights: Any, deadline: Deadline) -> Any:
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
        """See :meth:`WeightSyncScheme.init_on_receiver`; called for every actor that the sender enlists.

        Args:
            model_id: the model's name on the sender.
            context: the actor, which has the method, and optionally the model as ``module``.
            model: the module that the method updates, if it is not ``context.module`` or
                ``context._actor_module``.
            worker_idx: this worker's index.

        Raises:
            InvalidArgumentError: the actor has no such method.
        """
        found = next((each for each in (model, *modules_of(context)) if each is not None), None)
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


def modules_of(actor: Any) -> Iterator[Any]:
    """Yield what an actor shows as its module, under each name that it may have; None: nothing."""
    for name in ("module", "_actor_module"):
        yield getattr(actor, name, None)


def _weights_of(actor: Any) -> tuple[object, Any]:
    """Return the layout of an actor's module, and its weights as one array. Runs in the actor."""
    module = next((each for each in modules_of(actor) if each is not None), None)
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(
            f"{type(actor).__name__} has no module to begin with: give init_on_sender() model= or weights="
        )
    layout, buffer = packed({name: target.detach() for name, target in receiver_tensors(module).items()})
    return layout.to_wire(), buffer.numpy()
