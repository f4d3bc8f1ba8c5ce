"""Versions that a worker maps: an update says where the version lies in the sender's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from aiosync.errors import ArenaAllocationError, ProtocolError
from aiosync.protocol.frames import Fetch, Update
from aiosync.protocol.framing import decode_payload, encode_payload
from aiosync.transfer.base import (
    InboundTransfer,
    MemoryAccess,
    OutboundTransfer,
    Transfer,
    TransferConnection,
)
from aiosync.transfer.slots import SlotVersion
from aiosync.transfer.yield_request import NO_REQUEST, HeededRequest, YieldRequest
from aiosync.transports.base import FramedTransport
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import LentViews
from aiosync.weights.segment import CAN_ATTACH_PRIVATELY, Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup


SlotIndex: TypeAlias = Annotated[int, Meta(ge=0)]

_WORTH_MAPPING = 2 << 20
"""Bytes from which a worker maps a slot copy-on-write. To copy fewer takes less time than to search a mapping
for pages that were written. And they stay in a processor's own cache. Forward passes read them faster there
if no other processor reads the same memory."""


class MappedPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an Update frame says of a version that the worker maps."""

    slot: SlotIndex
    # (index, handle) of the slots that were added since the last update over this connection.
    new: list[tuple[SlotIndex, dict[str, Any]]] = []
    # The slots that were removed since.
    gone: list[SlotIndex] = []
    # The handle of the sender's YieldRequest, in the first update over this connection.
    yields: dict[str, Any] | None = None


@dataclass(eq=False, repr=False)
class MappedTransfer(Transfer):
    """Workers map the sender's slots."""

    # Whether a worker's model views a slot, or copies it.
    _access: MemoryAccess = MemoryAccess.VIEWED
    # Takes a number of bytes and a device, and makes a segment that workers can map.
    _allocate_segment: Callable[[int, torch.device], Segment] = Segment.shared

    def allocate(self, nbytes: int, device: torch.device) -> Segment:
        return self._allocate_segment(nbytes, device)

    def outbound(self, transport: FramedTransport, group: WorkerGroup) -> OutboundTransfer:
        return MappedOutbound(group, self._access)

    def inbound(self, layout: Layout, transport: FramedTransport, source: torch.device) -> InboundTransfer:
        return MappedInbound(layout, self._access)


class PrivatelyMappedTransfer(Transfer):
    """Workers map the sender's slots copy-on-write: what a worker writes stays its own.

    They copy small slots, and those on a device other than the CPU, which cannot be mapped in this way.
    """

    def _is_private(self, device: torch.device) -> bool:
        return CAN_ATTACH_PRIVATELY and device.type == "cpu"

    def outbound(self, transport: FramedTransport, group: WorkerGroup) -> OutboundTransfer:
        private = self._is_private(group.device)
        return MappedOutbound(group, MemoryAccess.VIEWED if private else MemoryAccess.READ_ONCE)

    def inbound(self, layout: Layout, transport: FramedTransport, source: torch.device) -> InboundTransfer:
        if self._is_private(source) and layout.nbytes >= _WORTH_MAPPING:
            return MappedInbound(layout, MemoryAccess.VIEWED, True)
        return MappedInbound(layout, MemoryAccess.READ_ONCE)


@dataclass(eq=False, repr=False)
class MappedOutbound(OutboundTransfer):
    """The sender's side. Each update names the slots that were added or removed since the last one."""

    _group: WorkerGroup
    access: MemoryAccess
    # The indices of the slots that the worker knows, and the pool's revision that they are of.
    _announced: list[int] = field(default_factory=list, init=False)
    _revision: int = field(default=-1, init=False)

    # The worker's process; 0: unknown.
    _pid: int = field(default=0, init=False)

    carries = False

    def attach(self, connection: TransferConnection) -> None:
        self._pid = connection.pid

    def can_start(self, published: SlotVersion) -> bool:
        """Whether the version is whole."""
        return published.copying is None or published.copying.whole

    def payload(self, published: SlotVersion, fetched: Fetch) -> dict[str, Any]:
        pool, before = self._group.pool, self._announced
        if pool.revision == self._revision:
            return {"slot": published.slot.index}  # what encode_payload() makes of it, in a fifth of the time
        slots = list(pool.slots)
        now = [slot.index for slot in slots]
        new = [(slot.index, slot.segment.handle_for(self._pid)) for slot in slots if slot.index not in before]
        gone = [index for index in before if index not in now]
        yields = self._yield_handle() if self._revision < 0 else None
        self._revision, self._announced = pool.revision, now
        return encode_payload(MappedPayload(published.slot.index, new, gone, yields))

    def _yield_handle(self) -> dict[str, Any] | None:
        group = self._group
        if group.yield_request is None:
            try:
                group.yield_request = YieldRequest()
            except ArenaAllocationError:
                return None  # sends to workers that compute take longer, and nothing else
        return group.yield_request.handle_for(self._pid)


@dataclass(eq=False, repr=False)
class MappedInbound(InboundTransfer):
    """The worker's side: maps a slot when an update first names it."""

    _layout: Layout
    access: MemoryAccess
    _private: bool = False  # map copy-on-write: what this process writes stays its own
    # Slot -> its mapping and the tensors in it.
    _attached: dict[int, tuple[Segment, LentViews]] = field(default_factory=dict, init=False)
    # Slot -> its handle, until it is mapped.
    _announced: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)
    # The update that arrived last, and where it lies.
    _expected: tuple[Update, MappedPayload] | None = field(default=None, init=False)
    _found: Segment | None = field(default=None, init=False)
    _current: Segment | None = field(default=None, init=False)
    # The handle of the sender's YieldRequest, until that is mapped.
    _yields: dict[str, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self._private:
            self.written = self._written

    def attach(self, transport: FramedTransport) -> None:
        """Forget the slots that another connection announced."""
        self.close()

    def expect(self, update: Update) -> None:
        """Note which slots the sender has now."""
        payload = decode_payload(update, MappedPayload)
        self._expected = update, payload
        if len(update.payload) == 1:
            return
        for index in payload.gone:
            self._attached.pop(index, None)
            Segment.decline(self._announced.pop(index, {}))
        self._announced.update(payload.new)
        self._yields = payload.yields or self._yields

    def is_here(self, update: Update) -> bool:
        return True

    def is_quick(self, update: Update) -> bool:
        """Whether no slot has to be mapped, or searched for pages that were written."""
        return not self._private and not self._announced

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        expected = self._expected
        known = expected is not None and expected[0] is update
        slot = (expected[1] if known and expected else decode_payload(update, MappedPayload)).slot
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
        # A copy: another thread may be attaching one.
        return any(segment.has(address) for segment, _ in tuple(self._attached.values()))

    def _written(self, names: Collection[str]) -> Collection[str]:
        """Those of these entries that lie in pages which this process has written."""
        if self._current is None:
            return ()
        layout = self._layout
        ranges = {name: (layout[name].offset, layout[name].nbytes) for name in names}
        return self._current.written(ranges)

    def _attach_announced(self) -> None:
        yields, self._yields = self._yields, None
        if yields is not None:
            # Slots may be usable without this, as in a process that may not read /proc.
            with suppress(ProtocolError):
                self.yield_request = HeededRequest.attach(yields)
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
        for handle in self._announced.values():
            Segment.decline(handle)
        self._announced.clear()
        self._expected = self._found = self._current = self._yields = None
        self.yield_request = NO_REQUEST
