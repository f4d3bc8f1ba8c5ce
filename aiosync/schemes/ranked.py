"""The base class of the schemes that send weights between ranks of torch.distributed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.sender.endpoint import WeightSender
from aiosync.transfer.base import Transfer
from aiosync.transfer.process_group import Collective, ProcessGroupTransfer
from aiosync.transports.torch_distributed.process_group import check_backend
from aiosync.transports.torch_distributed.transport import TorchDistributedTransport
from aiosync.weights.copying import INLINE_LIMIT

__all__ = ["Collective", "RankedWeightSyncScheme"]


class RankedWeightSyncScheme(WeightSyncScheme):
    """Sends weights from rank 0, the sender, to rank ``i + 1``, worker ``i``. Subclasses connect the ranks.

    Args:
        backend: ``"gloo"``, or ``"nccl"``.
        sync: whether ``send`` waits until the weights are applied, if ``wait=`` is not given.
        collective: ``"p2p"`` or ``"broadcast"``.
        share_memory: whether workers on the sender's machine view its slots.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: the backend is not available.
    """

    _known: Any = None
    """The sender's ``SenderInfo``, in schemes that pickle one."""

    _inline: ClassVar[int] = INLINE_LIMIT

    def __init__(
        self,
        backend: str,
        sync: bool,
        collective: Collective,
        share_memory: bool,
        reconnect_for: float,
        **options: Any,
    ) -> None:
        super().__init__(sync=sync, **options)
        check_backend(backend)
        if collective not in ("p2p", "broadcast"):
            raise InvalidArgumentError(f"collective={collective!r}: expected 'p2p' or 'broadcast'")
        if not isinstance(share_memory, bool):
            raise InvalidArgumentError(f"share_memory: expected True or False, got {share_memory!r}")
        self._backend = backend
        self._collective: Collective = collective
        self._share_memory = share_memory
        self._reconnect_for = reconnect_for

    async def reconnect(self, *, timeout: float | None = None) -> None:
        """On the sender, after a worker was lost: wait for all workers to connect, then resume broadcasts.

        The broadcasts use a new process group. Until then, the sender sends to each worker through the
        process group that the two created when the worker connected.

        Raises:
            NotConnectedError: this is not a connected sender.
            SyncTimeoutError: workers did not connect in time; the message names them.
        """
        sender = self._sending()
        if not isinstance(sender, WeightSender):
            return  # rank 0 waits for the workers
        await sender.await_workers(self._deadline(timeout))
        sender.transfer.renew()

    @abstractmethod
    def create_transport(self, *, worker_idx: int) -> TorchDistributedTransport:
        """Create a worker's connection, not open yet."""

    @property
    def port_of_sender(self) -> int:
        """The port on which this recipe's sender listens; 0: the recipe does not have it."""
        return self._known.address.port if self._known is not None else 0

    @property
    def _shares(self) -> bool:
        """Whether workers may view the sender's slots; never with slots on a GPU."""
        return self._share_memory and self._backend == "gloo"

    def _make_transfer(self) -> Transfer:
        return ProcessGroupTransfer(
            self._backend, self._collective, self.timeout, self._listener, self._inline
        )

    def _recipe(self, *, inherit: bool) -> dict[str, Any]:
        return {
            "backend": self._backend,
            "collective": self._collective,
            "share_memory": self._share_memory,
            "reconnect_for": self._reconnect_for,
        }

    def _restore(self, recipe: Mapping[str, Any]) -> None:
        self._backend = recipe["backend"]
        self._collective = recipe["collective"]
        self._share_memory = recipe["share_memory"]
        self._reconnect_for = recipe["reconnect_for"]
