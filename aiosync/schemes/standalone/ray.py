"""Ray actors, used alone."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from aiosync._deadline import Deadline
from aiosync._options import check_choice, check_count
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme, TensorTransport
from aiosync.schemes.ray_modules import RayModuleTransformScheme
from aiosync.schemes.standalone.base import init_sender
from aiosync.schemes.standalone.offers import Key, offer
from aiosync.schemes.standalone.remote import RemoteTransport
from aiosync.transports.ray.transport import ActorCall, RayActor, UpdateMethod, handle_of, in_actor


class RayTransport(RemoteTransport):
    """Sends weights to one Ray actor, without a scheme.

    The sender gives the actor; see :class:`~aiosync.RayWeightSyncScheme` for how the weights get there. In
    the actor's process either a ``RayTransport`` without an actor receives, with the same ``worker_idx`` and
    ``connection_info_name``, which was created before the first send; or the actor has the model, as
    ``actor.policy`` or by ``get_model("policy")``, and a receiver starts beside it.

    Args:
        remote_actor: the actor's handle, or an object that has it as ``_actor``.
        worker_idx: the actor's index among the senders' actors; None: 0.
        backend: ``"gloo"``, or ``"nccl"``: by a process group of torch.distributed between GPUs.
        connection_info_name: a name that both sides give.
        model_id: the model's name on the actor; None: ``"policy"``.
        remote_collector: another name of ``remote_actor``.
        tensor_transport: how Ray moves objects: ``"object_store"`` or ``"nixl"``.
        timeout: seconds that a call may take by default; None: the environment's ``AIOSYNC_TIMEOUT``, else
            120.

    Raises:
        InvalidArgumentError: an invalid argument.
    """

    _fills_buffer: ClassVar[bool] = True

    def __init__(
        self,
        *,
        remote_actor: Any = None,
        worker_idx: int | None = None,
        backend: str = "gloo",
        connection_info_name: str = "connection_info",
        model_id: str | None = None,
        remote_collector: Any = None,
        tensor_transport: TensorTransport = "object_store",
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        if remote_actor is not None and remote_collector is not None:
            raise InvalidArgumentError("give remote_actor= or remote_collector=, not both")
        check_choice("backend", backend, ("gloo", "nccl"))
        self._actor = handle_of(remote_actor if remote_actor is not None else remote_collector)
        self.worker_idx = 0 if worker_idx is None else worker_idx
        check_count("worker_idx", self.worker_idx)
        self.backend = backend
        self.connection_info_name = connection_info_name
        self.model_id = model_id
        self.tensor_transport: TensorTransport = tensor_transport
        self._model: Any = None
        self._expect()

    @property
    def offer_key(self) -> Key:
        """Under which the sender offers its address in the actor's process."""
        return self.connection_info_name, self.worker_idx

    def _remote(self) -> RayActor | None:
        return None if self._actor is None else RayActor(self._actor)

    def set_model(self, model: Any) -> None:
        """Set the model that :meth:`receive_weights` applies weights to if it is given none.

        Args:
            model: an ``nn.Module``, TensorDict or dict.
        """
        self._model = model

    async def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Become the worker: connect to the sender, and return the newest weights.

        Args:
            worker_idx: this worker's index; None: the constructor's.
            weights: as in :meth:`receive_weights`.
            model: as in :meth:`receive_weights`.
            strategy: as in :meth:`receive_weights`.
            timeout: seconds; None: the transport's.

        Raises:
            SyncTimeoutError: no weights came in time.
            Exception: as :meth:`receive_weights`.
        """
        if worker_idx is not None:
            check_count("worker_idx", worker_idx)
            self.worker_idx = worker_idx
        return await super().setup_connection_and_weights_on_receiver(
            weights=weights, model=model, strategy=strategy, timeout=timeout
        )

    async def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """As the base class. Without ``model`` the weights are applied to the model of :meth:`set_model`."""
        return await super().receive_weights(
            timeout, weights=weights, model=self._model if model is None else model, strategy=strategy
        )

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        scheme = _ActorScheme(self.offer_key, backend=self.backend, tensor_transport=self.tensor_transport)
        return init_sender(scheme, model, model_id=self.model_id or "policy", actors=[self._actor])


class _ActorScheme(RayWeightSyncScheme):
    """Its one worker is in the process of an actor."""

    def __init__(self, key: Key, **options: Any) -> None:
        super().__init__(**options)
        self._key = key

    def _enlist(self, worker: int, deadline: Deadline) -> ActorCall:
        actor = self._actors[worker]
        if hasattr(actor, "_receive_weights_from"):  # a WeightActorMixin receives on its own event loop
            return super()._enlist(worker, deadline)
        pending = in_actor(actor, offer, self, self._key, self.model_id)
        return ActorCall(worker, pending, deadline)


class RayActorTransport(RemoteTransport):
    """Sends weights to a model inside one Ray actor, without a scheme.

    Each update is one call of the actor's ``_update_weights_tensordict(params=)`` or
    ``_update_weights_state_dict(state_dict=)``; see :class:`~aiosync.RayModuleTransformScheme`. The actor
    needs no transport.

    Args:
        actor_ref: the actor's handle, or an object that has it as ``_actor``; may be set later.
        update_method: ``"tensordict"`` or ``"state_dict"``.
        tensor_transport: how Ray moves objects: ``"object_store"`` or ``"nixl"``.
        timeout: seconds that a call may take by default; None: the environment's ``AIOSYNC_TIMEOUT``, else
            120.

    Raises:
        InvalidArgumentError: an invalid argument.
    """

    def __init__(
        self,
        actor_ref: Any = None,
        update_method: UpdateMethod = "tensordict",
        tensor_transport: TensorTransport = "object_store",
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        check_choice("update_method", update_method, ("tensordict", "state_dict"))
        self.update_method: UpdateMethod = update_method
        self.tensor_transport: TensorTransport = tensor_transport
        self._actor = handle_of(actor_ref)

    def set_actor(self, actor_ref: Any) -> None:
        """Set the actor. Before the first call that sends.

        Args:
            actor_ref: the actor's handle, or an object that has it as ``_actor``.

        Raises:
            InvalidArgumentError: weights have been sent to another actor.
        """
        if self._here._side is not None and handle_of(actor_ref) is not self._actor:
            raise InvalidArgumentError("this transport has sent to an actor: create another transport")
        self._actor = handle_of(actor_ref)

    def _remote(self) -> RayActor | None:
        return None if self._actor is None else RayActor(self._actor)

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        scheme = RayModuleTransformScheme(self.update_method, tensor_transport=self.tensor_transport)
        return init_sender(scheme, model, actors=[self._actor])
