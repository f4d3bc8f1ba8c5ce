"""Weights between the actors of a Ray cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeAlias, Unpack, get_args

from aiosync._deadline import Deadline
from aiosync._options import CopyOptions, StrategyName, check_choice, check_count
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.events import logger
from aiosync.schemes.attach import all_joined, enlist
from aiosync.schemes.distributed import ProcessGroupScheme
from aiosync.schemes.recipe import UNKNOWN_SENDER
from aiosync.transfer.base import Transfer
from aiosync.transfer.object_store import ObjectStoreTransfer
from aiosync.transfer.process_group import Collective
from aiosync.transfer.stream import StreamTransfer
from aiosync.transports.base import Listener
from aiosync.transports.ray.rendezvous import RayListener, RayWorkerTransport, SenderInfo
from aiosync.transports.ray.transport import ActorCall, handle_of, in_actor

DataPlane: TypeAlias = Literal["object_store", "tcp", "distributed"]
TensorTransport: TypeAlias = Literal["object_store", "nixl"]


class RayOptions(CopyOptions, total=False):
    """Keywords of :class:`RayWeightSyncScheme`, but for ``strategy`` and ``backend``."""

    sync: bool
    tensor_transport: TensorTransport
    data_plane: DataPlane | None
    collective: Collective
    share_memory: bool
    reconnect_for: float


class RayWeightSyncScheme(ProcessGroupScheme):
    """Sends weights to Ray actors, anywhere in the cluster.

    Actors on the driver's node view the driver's slots. For all other actors a version is put into Ray's
    object store once, and each actor views the object on its node. An actor's parameters view this memory
    until the next version, so they are read only by contract. (Weights of at most 256 KiB are sent in the
    update message.) A small helper actor, one per driver, has the object references, so an actor can apply
    updates while one of its methods runs, even one that never returns.

    The caller calls ``ray.init()``. The sender's ``connect`` turns any actor into a worker. The actor needs
    the model, as ``actor.policy`` or ``actor.get_model("policy")``; no update is applied during the model's
    forward pass. If the actor has ``update_policy_weights_``, it is called with each update, and the model
    gets private memory. An actor may also create its endpoint itself, from the pickled scheme.

    Besides Ray's calls each actor opens a connection to the sender's node. It carries both sides' messages,
    shows the end of the actor, and is authenticated by a token that is pickled with the scheme. Every process
    that may call the cluster's actors is trusted, as in Ray itself, which unpickles what it receives.

    Args:
        strategy: see :class:`~aiosync.WeightSyncScheme`.
        backend: of torch.distributed, with ``data_plane="distributed"``.
        sync: whether ``send`` waits until the weights are applied, if ``wait=`` is not given.
        tensor_transport: how Ray moves objects: ``"object_store"``, or ``"nixl"`` for Ray's own support of
            NIXL (actors need ``enable_tensor_transport=True``).
        data_plane: how the bytes are moved: ``"object_store"``; ``"tcp"``, as
            :class:`~aiosync.TCPWeightSyncScheme`; ``"distributed"``, as
            :class:`~aiosync.DistributedWeightSyncScheme`, without any setup. None: ``"distributed"`` for
            another ``backend`` than gloo, else ``"object_store"``.
        collective: ``"p2p"`` or ``"broadcast"``, with ``data_plane="distributed"``.
        share_memory: whether actors on the driver's node view its memory; not with ``data_plane="tcp"``.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: an invalid argument, or nixl is not installed.
    """

    backends = ("ray",)
    _fields = (*ProcessGroupScheme._fields, "tensor_transport", "data_plane", "known")
    _known: SenderInfo | None = None

    def __init__(
        self,
        strategy: StrategyName = "tensordict",
        backend: str = "gloo",
        *,
        sync: bool = True,
        tensor_transport: TensorTransport = "object_store",
        data_plane: DataPlane | None = None,
        collective: Collective = "p2p",
        share_memory: bool = True,
        reconnect_for: float = 60.0,
        **options: Unpack[CopyOptions],
    ) -> None:
        if data_plane is None:
            data_plane = "object_store" if backend == "gloo" else "distributed"
        _check_planes(tensor_transport, data_plane, backend)
        super().__init__(
            backend, collective, share_memory, reconnect_for, strategy=strategy, sync=sync, **options
        )
        self._tensor_transport: TensorTransport = tensor_transport
        self._data_plane: DataPlane = data_plane

    def _forget_runtime(self) -> None:
        super()._forget_runtime()
        # Worker -> the handle of its actor.
        self._actors: dict[int, Any] = {}

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        actors: Sequence[Any] | None = None,
        remote_collectors: Sequence[Any] | None = None,
        num_collectors: int | None = None,
        source_model: Any = None,
        **arguments: Any,
    ) -> None:
        """See :meth:`WeightSyncScheme.init_on_sender`; worker ``i`` is the ``i``-th of ``actors``.

        Args:
            model_id: the model's name.
            context: an object with the model, and its actors as ``remote_collectors`` or ``actor_refs``; it
                may say their number as ``num_collectors``.
            actors: handles; None: the context's, if it has them.
            remote_collectors: as torchrl's ``RayCollector`` gives them. Each of them creates its endpoint
                itself; ``context`` is then not searched for models or workers.
            num_collectors: another name of ``num_workers``.
            source_model: another name of ``model``.

        Raises:
            NotInitializedError: this process is not connected to a Ray cluster.
            InvalidArgumentError: the number of actors is not the number of workers.
        """
        arguments |= {"model_id": model_id, "context": context}
        named = {"num_workers": num_collectors, "model": source_model}
        arguments |= {name: value for name, value in named.items() if value is not None}
        if remote_collectors is not None:
            self._serve_collectors(remote_collectors, **arguments)
            return
        given = actors if actors is not None else actors_of(context)
        handles = [handle_of(actor) for actor in given or ()]
        for handle in handles:
            if getattr(handle, "__ray_call__", None) is None:
                raise InvalidArgumentError(f"actors: expected handles of Ray actors, got {handle!r:.80}")
        if handles and model_id is None:
            arguments["model_id"] = "policy"
        counted = getattr(context, "num_workers", None) is not None
        if handles and not counted and not {"num_workers", "devices"} & arguments.keys():
            arguments["num_workers"] = getattr(context, "num_collectors", None) or len(handles)
        super().init_on_sender(**arguments)
        assert self._plan is not None
        if handles and len(handles) != len(self._plan.workers):
            raise InvalidArgumentError(
                f"{len(handles)} actors for {len(self._plan.workers)} workers: expected one each"
            )
        self._actors = dict(zip(self._plan.workers, handles, strict=False))

    def _serve_collectors(
        self, collectors: Sequence[Any], *, model: Any = None, context: Any = None, **arguments: Any
    ) -> None:
        self._actors = {}
        if model is None:
            super().init_on_sender(context=context, **arguments)
        else:
            super().init_on_sender(model=model, **{"num_workers": len(collectors), **arguments})
            self.context = context

    async def add_worker(
        self, actor: Any, worker_idx: int | None = None, *, timeout: float | None = None
    ) -> int:
        """On the connected sender: add an actor as a worker, and wait until it has the newest version.

        The actor may replace a lost one that Ray does not restart. Returns the worker's index.

        Args:
            actor: the actor's handle.
            worker_idx: the worker's index; None: the next.
            timeout: seconds; None: the scheme's.

        Raises:
            NotConnectedError: the scheme is not connected.
            InvalidArgumentError: a worker with this index is connected.
            RemoteApplyError, LayoutMismatchError: the actor has no such model.
            WorkerLostError: the actor is gone.
            SyncTimeoutError: the actor did not connect in time.
        """
        deadline = self._deadline(timeout)
        sender = self.get_sender()
        if worker_idx is not None:
            check_count("worker_idx", worker_idx)

        async def join(worker: int) -> None:
            self._actors[worker] = handle_of(actor)
            await self._enlist(worker, deadline).answer()

        try:
            return await sender.add_worker(worker_idx, join, deadline)
        except BaseException:
            for worker in self._actors.keys() - sender.registry.workers:
                del self._actors[worker]
            raise

    async def _before_connect(self, weights: Any, deadline: Deadline) -> Any:
        await all_joined(self._enlist(worker, deadline).answer() for worker in self._actors)
        return weights

    def _enlist(self, worker: int, deadline: Deadline) -> ActorCall:
        """Enlist an actor as a worker. Does nothing if it is one already."""
        actor = self._actors[worker]
        own = getattr(actor, "_receive_weights_from", None)  # it is a WeightActorMixin
        if own is not None:
            pending = own.options(max_task_retries=-1).remote(self, self._model_id, worker)
        else:
            pending = in_actor(actor, enlist, self, self._model_id, worker)
        return ActorCall(worker, pending, deadline)

    async def _bring_back(self, worker: int) -> None:
        """Enlist an actor again that Ray has restarted. An actor that still runs reconnects by itself."""
        if worker not in self._actors:
            return
        try:
            await self._enlist(worker, self._deadline(None)).answer()
        except Exception as exc:  # noqa: BLE001 - Ray itself may be shutting down
            logger.warning("the actor of worker %d does not come back: %s", worker, exc)

    @property
    def port_of_sender(self) -> int:
        return self._known.address.port if self._known is not None else 0

    @property
    def _shares(self) -> bool:
        return super()._shares and self._data_plane != "tcp"

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        stores = self._data_plane == "object_store"
        listener = RayListener(self._token, self._bring_back, share_memory=self._shares, stores=stores)
        self._known = listener.sender_info
        return listener

    def create_transport(self, *, worker_idx: int) -> RayWorkerTransport:
        if self._known is None:
            raise NotInitializedError(UNKNOWN_SENDER)
        return RayWorkerTransport(self._known, share_memory=self._shares, carries=self._data_plane == "tcp")

    def _make_transfer(self) -> Transfer:
        if self._data_plane == "tcp":
            return StreamTransfer()
        if self._data_plane == "distributed":
            return super()._make_transfer()
        office = None if self._known is None else self._known.ref_keeper
        return ObjectStoreTransfer(office, self._tensor_transport, self._listener, self._inline)

    def _release(self) -> None:
        self._actors = {}


def actors_of(context: Any) -> Sequence[Any] | None:
    """Return the actors that a context has as ``remote_collectors`` or ``actor_refs``; None: neither."""
    found = getattr(context, "remote_collectors", None)
    return getattr(context, "actor_refs", None) if found is None else found


def _check_planes(tensor_transport: object, data_plane: object, backend: str) -> None:
    """Raise InvalidArgumentError for values that do not exist, are not installed or cannot be combined."""
    if backend != "gloo" and data_plane != "distributed":
        raise InvalidArgumentError(
            f"backend={backend!r} is of torch.distributed: it needs data_plane='distributed'"
        )
    check_choice("tensor_transport", tensor_transport, get_args(TensorTransport))
    check_choice("data_plane", data_plane, get_args(DataPlane))
    if tensor_transport == "nixl" and data_plane != "object_store":
        raise InvalidArgumentError(
            f"tensor_transport='nixl' moves Ray's objects, and data_plane={data_plane!r} makes none"
        )
    if tensor_transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise InvalidArgumentError(
            "tensor_transport='nixl' needs NVIDIA's nixl, which is not installed: pip install nixl"
        )
