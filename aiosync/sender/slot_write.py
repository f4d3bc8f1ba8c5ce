"""One version being written: its slot, the weights that go in, and the copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from aiosync._deadline import Deadline
from aiosync.protocol.stream import BLOCK
from aiosync.transfer.slots import Lease, SlotVersion
from aiosync.weights.arena import Slot
from aiosync.weights.block_copy import BlockCopy, Filling
from aiosync.weights.copying import copy_few, copy_to_places
from aiosync.weights.devices import cuda_devices

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

_WORTH_OVERLAPPING = 4 << 20
"""Bytes from which copying and sending are done at the same time."""


class SlotWrite(msgspec.Struct, eq=False):
    """A slot about to be written, and the weights that go in."""

    group: WorkerGroup
    slot: Slot
    # Keeps the slot for the writer until the version is published or discarded.
    lease: Lease
    # (destination, source)
    pairs: list[tuple[Tensor, Tensor]]
    # Whether the copy takes so little time that no thread is needed for it.
    is_quick: bool
    # The entries that the version is about; None: all.
    names: tuple[str, ...] | None
    # The memory holds a version that was published and that no worker has fetched. Once a byte is written,
    # that version is lost, so the copy continues even if its caller is cancelled.
    reclaimed: bool
    # The memory is not a slot that workers can read.
    overflow: bool = False
    # (name, destination, source) where the source is spread over the ranks of the trainer.
    sharded: Sequence[tuple[str, Tensor, Tensor]] = ()
    # The weights in the order of the slot's places, if they are few bytes and whole. Then there are no pairs.
    tensors: Sequence[Tensor] = ()
    # The version that the entries which were not given are taken from.
    base: SlotVersion | None = None
    # The memory may have been written.
    begun: bool = False
    # The copy, if it runs beside the sending.
    copying: Filling | None = None
    # The version that was the newest before this one, and a lease on it until all workers have answered.
    superseded: SlotVersion | None = None
    fallback: Lease | None = None
    # This version replaced an overflow version.
    replaced_overflow: bool = False
    # Worker -> the version that was for it before this one; -1: none.
    addressed: Mapping[int, int] = {}

    @property
    def devices(self) -> Collection[torch.device]:
        """The CUDA devices that the copy reads or writes."""
        return cuda_devices(chain.from_iterable(self.pairs))

    async def settle(self, deadline: Deadline) -> None:
        """Wait until devices have computed the weights. Nothing is written yet.

        Raises:
            SyncTimeoutError: the deadline has passed before.
        """
        await self.group.offloader.settle_until(self.devices, deadline)

    async def copy(self, cancelled: Callable[[], bool]) -> bool:
        """Copy. Return whether all was copied: False if ``cancelled()`` became true."""
        if self.is_quick:
            self.copy_at_once()
            return True
        self.begun = True
        return await self.group.offloader.copy(self.pairs, cancelled)

    def copy_at_once(self) -> None:
        """Copy weights that are few bytes."""
        self.begun = True
        if self.tensors:
            if copy_to_places(self.slot.places, self.tensors):
                return
            views = self.slot.views
            names = [entry.name for entry in self.group.pool.layout.entries]
            self.pairs = [(views[name], tensor) for name, tensor in zip(names, self.tensors, strict=True)]
        copy_few(self.pairs)

    @property
    def overlaps(self) -> bool:
        """Whether the version can be sent while it is being copied: not to workers that map the slots."""
        group = self.group
        worth = self.slot.segment.buffer.is_cpu and group.pool.layout.nbytes > _WORTH_OVERLAPPING
        mapped = any(connection.outbound.access.lent for connection in group.connections.values())
        return group.streams != "" and not self.overflow and worth and not mapped

    async def begin_copy(self) -> None:
        """Begin a copy that runs beside the sending."""
        self.begun = True
        buffer, nbytes = self.slot.segment.buffer, self.group.pool.layout.nbytes
        checked = self.group.streams == "checked"
        self.copying = await self.group.offloader.run(
            lambda _: BlockCopy(buffer, nbytes, self.pairs, BLOCK, checked=checked)
        )

    async def finish_copy(self, *, paced: bool) -> None:
        """Finish the copy that :meth:`begin_copy` began.

        Args:
            paced: the caller waits until the version is sent. So blocks with checksums are copied no faster
                than they are sent.
        """
        copying = self.copying
        assert isinstance(copying, BlockCopy)
        # Blocks without checksums are copied much faster than they are sent. The sooner all are copied, the
        # sooner this thread leaves the processors to the sending.
        paced = paced and self.group.streams == "checked"
        await self.group.offloader.run(lambda _: copying.complete(paced=paced))
