"""Where an update's bytes are on the receiving side, between their arrival and the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiosync.protocol.frames import Update
from aiosync.schemes.arrival import Arrival
from aiosync.weights.arena import Arena, Slot
from aiosync.weights.binding import Binding
from aiosync.weights.copying import INLINE_LIMIT, Pairs
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["Stager"]


class Stager:
    """Turns an update that has arrived into the tensors to commit.

    What a parameter will view must have its dtype and device, so entries that differ are converted
    into slots of this process; with ``copies`` so is everything else, and the memory that it arrived in is
    needed only until the update is staged. Two slots take turns: the front one is in service.

    Args:
        binding: the model, bound to the sender's layout.
        arrival: where updates are.
        device: where that is.
        copies: whether to copy everything.

    Attributes:
        takes_turns: whether slots of this process do, so that it has to hear what was :meth:`committed`.
    """

    def __init__(self, binding: Binding, arrival: Arrival, device: torch.device, *, copies: bool) -> None:
        self.copies = copies
        self._layout = binding.layout
        self._arrival = arrival
        self._arenas = _own_arenas(binding, device, copies)
        self._back: dict[torch.device, Slot] = {}
        self.takes_turns = bool(self._arenas) or not arrival.borrowed
        # Own slots that look just like the sender's are copied in one piece.
        self._alike = {d for d, arena in self._arenas.items() if arena.layout.entries == self._layout.entries}

    @property
    def nbytes(self) -> int:
        """Bytes that this process has taken for staging."""
        return self._arrival.nbytes + sum(arena.nbytes for arena in self._arenas.values())

    def reserve(self) -> None:
        """Take the memory for both slots now, so that later updates run into warm pages."""
        self._arrival.reserve()
        for arena in self._arenas.values():
            while len(arena.slots) < 2:
                arena.grow()

    def is_quick(self, update: Update) -> bool:
        """Whether staging moves so few bytes that a thread would take longer."""
        if self._layout.nbytes <= INLINE_LIMIT:
            return True
        return not self._arenas and self._arrival.is_quick(update)

    def stage(self, update: Update) -> tuple[Mapping[str, Tensor], Pairs]:
        """Every name -> the tensor to commit, and the (destination, source) pairs that have to be copied
        before. Blocking; may be run in a thread.

        Raises:
            ProtocolError: the update does not say where it lies, cannot be mapped, or arrived damaged.
            ArenaAllocationError: there is no memory for slots of this process's own.
        """
        buffer, source = self._arrival.find(update)
        if not self._arenas:
            return source, []
        views = dict(source)
        pairs: list[tuple[Tensor, Tensor]] = []
        for device, arena in self._arenas.items():
            slot = self._back[device] = arena.free_slot() or arena.grow()
            if device in self._alike:
                nbytes = self._layout.nbytes
                pairs.append((slot.segment.buffer[:nbytes], buffer[:nbytes]))
            else:
                pairs += [(own, source[name]) for name, own in slot.views.items()]
            views |= slot.views
        for alias, name in self._layout.aliases.items():
            views[alias] = views[name]
        return views, pairs

    def committed(self) -> None:
        """What was staged last is in service now: the slots before it are free."""
        self._arrival.committed()
        for device, slot in self._back.items():
            for other in self._arenas[device].slots:
                other.holders.clear()
            slot.holders.add("front")
        self._back.clear()

    def close(self) -> None:
        """Let go of everything; tensors in service stay valid."""
        self._arrival.close()
        self.leave()

    def leave(self) -> None:
        """The same, but another takes what arrives."""
        for arena in self._arenas.values():
            arena.close()


def _own_arenas(binding: Binding, source: torch.device, copies: bool) -> dict[torch.device, Arena]:
    """Slots of this process, one arena per device, for the entries that cannot be viewed as they are."""
    wanted: dict[torch.device, list[tuple[str, tuple[int, ...], torch.dtype]]] = {}
    viewed = binding.viewed()
    targets = {binding.layout[name].name: parameter for name, parameter in viewed.items()}
    for entry in binding.layout:
        target = targets.get(entry.name)
        device = source if target is None or target.is_meta else target.device
        dtype = entry.dtype if target is None else target.dtype
        if copies or dtype != entry.dtype or device != source:
            wanted.setdefault(device, []).append((entry.name, entry.shape, dtype))
    return {device: Arena(Layout(specs), _allocator(device), max_slots=2) for device, specs in wanted.items()}


def _allocator(device: torch.device) -> Any:
    return lambda nbytes: Segment.private(nbytes, device)
