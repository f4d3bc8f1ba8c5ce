"""What the schemes share that can send weights through process groups of torch.distributed."""

from __future__ import annotations

from typing import Any, ClassVar

from aiosync._options import check_bool, check_choice
from aiosync.schemes.base import WeightSyncScheme
from aiosync.sender.endpoint import WeightSender
from aiosync.transfer.base import Transfer
from aiosync.transfer.process_group import Collective, ProcessGroupTransfer
from aiosync.transports.torch_distributed.process_group import check_backend
from aiosync.weights.copying import INLINE_LIMIT


class ProcessGroupScheme(WeightSyncScheme):
    """A scheme with process groups; see :class:`~aiosync.DistributedWeightSyncScheme` for the arguments."""

    _fields: ClassVar[tuple[str, ...]] = ("backend", "collective", "share_memory", "reconnect_for")

    def __init__(
        self, backend: str, collective: Collective, share_memory: bool, reconnect_for: float, **options: Any
    ) -> None:
        super().__init__(**options)
        check_backend(backend)
        check_choice("collective", collective, ("p2p", "broadcast"))
        check_bool("share_memory", share_memory)
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
        return ProcessGroupTransfer(
            self._backend, self._collective, self.timeout, self._listener, INLINE_LIMIT
        )
