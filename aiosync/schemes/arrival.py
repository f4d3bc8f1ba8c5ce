"""Where an update's bytes are on the receiving side before anything is done with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch import Tensor

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Update
from aiosync.transports.base import Transport
from aiosync.weights.arena import Arena, LentViews, Slot
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["Arrival", "Mapped", "OwnSlots"]

_CPU = torch.device("cpu")

_MOST_SLOTS = 4
"""Slots that a worker takes at the most, for updates of some entries."""


class Arrival(ABC):
    """The updates of one connection as they come in.

    Attributes:
        borrowed: whether the memory is the sender's, who will write into it again.
        holds: whether that may be viewed while a version is in service.
        nbytes: bytes of this process's own that it has taken.
    """

    borrowed: ClassVar[bool]
    holds = False

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own that it has taken."""
        return 0

    def prepare(self) -> None:
        """Take what the first update needs. Blocking."""
        return

    def attach(self, transport: Transport) -> None:
        """Updates come over this connection."""
        return

    def expect(self, update: Update) -> None:
        """An update has come, whether it will be used or not.

        Raises:
            ProtocolError: it does not say what it has to.
        """
        return

    def is_here(self, update: Update) -> bool:
        """Whether nothing has to be awaited before :meth:`find`."""
        return True

    async def arrive(self, update: Update) -> None:
        """Wait for its bytes. Cancelled, it goes on by itself and can be awaited again.

        Raises:
            WorkerLostError: they will not come.
        """
        return

    @property
    def peeks(self) -> bool:
        """Whether blocks of an update may be left in the sender's memory."""
        return False

    def reserve(self) -> None:
        """Take what all later ones need. Blocking."""
        return

    @abstractmethod
    def is_quick(self, update: Update) -> bool:
        """Whether :meth:`find` returns at once."""

    @abstractmethod
    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        """The buffer of an update that has arrived, and every name's view of it. Blocking.

        Raises:
            ProtocolError: it does not say where it lies, cannot be mapped, or arrived damaged.
        """

    def forget(self) -> None:
        """The update that has come last will not be used."""
        return

    def is_lent(self, address: int) -> bool:
        """Whether an address lies in memory that later updates will be written into."""
        return False

    written: Callable[[Collection[str]], Collection[str]] | None = None
    """See :attr:`~aiosync.weights.binding.Staged.written`."""

    def make_room(self, names: Collection[str]) -> Collection[str]:
        """Have memory for the update after the one that was found last, which is not about all entries.
        Blocking.

        Args:
            names: the entries that the last one is about.

        Returns:
            Entries that the last one is not about, and whose tensors have to get memory of their own when it
            is committed, so that the slots which they view can be used again.
        """
        return ()

    def committed(self, names: Collection[str] | None) -> None:
        """What was found last is in service now, for these entries; None: for all."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; tensors in service stay valid."""


class Mapped(Arrival):
    """Updates that lie in the sender's slots, which this process maps when it hears of them.

    Args:
        layout: what a slot holds.
        holds: see :class:`Arrival`.
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
        """Slots that were told of over another connection are none of this one's."""
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
        """See :meth:`Arrival.find`."""
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
        """See :meth:`Arrival.committed`."""
        self._in_service = self._found

    def is_lent(self, address: int) -> bool:
        """See :meth:`Arrival.is_lent`."""
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


class OwnSlots(Arrival):
    """Slots of this process: one in service, one that the next update comes into.

    An update of some entries leaves the others in the slot that they view, which is kept for them, so that a
    third slot takes its turn; and a fourth where such updates are about different entries.

    Args:
        layout: what a slot holds.
        device: where they are.
    """

    borrowed = False

    def __init__(self, layout: Layout, device: torch.device = _CPU) -> None:
        self._layout = layout
        self._entries = [entry.name for entry in layout]
        self._arena = Arena(layout, lambda nbytes: Segment.private(nbytes, device), max_slots=2)
        self._slot: Slot | None = None
        # The slot whose bytes are the newest version's, as they came.
        self._newest: Slot | None = None
        # Where the model's tensor of each entry is, if it is not in the newest slot.
        self._elsewhere: dict[str, Slot] = {}
        # Entries that get memory of their own in the next commit.
        self._leaving: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._arena.nbytes

    def prepare(self) -> None:
        """Take the first slot."""
        if not self._arena.slots:
            self._arena.grow()

    def reserve(self) -> None:
        """Take the second."""
        while len(self._arena.slots) < 2:
            self._arena.grow()

    def take_slot(self) -> Slot:
        """A slot that the model does not view, for the next update.

        Raises:
            ProtocolError: there is none, so the update was not asked for.
        """
        self._slot = self._arena.free_slot()
        if self._slot is None:
            raise ProtocolError("an update came that was not asked for")
        return self._slot

    def is_quick(self, update: Update) -> bool:
        """Always: it is here by then."""
        return True

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`Arrival.find`."""
        assert self._slot is not None
        return self._slot.segment.buffer, self._slot.lent.tensors()

    def is_lent(self, address: int) -> bool:
        """See :meth:`Arrival.is_lent`."""
        return any(slot.segment.has(address) for slot in self._arena.slots)

    def make_room(self, names: Collection[str]) -> Collection[str]:
        """See :meth:`Arrival.make_room`."""
        elsewhere = self._elsewhere_after(names)
        viewed = {slot.index for slot in elsewhere.values()}
        leaving: set[str] = set()
        if len(viewed) >= _MOST_SLOTS - 1:
            oldest = min(viewed, key=lambda index: sum(s.index == index for s in elsewhere.values()))
            leaving = {name for name, slot in elsewhere.items() if slot.index == oldest}
            viewed.discard(oldest)
        while len(self._arena.slots) < len(viewed) + 2:
            self._arena.grow()
        self._leaving = leaving
        return leaving

    def _elsewhere_after(self, names: Collection[str]) -> dict[str, Slot]:
        kept = {} if self._newest is None else dict.fromkeys(self._entries, self._newest)
        return {name: slot for name, slot in (kept | self._elsewhere).items() if name not in names}

    def committed(self, names: Collection[str] | None) -> None:
        """See :meth:`Arrival.committed`."""
        elsewhere = {} if names is None else self._elsewhere_after(names)
        self._elsewhere = {name: slot for name, slot in elsewhere.items() if name not in self._leaving}
        self._newest, self._leaving = self._slot, set()
        viewed = {slot.index for slot in self._elsewhere.values()}
        for slot in self._arena.slots:
            slot.holders.clear()
            if slot is self._newest or slot.index in viewed:
                slot.holders.add("viewed")

    def close(self) -> None:
        """Let go of the slots; tensors in service keep theirs."""
        self._arena.close()
