"""Shared memory, used alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.shared_memory import SharedMemWeightSyncScheme
from aiosync.schemes.standalone.base import StandaloneTransport
from aiosync.schemes.standalone.queues import announce, check_queue, take_recipe
from aiosync.schemes.standalone.receiver_side import MODEL
from aiosync.schemes.standalone.sender_side import SenderSide
from aiosync.weights.strategy import to_tensordict

_AT_ONCE = 0.1  # seconds in which a version that has been published arrives


class SharedMemTransport(StandaloneTransport):
    """Sends weights to worker processes on this machine through shared memory, without a scheme.

    One object for all workers: the sender registers weights and one queue per worker, and passes the object
    to ``Process(args=...)``. Each worker finds the sender by its queue. Its model then views the sender's
    slots, read only by contract. A worker sees a version, whole, when it calls :meth:`receive_weights`.

    Args:
        timeout: seconds that a call may take by default; None: the environment's ``AIOSYNC_TIMEOUT``, else
            120.
    """

    _waits: ClassVar[bool] = False

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__(timeout)
        self._params_map: Mapping[int, Any] = {}
        self._queues: Mapping[int, Any] | None = None
        self._per_worker = False

    def register_weights(
        self, params_map: Mapping[int, Any], init_queues: Mapping[int, Any], per_worker: bool = False
    ) -> None:
        """Set the first weights, and the queues by which the workers find the sender. Nothing is sent yet.

        Args:
            params_map: worker -> weights (a TensorDict, dict or module); workers with the same object share
                one copy. Empty on a worker.
            init_queues: worker -> a queue of ``multiprocessing`` from the sender to this worker alone.
            per_worker: whether each worker has a copy of its own, and may be sent different weights.

        Raises:
            InvalidArgumentError: workers without weights, or something that is no queue.
        """
        if params_map and params_map.keys() != init_queues.keys():
            raise InvalidArgumentError(
                f"params_map has the workers {sorted(params_map)}, init_queues {sorted(init_queues)}: "
                "expected the same"
            )
        for worker, queue in init_queues.items():
            check_queue(f"init_queues[{worker!r}]", queue)
        if per_worker:  # one object per worker, so that none is shared
            params_map = {worker: to_tensordict(weights) for worker, weights in params_map.items()}
        self._params_map, self._queues, self._per_worker = params_map, init_queues, per_worker

    @property
    def unique_weights(self) -> list[Any]:
        """The newest weights of each group of workers that share them, as TensorDicts; read only.

        Raises:
            NotInitializedError: :meth:`register_weights` was not called.
        """
        side = self._here._side
        self._registered()
        if isinstance(side, SenderSide) and side.scheme is not None and side.scheme.version >= 0:
            return [to_tensordict(views) for views in side.scheme.get_sender().group_weights]
        unique = {id(weights): weights for weights in self._params_map.values()}
        return [to_tensordict(weights) for weights in unique.values()]

    # -- the sender's side --------------------------------------------------------------------------------

    async def setup_connection_and_weights_on_sender(
        self, weights: Any = None, *, timeout: float | None = None
    ) -> None:
        """Publish the registered weights, or ``weights``, and let workers connect. Does not wait for them.

        Args:
            weights: as in :meth:`send_weights`.
            timeout: seconds; None: the transport's.

        Raises:
            NotInitializedError: :meth:`register_weights` was not called.
        """
        self._registered()
        await self._sender().open(self._deadline(timeout))
        if weights is not None:
            await self.send_weights(weights, timeout=timeout)

    async def send_weights(
        self, weights: Any, worker_ids: list[int] | None = None, *, timeout: float | None = None
    ) -> None:
        """Publish weights, and wait until the workers that have connected have applied them. A worker that
        connects later gets the newest weights.

        Args:
            weights: an ``nn.Module``, a TensorDict or a dict; with ``per_worker`` also a dict of worker ->
                weights.
            worker_ids: the workers to update; None: all.
            timeout: seconds; None: the transport's.

        Raises:
            NotInitializedError: :meth:`register_weights` was not called.
            UnknownWorkerError: there is no such worker.
            Exception: as the base class.
        """
        await self._publish(weights, worker_ids, wait=True, timeout=timeout)

    async def send_weights_async(
        self,
        weights: Any,
        model_id: str = "policy",
        *,
        worker_ids: list[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Publish weights and return; :meth:`wait_ack` waits for the workers.

        Args:
            weights: as in :meth:`send_weights`.
            model_id: not used, as in torchrl: one transport sends one model.
            worker_ids: as in :meth:`send_weights`.
            timeout: seconds; None: the transport's.

        Raises:
            Exception: as :meth:`send_weights`.
        """
        await self._publish(weights, worker_ids, wait=False, timeout=timeout)

    async def _publish(
        self, weights: Any, worker_ids: list[int] | None, *, wait: bool, timeout: float | None
    ) -> None:
        self._registered()
        side, deadline = self._sender(), self._deadline(timeout)
        await side.open(deadline)
        await side.send(weights, worker_ids, wait=wait, deadline=deadline)

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        scheme = SharedMemWeightSyncScheme(per_worker_weights=self._per_worker)
        scheme.init_on_sender(model_id=MODEL, params_map=self._params_map)
        return scheme

    async def _announce(self, scheme: WeightSyncScheme, first: bool) -> None:
        assert isinstance(scheme, SharedMemWeightSyncScheme)
        connected = scheme.sender_transports
        for worker, queue in self._registered().items():
            if worker not in connected:
                announce(queue, scheme, first=first)

    # -- a worker's side ----------------------------------------------------------------------------------

    async def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Become a worker: connect to the sender, and return the newest weights.

        Args:
            worker_idx: this worker's index; None: the only one that has a queue.
            weights: not used: the weights come from the sender.
            model: as in :meth:`receive_weights`.
            strategy: as in :meth:`receive_weights`.
            timeout: seconds; None: the transport's.

        Raises:
            NotInitializedError: :meth:`register_weights` was not called, or this worker has no queue.
            SyncTimeoutError: no weights came in time.
            Exception: as :meth:`receive_weights`.
        """
        queues = self._registered()
        index = next(iter(queues)) if worker_idx is None and len(queues) == 1 else worker_idx
        if index not in queues:
            raise NotInitializedError(f"worker {index} has no queue: init_queues has {sorted(queues)}")
        assert index is not None
        self._receiver(index)
        return await super().setup_connection_and_weights_on_receiver(
            model=model, strategy=strategy, timeout=timeout
        )

    async def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Apply a version that no earlier call has returned; without ``timeout`` do not wait for one.

        Args:
            timeout: seconds to wait for a version. None: only one that has been published already counts, and
                if there is none but ``model`` is given, the weights that the model has are returned.
            weights: not used: the weights come from the sender.
            model: see the base class.
            strategy: see the base class.

        Raises:
            NotInitializedError: with several queues, ``setup_connection_and_weights_on_receiver`` was not
                called.
            Exception: as the base class.
        """
        if self._here._side is None:
            queues = self._registered()
            if len(queues) != 1:
                raise NotInitializedError("call setup_connection_and_weights_on_receiver(worker_idx=) first")
            self._receiver(next(iter(queues)))
        at_once = timeout is None and self.check_connection()
        found = await super().receive_weights(
            _AT_ONCE if at_once else timeout, model=model, strategy=strategy
        )
        scheme = self._receiver().scheme
        if found is None and at_once and model is not None and scheme is not None:
            return scheme.weights
        return found

    @property
    def _finds_another(self) -> bool:
        return True

    async def _make_receiver(self) -> WeightSyncScheme:
        return await take_recipe(self._registered()[self._receiver().index])

    def _registered(self) -> Mapping[int, Any]:
        if self._queues is None:
            raise NotInitializedError("there are no weights and queues yet: call register_weights() first")
        return self._queues

    def __getstate__(self) -> dict[str, Any]:
        # A worker gets the weights from the sender.
        return {**super().__getstate__(), "_params_map": {}}
