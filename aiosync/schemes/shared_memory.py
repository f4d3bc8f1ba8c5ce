"""Weights in shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.context import BaseContext
from typing import Unpack

from aiosync._options import StrategyName, TimedOptions
from aiosync.errors import NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.recipe import UNKNOWN_SENDER
from aiosync.transfer.base import Transfer
from aiosync.transfer.mapped import MappedTransfer
from aiosync.transports.base import Listener
from aiosync.transports.unix_socket import UnixConnection, UnixListener


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """One copy into shared memory per update and device, which all workers view.

    The workers re-point their parameters at the slot that the sender has written. The cost does not depend on
    the number of workers, and no worker reads a slot that is being written. CUDA devices use CUDA IPC.

    Memory: two slots of the model's size, a third while a worker is behind, whatever the number of
    workers. Workers that hang, or that later sends do not address, may each keep one more.

    With ``commit="flip"`` the parameters of all workers view the same pages, and are read only by
    contract: a worker that writes into its parameters needs ``commit="copy"``. A process that a worker
    forks views these pages too, and reads a mix of versions once the trainer writes: give it a deep copy of
    the model. Buffers are private to the worker in both modes. If the model was found on a context with
    ``update_policy_weights_``, which may write to it, the model gets private memory instead.

    All workers are processes of this user on this machine (Linux; on other POSIX systems a worker's
    death shows by its closed socket only).

    Args:
        strategy: see :class:`~aiosync.WeightSyncScheme`, also for the others.
        sync: whether ``send`` waits until the weights are applied, if ``wait=`` is not given.
        per_worker_weights: whether each worker has a separate copy.
        options: the other arguments; ``max_slots`` has an effect here.
    """

    backends = ("shared", "thread")
    _on_one_machine = True
    _fields = ("address",)
    _address: str | None = None

    def __init__(
        self,
        strategy: StrategyName = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        **options: Unpack[TimedOptions],
    ) -> None:
        super().__init__(strategy, sync, per_worker_weights=per_worker_weights, **options)

    def _make_listener(self, workers: Iterable[int], ctx: BaseContext | None) -> Listener:
        listener = UnixListener()
        self._address = listener.address
        return listener

    def create_transport(self, *, worker_idx: int) -> UnixConnection:
        if self._address is None:
            raise NotInitializedError(UNKNOWN_SENDER)
        return UnixConnection(self._address)

    def _make_transfer(self) -> Transfer:
        return MappedTransfer()
