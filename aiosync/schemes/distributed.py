"""Weights over torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from aiosync._options import OnSenderClose, check_reconnecting
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.ranked import RankedWeightSyncScheme
from aiosync.transfer.process_group import Collective
from aiosync.transports.base import Listener
from aiosync.transports.torch_distributed.store import StoreAddress
from aiosync.transports.torch_distributed.transport import DistributedListener, DistributedTransport

__all__ = ["DistributedWeightSyncScheme"]


class DistributedWeightSyncScheme(RankedWeightSyncScheme):
    """Workers of a job that has torch.distributed: weights go from rank to rank, in a few flat buckets.

    The sender is rank 0, worker ``i`` is rank ``i + 1``. Each worker and the sender make a process group of
    their own, beside whatever groups the job has: none of those is used, replaced or waited for, and none
    is needed. A worker on the sender's machine is sent nothing: like one of
    :class:`~aiosync.SharedMemWeightSyncScheme` it views the sender's slots, which are shared memory.
    (It is the worker that finds out whether it can read them: one in another container may not.)

    Sender and workers meet in a store: ``store=``, or the TCPStore at ``init_method=``, or at MASTER_ADDR and
    MASTER_PORT (so under ``torchrun`` nothing has to be given; there RANK is the worker's rank too), or one
    that the sender starts on this machine, which the pickled scheme knows.

    What torch.distributed cannot do, it cannot do here: a call into it is not interrupted, it ends when the
    other side goes on, or dies, or after ``timeout``. So a call of ours that is cancelled or reaches its
    deadline returns at once and leaves behind, until then, a thread and the slot that it reads or writes; a
    stopped worker keeps such a slot, beside those of the others. Whatever goes wrong in a group ends the
    worker's connection; a worker connects again by itself and gets a group of its own, as a replacement
    does. All processes that can reach the store are trusted, as in torch.distributed itself.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until the weights are applied, where ``wait=`` does not say.
        collective: ``"p2p"``, from the sender to each worker; ``"broadcast"``, to all workers at once where a
            send addresses all of them and they are there, through one process group of all. In that a worker
            that stops holds up the others, at most for ``timeout``; when one dies, weights go to each by
            itself until :meth:`reconnect`.
        store: a torch.distributed store that is reached from both sides.
        init_method: ``"env://"`` or ``"tcp://host:port"``.
        share_memory: whether workers on the sender's machine view its slots (with gloo, on Linux). Their
            parameters are read only by contract then: one that writes into its own takes
            ``commit="copy"``. Without it, or where one side is without it, they are sent everything.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        on_sender_close: ``"stop"``: when the sender closes in order a worker stops receiving, and the version
            that it has stays in service. ``"wait"``: it looks for a sender in the store for ``reconnect_for``
            seconds.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: a backend that is not there, a store that is none.
    """

    backends = ("distributed",)

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        *,
        collective: Collective = "p2p",
        store: Any = None,
        init_method: str | None = None,
        share_memory: bool = True,
        reconnect_for: float = 60.0,
        on_sender_close: OnSenderClose = "stop",
        **options: Any,
    ) -> None:
        super().__init__(backend, sync, collective, share_memory, reconnect_for, **options)
        check_reconnecting(reconnect_for, on_sender_close)
        self._on_sender_close = on_sender_close
        self._meeting = StoreAddress.at(store, init_method)

    def _usual_index(self) -> int | None:
        rank = os.environ.get("RANK", "")
        return int(rank) - 1 if rank.isdigit() and int(rank) > 0 else None

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        listener = DistributedListener(self._meeting, self._model_id, self._token, share_memory=self._shares)
        self._meeting = listener.meeting
        return listener

    def create_transport(self, *, worker_idx: int) -> DistributedTransport:
        """A worker's connection, not open yet."""
        return DistributedTransport(self._meeting, self._model_id, worker_idx + 1, share_memory=self._shares)

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        if self._meeting.store is not None and not inherit:
            raise InvalidArgumentError(
                "a scheme with store= cannot be pickled: make one in each process, with a store of its own"
            )
        mine = {"meeting": self._meeting, "on_sender_close": self._on_sender_close}
        return {**super()._recipe(inherit=inherit), **mine}

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        super()._restore(recipe)
        self._meeting = recipe["meeting"]
        self._on_sender_close = recipe["on_sender_close"]
