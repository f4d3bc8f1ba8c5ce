"""Weights over torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeAlias

import torch

from aiosync.errors import InvalidArgumentError
from aiosync.schemes.arrival import Arrival
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.collective import Collected, FromRankZero
from aiosync.schemes.delivery import Delivery
from aiosync.schemes.ensemble import Ensemble
from aiosync.schemes.group import WeightGroup
from aiosync.transports.base import Listener, Transport
from aiosync.transports.distributed import DistributedListener, DistributedTransport
from aiosync.transports.process_group import Ranks, check_backend, device_of
from aiosync.transports.rendezvous import Meeting
from aiosync.transports.tcp import TCPTransport
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["Collective", "DistributedWeightSyncScheme"]

Collective: TypeAlias = Literal["p2p", "broadcast"]


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Workers of a job that has torch.distributed: weights go from rank to rank, in a few flat buckets.

    The sender is rank 0, worker ``i`` is rank ``i + 1``. Each worker and the sender make a process group of
    their own, beside whatever groups the job has: none of those is used, replaced or waited for, and none
    is needed. Sender and workers meet in a store: ``store=``, or the TCPStore at ``init_method=``, or at
    MASTER_ADDR and MASTER_PORT (so under ``torchrun`` nothing has to be given; there RANK is the worker's
    rank too), or one that the sender starts on this machine, which the pickled scheme knows.

    What torch.distributed cannot do, it cannot do here: a call into it is not interrupted, it ends when the
    other side goes on, or dies, or after ``timeout``. So a call of ours that is cancelled or reaches its
    deadline returns at once and leaves behind, until then, a thread and the slot that it reads or writes; a
    stopped worker keeps such a slot, beside those of the others. Whatever goes wrong in a group ends the
    worker's connection; a worker connects again by itself and gets a group of its own, as a replacement
    does. Whoever can reach the store is trusted, as in torch.distributed itself.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until the weights are applied, where ``wait=`` does not say.
        collective: ``"p2p"``, from the sender to each worker; ``"broadcast"``, to all workers at once where a
            send addresses all of them and they are there, through one process group of all. In that a worker
            that stops holds up the others, at most for ``timeout``; when one dies, weights go to each by
            itself until :meth:`reconnect`.
        store: a torch.distributed store that is reached from both sides.
        init_method: ``"env://"`` or ``"tcp://host:port"``.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: a backend that is not there, a store that is none.
    """

    backends = ("distributed",)
    _holds = False
    _streams = "plain"

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        *,
        collective: Collective = "p2p",
        store: Any = None,
        init_method: str | None = None,
        reconnect_for: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(sync=sync, **options)
        check_backend(backend)
        if collective not in ("p2p", "broadcast"):
            raise InvalidArgumentError(f"collective={collective!r}: expected 'p2p' or 'broadcast'")
        self._backend = backend
        self._collective = collective
        self._ensembles: dict[WeightGroup, Ensemble] = {}
        self._meeting = Meeting.at(store, init_method)
        self._reconnect_for = reconnect_for

    def _usual_index(self) -> int | None:
        rank = os.environ.get("RANK", "")
        return int(rank) - 1 if rank.isdigit() and int(rank) > 0 else None

    async def reconnect(self, *, timeout: float | None = None) -> None:
        """On the sender, after a worker was lost: wait until all workers are there, the survivors and a
        replacement, and make broadcasts again in a process group of them. (Each worker has a process group of
        its own with the sender from when it connects, and is sent everything through that meanwhile.)

        Raises:
            NotConnectedError: this is no connected sender.
            SyncTimeoutError: some did not come in time; it names them.
        """
        await self.get_sender().await_workers(self._deadline(timeout))
        for ensemble in self._ensembles.values():
            ensemble.renew()

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        listener = DistributedListener(self._meeting, self._model_id, self._token)
        self._meeting = listener.meeting
        return listener

    def create_transport(self, *, worker_idx: int) -> DistributedTransport:
        """A worker's connection, not open yet."""
        return DistributedTransport(self._meeting, self._model_id, worker_idx + 1)

    def _allocate(self, nbytes: int, device: torch.device) -> Segment:
        return Segment.private(nbytes, device_of(self._backend))

    def _deliver(self, transport: Transport, group: WeightGroup) -> Delivery:
        assert isinstance(transport, TCPTransport)
        if self._collective == "broadcast" and group not in self._ensembles:
            self._ensembles[group] = Ensemble(group, self._rank_zero)
        return FromRankZero(transport, group, self._rank_zero, self._ensembles.get(group))

    def _rank_zero(self, key: str, size: int = 2) -> Ranks:
        listener = self._listener
        assert isinstance(listener, DistributedListener)
        return Ranks(self._backend, listener.connection, key, 0, size, timeout=self.timeout)

    def _release(self) -> None:
        self._ensembles.clear()

    def _make_arrival(self, layout: Layout) -> Arrival:
        return Collected(layout, device_of(self._backend), self._member)

    def _member(self, transport: DistributedTransport, key: str, rank: int, size: int) -> Ranks:
        return Ranks(self._backend, transport.connection, key, rank, size, timeout=self.timeout)

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        if self._meeting.store is not None and not inherit:
            raise InvalidArgumentError(
                "a scheme with store= cannot be pickled: make one in each process, with a store of its own"
            )
        return {
            "backend": self._backend,
            "collective": self._collective,
            "meeting": self._meeting,
            "reconnect_for": self._reconnect_for,
        }

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        self._backend = recipe["backend"]
        self._collective = recipe["collective"]
        self._ensembles = {}
        self._meeting = recipe["meeting"]
        self._reconnect_for = recipe["reconnect_for"]
