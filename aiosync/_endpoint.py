"""The live half of a scheme, as far as every role has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from aiosync.events import SchemeStats
from aiosync.reports import WorkerState

if TYPE_CHECKING:
    from aiosync.transports.base import Transport

__all__ = ["Endpoint"]


class Endpoint:
    """The live half of a scheme in this process. A role overrides what it has.

    Attributes:
        ended: on a receiver, why nothing more will come; None as long as the sender is there.
    """

    ended: str | None = None

    @property
    def version(self) -> int:
        """The version last published (sender) or in service (receiver); -1 before the first."""
        return -1

    @property
    def stats(self) -> SchemeStats:
        """Figures so far."""
        return SchemeStats()

    @property
    def workers(self) -> dict[int, WorkerState]:
        """On a sender: worker -> its state."""
        return {}

    @property
    def weights_in_use(self) -> Mapping[str, Tensor] | None:
        """The tensors in service (receiver) or last published (sender), by name; None: there are none."""
        return None

    @property
    def transports(self) -> dict[int, Transport]:
        """On a sender: worker -> its connection."""
        return {}

    def check_alive(self) -> None:
        """Check that the endpoint can be closed here.

        Raises:
            WrongEventLoopError: it lives on another event loop, which is not closed.
        """

    async def aclose(self) -> None:
        """Release everything; idempotent."""
