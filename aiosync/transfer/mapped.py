"""Versions that a worker maps: an update says where the version lies in the sender's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.payloads import MappedPayload, decode, encode
from aiosync.transfer.base import InboundTransfer, MemoryAccess, OutboundTransfer, Transfer
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.base import Transport
from aiosync.weights.arena import LentViews
from aiosync.weights.layout import Layout
from aiosync.weights.segment import CAN_ATTACH_PRIVATELY, Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup


class MappedTransfer(Transfer):
    """Workers map the sender's slots.

    Args:
        access: whether a worker's model views a slot, or copies it.
        allocate: takes a number of bytes and a device, and makes a segment that workers can map.
    """

    def __init__(
        self,
        access: MemoryAccess = MemoryAccess.VIEWED,
        allocate: Callable[[int, torch.device], Segment] = Segment.shared,
    ) -> None:
        self._access = access
        self._allocate_segment = allocate

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        return self._allocate_segment(nbytes, device)

    def outbound(self, transport: Transport, group: WorkerGroup) -> OutboundTransfer:
        return MappedOutbound(group, self._access)

    def inbound(self, layout: Layout, transport: Transport, source: torch.device) -> InboundTransfer:
        return MappedInbound(layout, self._access)


class PrivatelyMappedTransfer(Transfer):
    """Workers map the sender's slots copy-on-write: what a worker writes stays its own.

    A slot on a device other than the CPU cannot be mapped in this way, so that workers copy it.
    """

    def _is_private(self, device: torch.device) -> bool:
        return CAN_ATTACH_PRIVATELY and device.type == "cpu"

    def outbound(self, transport: Transport, group: WorkerGroup) -> OutboundTransfer:
        private = self._is_private(group.device)
        return MappedOutbound(group, MemoryAccess.VIEWED if private else MemoryAccess.READ_ONCE)

    def inbound(self, layout: Layout, transport: Transport, source: torch.device) -> InboundTransfer:
        if self._is_private(source):
            return MappedInbound(layout, MemoryAccess.VIEWED, private=True)
        return MappedInbound(layout, MemoryAccess.READ_ONCE)


class MappedOutbound(OutboundTransfer):
    """The sender's side. Each update names the slots that were added or removed since the last one.

    Args:
        group: the worker's group.
        access: see :class:`OutboundTransfer`.
    """

    carries = False

    def __init__(self, group: WorkerGroup, access: MemoryAccess) -> None:
        self.access = access
        self._group = group
        # The indices of the slots that the worker knows, and the pool's revision that they are of.
        self._announced: list[int] = []
        self._revision = -1

    def can_start(self, published: SlotVersion) -> bool:
        """Whether the version is whole."""
        return published.copying is None or published.copying.whole

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        pool, before = self._group.pool, self._announced
        if pool.revision == self._revision:
            return {"slot": published.slot.index}  # what encode() makes of it, in a fifth of the time
        self._revision, slots = pool.revision, list(pool.slots)
        now = self._announced = [slot.index for slot in slots]
        new = [(slot.index, slot.segment.handle or {}) for slot in slots if slot.index not in before]
        gone = [index for index in before if index not in now]
        return encode(MappedPayload(published.slot.index, new, gone))


class MappedInbound(InboundTransfer):
    """The worker's side: maps a slot when an update first names it.

    Args:
        layout: what a slot holds.
        access: see :class:`InboundTransfer`.
        private: map copy-on-write, so that what this process writes stays its own.
    """

    def __init__(self, layout: Layout, access: MemoryAccess, *, private: bool = False) -> None:
        self.access = access
        self._private = private
        self._layout = layout
        # Slot -> its mapping and the tensors in it.
        self._attached: dict[int, tuple[Segment, LentViews]] = {}
        # Slot -> its handle, until it is mapped.
        self._announced: dict[int, dict[str, Any]] = {}
        # The update that arrived last, and where it lies.
        self._expected: tuple[Update, MappedPayload] | None = None
        self._found: Segment | None = None
        self._current: Segment | None = None
        if private:
            self.written = self._written

    def attach(self, transport: Transport) -> None:
        """Forget the slots that another connection announced."""
        self.close()

    def expect(self, update: Update) -> None:
        """Note which slots the sender has now."""
        payload = decode(update.payload, MappedPayload)
        self._expected = update, payload
        if len(update.payload) == 1:
            return
        for index in payload.gone:
            self._attached.pop(index, None)
            self._announced.pop(index, None)
        self._announced.update(payload.new)

    def is_quick(self, update: Update) -> bool:
        """Whether no slot has to be mapped, or searched for pages that were written."""
        return not self._private and not self._announced

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        expected = self._expected
        known = expected is not None and expected[0] is update
        slot = (expected[1] if known and expected else decode(update.payload, MappedPayload)).slot
        if self._private:
            before = self._attached.get(slot)
            if before is not None and not before[0].renew():
                self._announced[slot] = before[0].handle or {}
        if self._announced:
            self._attach_announced()
        try:
            segment, views = self._attached[slot]
        except KeyError as exc:
            raise ProtocolError(f"an update lies in slot {slot}, which was never announced") from exc
        self._found = segment
        return segment.buffer, views.tensors()

    def committed(self, names: Collection[str] | None) -> None:
        self._current = self._found

    def is_lent(self, address: int) -> bool:
        return any(segment.has(address) for segment, _ in self._attached.values())

    def _written(self, names: Collection[str]) -> Collection[str]:
        """Those of these entries that lie in pages which this process has written."""
        if self._current is None:
            return ()
        layout = self._layout
        ranges = {name: (layout[name].offset, layout[name].nbytes) for name in names}
        return self._current.written(ranges)

    def _attach_announced(self) -> None:
        for index, handle in list(self._announced.items()):
            segment = Segment.attach(handle, private=self._private)
            if segment.nbytes < self._layout.nbytes:
                raise ProtocolError(
                    f"slot {index} has {segment.nbytes} bytes, the layout needs {self._layout.nbytes}"
                )
            self._attached[index] = segment, LentViews(self._layout, segment.buffer)
            del self._announced[index]

    def close(self) -> None:
        """Unmap all slots."""
        self._attached.clear()
        self._announced.clear()
        self._expected = self._found = self._current = None
