"""Weights between the actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeAlias

from aiosync._deadline import Deadline
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.events import logger
from aiosync.schemes.attach import enlist
from aiosync.schemes.ranked import RankedWeightSyncScheme
from aiosync.schemes.values import checked_index
from aiosync.transfer.base import Transfer
from aiosync.transfer.object_store import ObjectStoreTransfer
from aiosync.transfer.process_group import Collective
from aiosync.transfer.stream import StreamTransfer
from aiosync.transports.base import Listener
from aiosync.transports.ray.calls import ActorCall, handle_of, in_actor
from aiosync.transports.ray.rendezvous import RayListener, RayWorkerTransport, SenderInfo

__all__ = ["RayWeightSyncScheme"]

DataPlane: TypeAlias = Literal["object_store", "tcp", "distributed"]
TensorTransport: TypeAlias = Literal["object_store", "nixl"]


class RayWeightSyncScheme(RankedWeightSyncScheme):
    """Workers that are Ray actors, anywhere in the cluster.

    Each version is copied into a slot. Actors on the driver's node view that where it is; for all others it
    is put into Ray's object store once, whatever their number, and each reads the object where it lies, on
    its own node. Its parameters view the driver's or the store's memory until the next version, so they are
    read only by contract. The driver releases an object when the last actor has read it. Ray keeps it as
    long as a process views it. (What has at most 256 KiB is sent as it is.) A small actor of our own, one for
    each driver, has the references: so an actor is sent updates, and applies them, also in the middle of a
    method of its own that never returns.

    ``ray.init()`` is the caller's to call. An actor of any kind is made a worker by the sender's ``connect``:
    it needs the model, as ``actor.policy`` or ``actor.get_model("policy")``; no update lands in a running
    forward pass of that. If it has ``update_policy_weights_``, that is called with each update, and the
    model gets memory of its own. Or an actor makes its endpoint itself, from the pickled scheme.

    Besides Ray's calls there is a connection from each actor to the sender's node, by which its end is
    noticed, and what both sides say to each other goes; it is authenticated by a token that travels with
    the scheme. Who may call the cluster's actors is trusted, as in Ray itself, which unpickles what comes.

    Args:
        tensor_transport: how Ray moves objects: ``"object_store"``, or ``"nixl"`` for what Ray itself does
            with that (actors need ``enable_tensor_transport=True``).
        sync: whether ``send`` waits until the weights are applied, where ``wait=`` does not say.
        data_plane: what moves the bytes: ``"object_store"``; ``"tcp"``, as
            :class:`~aiosync.TCPWeightSyncScheme`; ``"distributed"``, as
            :class:`~aiosync.DistributedWeightSyncScheme`, without anything to be set up.
        backend: of torch.distributed, with ``data_plane="distributed"``.
        collective: the same.
        share_memory: whether actors on the driver's node view its memory; not with ``data_plane="tcp"``.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: an argument that is none, or nixl where that is not installed.
    """

    backends = ("ray",)

    def __init__(
        self,
        tensor_transport: TensorTransport = "object_store",
        sync: bool = True,
        *,
        data_plane: DataPlane = "object_store",
        backend: str = "gloo",
        collective: Collective = "p2p",
        share_memory: bool = True,
        reconnect_for: float = 60.0,
        **options: Any,
    ) -> None:
        if backend != "gloo" and data_plane != "distributed":
            raise InvalidArgumentError(
                f"backend={backend!r} is of torch.distributed: it needs data_plane='distributed'"
            )
        super().__init__(backend, sync, collective, share_memory, reconnect_for, **options)
        if tensor_transport not in ("object_store", "nixl"):
            raise InvalidArgumentError(
                f"tensor_transport={tensor_transport!r}: expected 'object_store' or 'nixl'"
            )
        if data_plane not in ("object_store", "tcp", "distributed"):
            raise InvalidArgumentError(
                f"data_plane={data_plane!r}: expected 'object_store', 'tcp' or 'distributed'"
            )
        if tensor_transport == "nixl" and data_plane != "object_store":
            raise InvalidArgumentError(
                f"tensor_transport='nixl' moves Ray's objects, and data_plane={data_plane!r} makes none"
            )
        if tensor_transport == "nixl" and importlib.util.find_spec("nixl") is None:
            raise InvalidArgumentError(
                "tensor_transport='nixl' needs NVIDIA's nixl, which is not installed: pip install nixl"
            )
        self._tensor_transport = tensor_transport
        self._data_plane = data_plane
        self._known: SenderInfo | None = None
        self._actors: dict[int, Any] = {}

    def init_on_sender(
        self,
        *,
        actors: Sequence[Any] | None = None,
        remote_collectors: Sequence[Any] | None = None,
        **arguments: Any,
    ) -> None:
        """See :meth:`WeightSyncScheme.init_on_sender`; worker ``i`` is the ``i``-th of ``actors``.

        Args:
            actors: handles; None: the ``remote_collectors`` of a ``context`` that has some.
            remote_collectors: as torchrl's ``RayCollector`` gives them: it has each of them make its endpoint
                itself. ``context`` is then only told.
            arguments: see there.

        Raises:
            NotInitializedError: this process takes no part in a Ray cluster.
            InvalidArgumentError: they are not one for each worker.
        """
        if remote_collectors is not None:
            self._serve_collectors(remote_collectors, **arguments)
            return
        context = arguments.get("context")
        given = actors if actors is not None else getattr(context, "remote_collectors", None)
        handles = [handle_of(actor) for actor in given or ()]
        for handle in handles:
            if getattr(handle, "__ray_call__", None) is None:
                raise InvalidArgumentError(f"actors: expected handles of Ray actors, got {handle!r:.80}")
        if handles and arguments.get("model_id") is None:
            arguments["model_id"] = "policy"
        if handles and context is None and "num_workers" not in arguments and "devices" not in arguments:
            arguments["num_workers"] = len(handles)
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
        """On the connected sender: make a worker of another actor, or of one in the place of a lost one that
        Ray does not start again, and wait until it runs on the newest version.

        Args:
            actor: its handle.
            worker_idx: which worker it is to be; None: the next.
            timeout: seconds; None: the scheme's.

        Returns:
            Its index.

        Raises:
            NotConnectedError: ``connect`` first.
            InvalidArgumentError: that worker is connected.
            RemoteApplyError, LayoutMismatchError: it has no such model.
            WorkerLostError: it is gone.
            SyncTimeoutError: it did not come in time.
        """
        deadline = self._deadline(timeout)
        sender = self.get_sender()
        worker_idx = None if worker_idx is None else checked_index(worker_idx)

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
        """Make workers of the actors.

        Raises:
            RemoteApplyError: one cannot be: it has no model of this name, say.
            WorkerLostError: one is gone.
        """
        calls = [self._enlist(worker, deadline) for worker in self._actors]
        joined = await asyncio.gather(*(call.answer() for call in calls), return_exceptions=True)
        for result in joined:
            if isinstance(result, BaseException):
                raise result
        return weights

    def _enlist(self, worker: int, deadline: Deadline) -> ActorCall:
        """Have an actor be a worker; if it is one already, nothing happens."""
        actor = self._actors[worker]
        own = getattr(actor, "_receive_weights_from", None)  # it is a WeightActorMixin
        if own is not None:
            pending = own.options(max_task_retries=-1).remote(self, self._model_id, worker)
        else:
            pending = in_actor(actor, enlist, self, self._model_id, worker)
        return ActorCall(worker, pending, deadline)

    async def _bring_back(self, worker: int) -> None:
        """An actor that Ray starts again knows nothing of what it was; one that lives is back by itself."""
        if worker not in self._actors:
            return
        try:
            await self._enlist(worker, self._deadline(None)).answer()
        except Exception as exc:  # noqa: BLE001 - Ray itself may be at its end
            logger.warning("the actor of worker %d does not come back: %s", worker, exc)

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        stores = self._data_plane == "object_store"
        listener = RayListener(self._token, self._bring_back, share_memory=self._shares, stores=stores)
        self._known = listener.known
        return listener

    def create_transport(self, *, worker_idx: int) -> RayWorkerTransport:
        """A worker's connection, not open yet.

        Raises:
            NotInitializedError: the scheme was copied before ``init_on_sender`` was called.
        """
        if self._known is None:
            raise NotInitializedError(
                "this scheme does not know its sender: call init_on_sender() before handing it to workers"
            )
        return RayWorkerTransport(self._known, share_memory=self._shares, carries=self._data_plane == "tcp")

    @property
    def _shares(self) -> bool:
        """Whether actors on the sender's machine view its slots."""
        return super()._shares and self._data_plane != "tcp"

    def _make_transfer(self) -> Transfer:
        if self._data_plane == "distributed":
            return super()._make_transfer()
        if self._data_plane == "tcp":
            return StreamTransfer()
        office = None if self._known is None else self._known.office
        return ObjectStoreTransfer(office, self._tensor_transport, self._listener, self._inline)

    def _release(self) -> None:
        self._actors = {}

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        return {
            **super()._recipe(inherit=inherit),
            "tensor_transport": self._tensor_transport,
            "data_plane": self._data_plane,
            "known": self._known,
        }

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        super()._restore(recipe)
        self._tensor_transport = recipe["tensor_transport"]
        self._data_plane = recipe["data_plane"]
        self._known = recipe["known"]
        self._actors = {}
