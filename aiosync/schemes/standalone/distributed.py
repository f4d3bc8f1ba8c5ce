"""torch.distributed, used alone."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from aiosync._options import check_bool, check_count
from aiosync.errors import NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.distributed import DistributedWeightSyncScheme
from aiosync.schemes.standalone.base import StandaloneTransport, init_sender


class DistributedTransport(StandaloneTransport):
    """Sends weights to one rank by torch.distributed, without a scheme.

    Both sides give the same store and the worker's rank. The weights are sent by a process group of two,
    which the transport makes, or viewed in the sender's memory by a worker on the same machine; see
    :class:`~aiosync.DistributedWeightSyncScheme`. Without a store or a rank every call does nothing.

    Args:
        weights_buffer: on the worker, a TensorDict or dict that the weights are written to.
        store: a torch.distributed store that both sides can reach.
        rank: the worker's rank, from 1: the sender is rank 0.
        sync: as in torchrl; not used: ``send_weights`` waits, ``send_weights_async`` does not.
        timeout: seconds that a call may take by default; None: the environment's ``AIOSYNC_TIMEOUT``, else
            120.
    """

    _fills_buffer: ClassVar[bool] = True

    def __init__(
        self,
        *,
        weights_buffer: Any = None,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        if rank is not None:
            check_count("rank", rank, least=1)
        check_bool("sync", sync)
        self.weights_buffer = weights_buffer
        self.store = store
        self.rank = rank
        self.sync = sync

    @property
    def _may_send(self) -> bool:
        return self.store is not None and self.rank is not None

    @property
    def _may_receive(self) -> bool:
        return self._may_send

    async def send_initial_weights(self, weights: Any, *, timeout: float | None = None) -> None:
        """Send the first weights, as :meth:`send_weights`. Without a store, use the default group's.

        Args:
            weights: as in :meth:`send_weights`.
            timeout: seconds; None: the transport's.

        Raises:
            NotInitializedError: there is neither a store nor a default group.
            Exception: as :meth:`send_weights`.
        """
        if self.rank is not None:
            await self._sender().send(weights, None, wait=True, deadline=self._deadline(timeout))

    async def receive_initial_weights(self, *, timeout: float | None = None) -> Any:
        """Wait for the first weights, write them to the buffer and return it.

        Args:
            timeout: seconds; None: the transport's.

        Raises:
            NotInitializedError: there is neither a store nor a default group.
            SyncTimeoutError: no weights came in time.
            Exception: as :meth:`receive_weights`.
        """
        deadline = self._deadline(timeout)
        found = await self._receiver().receive(deadline, self.weights_buffer, None, None)
        if found is None:
            raise deadline.error("connect", hint="no weights came from the sender")
        return found

    async def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int = 0,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Start to connect to the sender. Does not wait: :meth:`receive_initial_weights` or
        :meth:`receive_weights` returns the first weights.

        Args:
            worker_idx: not used: the rank says which worker this is.
            weights: as in :meth:`receive_weights`.
            model: as in :meth:`receive_weights`.
            strategy: as in :meth:`receive_weights`.
            timeout: not used.
        """
        if self._may_receive:
            target = weights if weights is not None else self.weights_buffer
            self._receiver().begin(model if model is not None else target, strategy)

    async def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Wait for weights that no earlier call has returned, and write them to the buffer.

        Args:
            timeout: seconds; None: the transport's.
            weights: the buffer, in place of ``weights_buffer``.
            model: see the base class.
            strategy: see the base class.

        Returns:
            The buffer, or None if no weights came in time. Without a buffer as the base class.

        Raises:
            Exception: as the base class.
        """
        buffer = weights if weights is not None else self.weights_buffer
        return await super().receive_weights(timeout, weights=buffer, model=model, strategy=strategy)

    async def wait_ack(self, *, timeout: float | None = None) -> None:
        """As the base class; without a store or a rank it does nothing."""
        if self._may_send:
            await super().wait_ack(timeout=timeout)

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        return init_sender(self._make_scheme(), model, model_id=self._name)

    async def _make_receiver(self) -> WeightSyncScheme:
        scheme = self._make_scheme()
        scheme.model_id = self._name
        return scheme

    @property
    def _name(self) -> str:
        return f"weights of rank {self.rank}"

    def _make_scheme(self) -> DistributedWeightSyncScheme:
        store = self.store
        if store is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        if store is None:
            raise NotInitializedError("there is no store: give store=, or call init_process_group() first")
        return DistributedWeightSyncScheme(store=store)
