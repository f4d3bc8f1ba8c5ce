"""Weights over torch.distributed, and what other schemes share that can send through its process groups."""

from __future__ import annotations

import os
from collections.abc import Iterable
from multiprocessing.context import BaseContext
from typing import Any, ClassVar, Unpack

from aiosync._options import (
    CommonOptions,
    OnSenderClose,
    RankOptions,
    check_bool,
    check_choice,
    check_reconnecting,
    check_seconds,
)
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.sender.endpoint import WeightSender
from aiosync.transfer.base import Transfer
from aiosync.transfer.process_group import Collective, ProcessGroupTransfer
from aiosync.transports.base import Listener
from aiosync.transports.torch_distributed.process_group import check_backend
from aiosync.transports.torch_distributed.store import StoreAddress
from aiosync.transports.torch_distributed.transport import DistributedListener, StoreConnection
from aiosync.weights.copying import INLINE_LIMIT


class ProcessGroupScheme(WeightSyncScheme):
    """A scheme with process groups; see :class:`~aiosync.DistributedWeightSyncScheme` for the arguments."""

    _fields: ClassVar[tuple[str, ...]] = ("backend", "collective", "share_memory", "reconnect_for")
    # Weights up to this size in bytes are sent in the update message.
    _inline: ClassVar[int] = INLINE_LIMIT

    def __init__(
        self,
        backend: str,
        collective: Collective,
        share_memory: bool,
        reconnect_for: float,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        check_choice("backend", backend, ("gloo", "nccl"))
        check_choice("collective", collective, ("p2p", "broadcast"))
        check_bool("share_memory", share_memory)
        check_seconds("reconnect_for", reconnect_for)
        self._backend = backend
        self._collective: Collective = collective
        self._share_memory = share_memory
        self._reconnect_for = reconnect_for

    async def reconnect(self, *, timeout: float | None = None) -> None:
        """On the sender, after a worker was lost: wait for all workers to connect, then resume broadcasts.

        The broadcasts use a new process group. Until then, the sender sends to each worker separately.

        Raises:
            NotConnectedError: this is not a connected sender.
            SyncTimeoutError: workers did not connect in time; the message names them.
        """
        sender, deadline = self._sending(), self._deadline(timeout)
        if isinstance(sender, WeightSender):  # the other ranks of a sharded trainer have no workers
            await sender.await_workers(deadline)
            sender.transfer.renew()

    @property
    def port_of_sender(self) -> int:
        """The port on which this recipe's sender listens; 0: the recipe does not have it."""
        return 0

    @property
    def _shares(self) -> bool:
        """Whether workers on the sender's machine view its slots; never if these are on a GPU."""
        return self._share_memory and self._backend == "gloo"

    def _make_transfer(self) -> Transfer:
        check_backend(self._backend)  # only now: the process that makes the recipe may have another build
        return ProcessGroupTransfer(
            self._backend, self._collective, self.timeout, self._listener, self._inline
        )


class DistributedWeightSyncScheme(ProcessGroupScheme):
    """Sends weights by torch.distributed, from rank to rank, in a few flat buckets.

    The sender is rank 0, worker ``i`` is rank ``i + 1``. The sender and each worker create a separate process
    group. The job's own groups are not needed, used, replaced or waited for. A worker on the sender's machine
    views the sender's slots in shared memory, as with :class:`~aiosync.SharedMemWeightSyncScheme`, and no
    weights are sent to it. (The worker tests this: in another container it may not reach the slots.)

    Sender and workers find each other in a store: ``store=``, the TCPStore at ``init_method=`` or at
    MASTER_ADDR and MASTER_PORT, or one that the sender starts on this machine, whose address the pickled
    scheme has. Under ``torchrun`` no argument is needed: RANK gives the worker's rank too.

    A call of gloo cannot be interrupted: it ends when the other side continues or dies, or after ``timeout``.
    A cancelled aiosync call, or one that reaches its deadline, returns at once; until gloo's call ends, its
    thread and the slot that it reads or writes stay in use. So a stopped worker keeps one more slot. An error
    in a group ends the worker's connection; the worker, or its replacement, connects again with a new group.
    All processes that can reach the store are trusted, as in torch.distributed.

    A call of NCCL ends when the worker is lost. A stopped worker, or one whose event loop is busy, is given
    up when 8 MiB take more than 10 seconds. Until then the next ``send`` waits for it, and so does
    ``torch.cuda.synchronize()`` in the trainer; its work in its own streams does not.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        collective: ``"p2p"``: from the sender to each worker. ``"broadcast"``: to all workers at once,
            through one process group, if a send addresses all of them and all are connected. A stopped
            worker delays the others by 10 seconds, or by a quarter of the call's timeout if that is less;
            after one dies, weights are sent to each worker separately until :meth:`reconnect`.
        store: a torch.distributed store that both sides can reach.
        init_method: ``"env://"`` or ``"tcp://host:port"``.
        share_memory: whether workers on the sender's machine view its slots (with gloo, on Linux). Their
            parameters are then read only by contract: a worker that writes into its parameters needs
            ``commit="copy"``. If either side has it off, all weights are sent.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        on_sender_close: ``"stop"``: when the sender closes in order, a worker stops receiving and keeps its
            version. ``"wait"``: it looks for a new sender in the store for ``reconnect_for`` seconds.
        sync: whether ``send`` waits until the weights are applied, if ``wait=`` is not given.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: the backend is not available, or ``store`` is not a store.
    """

    backends = ("distributed",)
    _fields = (*ProcessGroupScheme._fields, "meeting", "on_sender_close")
    _given: StoreAddress | None = None  # as the caller gave it; a pickled scheme does not have it

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float | None = None,
        *,
        collective: Collective = "p2p",
        store: Any = None,
        init_method: str | None = None,
        share_memory: bool = True,
        reconnect_for: float = 60.0,
        on_sender_close: OnSenderClose = "stop",
        **options: Unpack[RankOptions],
    ) -> None:
        super().__init__(
            backend, collective, share_memory, reconnect_for, sync=sync, timeout=timeout, **options
        )
        check_reconnecting(reconnect_for, on_sender_close)
        self._on_sender_close = on_sender_close
        self._meeting = self._given = StoreAddress.at(store, init_method)

    def _usual_index(self) -> int | None:
        rank = os.environ.get("RANK", "")
        return int(rank) - 1 if rank.isdigit() and int(rank) > 0 else None

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        # Not the address of a store that this process started for an earlier init_on_sender().
        address = self._given or self._meeting
        listener = DistributedListener(address, self._model_id, self._token, share_memory=self._shares)
        self._meeting = listener.store_address
        return listener

    def create_transport(self, *, worker_idx: int) -> StoreConnection:
        return StoreConnection(self._meeting, self._model_id, worker_idx + 1, share_memory=self._shares)

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        if self._meeting.store is not None and not inherit:
            raise InvalidArgumentError(
                "a scheme with store= cannot be pickled: make one in each process, with a store of its own"
            )
        return super()._recipe(inherit=inherit)
