"""What schemes have in common whose weights go from rank to rank of torch.distributed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.sender.endpoint import WeightSender
from aiosync.transfer.base import Transfer
from aiosync.transfer.process_group import Collective, ProcessGroupTransfer
from aiosync.transports.torch_distributed.connection import RankedTransport
from aiosync.transports.torch_distributed.process_group import check_backend
from aiosync.weights.copying import INLINE_LIMIT

__all__ = ["Collective", "RankedWeightSyncScheme"]


class RankedWeightSyncScheme(WeightSyncScheme):
    """The sender is rank 0, worker ``i`` rank ``i + 1``; how they find each other, a subclass says.

    Args:
        backend: ``"gloo"``, or ``"nccl"``.
        sync: whether ``send`` waits until the weights are applied, where ``wait=`` does not say.
        collective: ``"p2p"`` or ``"broadcast"``.
        share_memory: whether workers on the sender's machine view its slots.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        options: see :class:`~aiosync.WeightSyncScheme`.

    Raises:
        InvalidArgumentError: a backend that is not there.
    """

    _known: Any = None
    """What a copy of the scheme tells of its sender, where it does; it has that's ``place``."""

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
        """On the sender, after a worker was lost: wait until all workers are there, the survivors and a
        replacement, and make broadcasts again in a process group of them. (Each worker has a process group of
        its own with the sender from when it connects, and is sent everything through that meanwhile.)

        Raises:
            NotConnectedError: this is no connected sender.
            SyncTimeoutError: some did not come in time; it names them.
        """
        sender = self._sending()
        if not isinstance(sender, WeightSender):
            return  # rank 0 waits for the workers
        await sender.await_workers(self._deadline(timeout))
        sender.transfer.renew()

    @abstractmethod
    def create_transport(self, *, worker_idx: int) -> RankedTransport:
        """A worker's connection, not open yet."""

    @property
    def port_of_sender(self) -> int:
        """Where the sender of this recipe listens, if it says so; another one listens elsewhere."""
        return self._known.place.port if self._known is not None else 0

    @property
    def _shares(self) -> bool:
        """Whether memory may be shared; a GPU's is not."""
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
