"""One version being written: its slot, the weights that go in, and the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from aiosync.protocol.stream import BLOCK
from aiosync.transfer.slots import Lease, SlotVersion
from aiosync.weights.arena import Slot
from aiosync.weights.block_copy import BlockCopy, Filling
from aiosync.weights.copying import copy_few

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = ["SlotWrite"]

_WORTH_OVERLAPPING = 4 << 20
"""Bytes from which copying and sending are done at the same time."""


class SlotWrite(msgspec.Struct, eq=False):
    """A slot about to be written, and the weights that go in.

    Attributes:
        lease: keeps the slot for the writer until the version is published or discarded.
        pairs: (destination, source) tensors.
        names: the entries that the version is about; None: all.
        reclaimed: the memory holds a version that was published and that no worker has fetched: from the
            first byte written there is no way back, so the copy goes on even if its caller is cancelled.
        overflow: the memory is not a slot that workers can read.
        sharded: (name, destination, source) where the source is spread over the ranks of the trainer.
        begun: the memory may have been written.
        copying: the copy, if it goes on beside the sending.
        superseded: the version that was the newest before this one.
        fallback: keeps the slot of that version until all workers have answered.
        replaced_overflow: an overflow version was given up for this one.
    """

    group: WorkerGroup
    slot: Slot
    lease: Lease
    pairs: list[tuple[Tensor, Tensor]]
    names: tuple[str, ...] | None
    reclaimed: bool
    overflow: bool = False
    sharded: Sequence[tuple[str, Tensor, Tensor]] = ()
    begun: bool = False
    copying: Filling | None = None
    superseded: SlotVersion | None = None
    fallback: Lease | None = None
    replaced_overflow: bool = False

    async def copy(self, cancelled: Callable[[], bool]) -> bool:
        """Copy. Return whether all was copied: False if ``cancelled()`` became true."""
        self.begun = True
        if self.group.writes_inline:
            copy_few(self.pairs)
            return True
        return await self.group.offloader.copy(self.pairs, cancelled)

    @property
    def overlaps(self) -> bool:
        """Whether the version can be sent while it is being copied: not to workers that map the slots."""
        group = self.group
        worth = self.slot.segment.buffer.is_cpu and group.pool.layout.nbytes > _WORTH_OVERLAPPING
        mapped = any(connection.outbound.access.lent for connection in group.connections.values())
        return group.streams != "" and not self.overflow and worth and not mapped

    async def begin_copy(self) -> None:
        """Begin a copy that goes on beside the sending."""
        self.begun = True
        buffer, nbytes = self.slot.segment.buffer, self.group.pool.layout.nbytes
        checked = self.group.streams == "checked"
        self.copying = await self.group.offloader.run(
            lambda _: BlockCopy(buffer, nbytes, self.pairs, BLOCK, checked=checked)
        )

    async def finish_copy(self, *, paced: bool) -> None:
        """Finish the copy that :meth:`begin_copy` began.

        Args:
            paced: copy no faster than the version is sent, since the caller waits for that anyway.
        """
        copying = self.copying
        assert isinstance(copying, BlockCopy)
        await self.group.offloader.run(lambda _: copying.complete(paced=paced))
