"""Versions that a worker maps: it is sent where they lie in the sender's memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.events import Fetched
from aiosync.protocol.frames import Update
from aiosync.transfer.base import InboundTransfer, OutboundTransfer
from aiosync.transfer.slots import SlotVersion
from aiosync.transports.base import Transport
from aiosync.weights.arena import LentViews
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

if TYPE_CHECKING:
    from aiosync.sender.worker_group import WorkerGroup

__all__ = ["MappedInbound", "MappedOutbound"]


class MappedOutbound(OutboundTransfer):
    """The worker maps the slots. Each update names the slots that were added or removed since the last one.

    Args:
        group: whose versions.
        holds: see :class:`OutboundTransfer`.
    """

    maps = True
    carries = False

    def __init__(self, group: WorkerGroup, *, holds: bool) -> None:
        self.holds = holds
        self._group = group
        self._told: list[int] = []

    def can_start(self, published: SlotVersion) -> bool:
        """Only of a version that is whole."""
        return published.copying is None or published.copying.whole

    def payload(self, published: SlotVersion, fetched: Fetched) -> dict[str, Any]:
        """Where the version lies."""
        slots, told = self._group.pool.slots, self._told
        there = [slot.index for slot in slots]
        payload: dict[str, Any] = {"slot": published.slot.index}
        if there != told:
            new = [slot for slot in slots if slot.index not in told]
            payload["new"] = [[slot.index, slot.segment.handle or {}] for slot in new]
            payload["gone"] = [index for index in told if index not in there]
            self._told = there
        return payload


class MappedInbound(InboundTransfer):
    """Updates that lie in the sender's slots, which this process maps when it hears of them.

    Args:
        layout: what a slot holds.
        holds: see :class:`InboundTransfer`.
        private: what this process writes there is to stay its own.
    """

    borrowed = True

    def __init__(self, layout: Layout, *, holds: bool, private: bool = False) -> None:
        self.holds = holds
        self._private = private
        self._layout = layout
        self._attached: dict[int, tuple[Segment, LentViews]] = {}
        self._found: Segment | None = None
        self._in_service: Segment | None = None
        if private:
            self.written = self._written
        self._announced: dict[int, dict[str, Any]] = {}

    def attach(self, transport: Transport) -> None:
        """Forget the slots that another connection announced."""
        self.close()

    def expect(self, update: Update) -> None:
        """Take in which slots the sender has now. It says so once."""
        payload = update.payload
        if len(payload) > 1:
            for index in payload.get("gone", ()):
                self._attached.pop(index, None)
                self._announced.pop(index, None)
            self._announced.update((index, handle) for index, handle in payload.get("new", ()))

    def is_quick(self, update: Update) -> bool:
        """Whether there is no slot to be mapped or looked through first."""
        return not self._private and not self._announced

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        slot = update.payload["slot"]
        if self._private:
            before = self._attached.get(slot)
            if before is not None and not before[0].renew():
                self._announced[slot] = before[0].handle or {}
        if self._announced:
            self._attach_announced()
        try:
            segment, views = self._attached[slot]
        except KeyError as exc:
            raise ProtocolError(f"an update lies in a slot that was never announced: {exc}") from exc
        self._found = segment
        return segment.buffer, views.tensors()

    def committed(self, names: Collection[str] | None) -> None:
        self._in_service = self._found

    def is_lent(self, address: int) -> bool:
        return any(segment.has(address) for segment, _ in self._attached.values())

    def _written(self, names: Collection[str]) -> Collection[str]:
        """Those of these entries that lie in pages which this process has written into."""
        if self._in_service is None:
            return ()
        layout = self._layout
        ranges = {name: (layout[name].offset, layout[name].nbytes) for name in names}
        return self._in_service.written(ranges)

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
        """Unmap."""
        self._attached.clear()
        self._announced.clear()
        self._found = self._in_service = None
