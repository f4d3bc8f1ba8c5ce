"""Where an update's bytes are on the receiving side, between their arrival and the commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aiosync.protocol.frames import Update
from aiosync.transfer.base import InboundTransfer, MemoryAccess
from aiosync.transfer.yield_request import HeededRequest
from aiosync.weights.binding import Binding, Staged
from aiosync.weights.copying import INLINE_LIMIT, QUICK_COPY, Pairs
from aiosync.weights.devices import cuda_devices, pin_memory_of, wait_for_devices
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import LentViews
from aiosync.weights.segment import Segment
from aiosync.weights.target import WeightTarget, receiver_tensors


class StagingBuffers:
    """Turns an update that has arrived into the tensors to commit.

    A tensor that a parameter will view must have its dtype and device, so entries that differ are converted
    into memory of this process. If the model may not view the memory that the update arrived in, so is
    everything else, and that memory is needed only until the update is staged. Large buffers are copied too,
    since a worker writes into its buffers.

    Args:
        binding: the model, bound to the sender's layout.
        inbound: where updates are.
        device: the device of that memory.
        may_view: whether the model may view memory of other processes.
    """

    def __init__(
        self, binding: Binding, inbound: InboundTransfer, device: torch.device, *, may_view: bool
    ) -> None:
        private = inbound.access is MemoryAccess.PRIVATE
        # Whether a commit makes the model view the sender's memory.
        self.views_sender = may_view and inbound.access.viewable
        # The binding's when this was made; see Binding.generation.
        self.generation = binding.generation
        differing = _differing(binding)
        self._staged_for = -1 if differing else binding.generation
        self._layout = binding.layout
        self._inbound = inbound
        self._buffers = _double_buffers(binding, inbound, device, not private and not self.views_sender)
        # Whether entries are staged in other dtypes than they are sent in.
        self.converts = any(buffer.converts for buffer in self._buffers)
        # Most bytes that are staged on the event loop.
        plain = all(buffer.device.type == "cpu" and not buffer.converts for buffer in self._buffers)
        self._quick = QUICK_COPY if plain and inbound.access is MemoryAccess.READ_ONCE else INLINE_LIMIT
        everything = frozenset(binding.layout.names)
        staged = frozenset(name for buffer in self._buffers for name in buffer.names)
        self._own = everything if private else staged
        self._lasting = staged if inbound.access.lent else everything
        # The CUDA devices of the model, of updates and of these buffers; and those that a commit writes to.
        # What arrives is in memory of the sender, or in this process's own, which is on another device.
        places = {inbound.device or device, *(buffer.device for buffer in self._buffers)}
        self.devices = binding.devices | {each for each in places if each.type == "cuda"}
        # A commit converts entries that differ.
        self.written_devices = self.devices if differing else cuda_devices(binding.written_in_place())
        # Those that may read what a commit has replaced. A commit that writes waits for them itself.
        waits = self.written_devices and not binding.needs()
        self.reading_devices = frozenset() if waits else self.devices
        # Whether committed() has anything to do.
        self.hears_commits = bool(self._buffers) or not inbound.access.lent or inbound.written is not None

    def written_by(self, names: Collection[str] | None) -> Collection[torch.device]:
        """The devices whose memory a commit of these entries writes; None: of all."""
        # A partial update moves entries that it is not about.
        return self.written_devices if names is None else self.devices

    @property
    def waits(self) -> bool:
        """Whether staging or the commit writes memory of a device, and waits for it."""
        return bool(self.written_devices or (self.devices and self._buffers))

    @property
    def yield_request(self) -> HeededRequest:
        """See :attr:`InboundTransfer.yield_request`."""
        return self._inbound.yield_request

    @property
    def nbytes(self) -> int:
        """Bytes that this process has allocated for staging."""
        return self._inbound.nbytes + sum(buffer.nbytes for buffer in self._buffers)

    def reserve(self) -> None:
        """Allocate all memory now, so that later updates are written into warm pages. Blocking."""
        self._inbound.reserve()
        for buffer in self._buffers:
            buffer.reserve()

    def is_quick(self, update: Update) -> bool:
        """Whether staging moves so few bytes that a thread would take longer."""
        small = self._layout.nbytes <= self._quick and not self.devices  # a copy waits for those
        return small or (not self._buffers and self._inbound.is_quick(update))

    def names_of(self, update: Update, version: int) -> Collection[str] | None:
        """The names that an update changes in a model that has this version, aliases included; None: all."""
        # The update names what changed since its base. A model that has another version needs all entries.
        if update.names is None or update.base != version:
            return None
        names = set(update.names)
        return names.union(alias for alias, name in self._layout.aliases.items() if name in names)

    def stage(self, update: Update, names: Collection[str] | None) -> tuple[Staged, Pairs]:
        """The tensors to commit, and the (destination, source) pairs that have to be copied before. Blocking;
        may be run in a thread.

        Args:
            update: it has arrived.
            names: the entries that it is about; None: all.

        Raises:
            ProtocolError: the update does not say where it lies, cannot be mapped, or arrived damaged.
            ArenaAllocationError: there is no memory for what is staged in this process.
        """
        arrived, source = self._inbound.find(update)
        leaving = () if names is None else self._inbound.make_room(names)
        views = source
        pairs: list[tuple[Tensor, Tensor]] = []
        if self._buffers:
            for device in {buffer.device for buffer in self._buffers if buffer.device.type == "cuda"}:
                pin_memory_of(arrived, device)
            views = dict(source)
            for buffer in self._buffers:
                pairs += buffer.stage(arrived, source, names)
                views |= buffer.views(names)
            for alias, name in self._layout.aliases.items():
                views[alias] = views[name]
        own, lasting, written = self._own, self._lasting, self._inbound.written
        return Staged(views, own, lasting, self._staged_for, written, leaving, self._is_lent), pairs

    def _is_lent(self, address: int) -> bool:
        return self._inbound.is_lent(address) or any(buffer.has(address) for buffer in self._buffers)

    def committed(self, names: Collection[str] | None) -> None:
        """What was staged last is in service now, for these entries: what they had before is free."""
        self._inbound.committed(names)
        for buffer in self._buffers:
            buffer.committed(names)

    def close(self) -> None:
        """Release everything; tensors in service stay valid."""
        self._inbound.close()


class _BackBuffers:
    """Two places on a device for each of some entries: one in service, the other for the next update.

    An update of some entries changes the side of those alone, so all others stay where they are.

    Args:
        layout: the entries, in the dtypes that the model has.
        device: the device of both places.
        names: the entries and their aliases.
        arriving: the layout of what arrives.
    """

    def __init__(
        self, layout: Layout, device: torch.device, names: Collection[str], arriving: Layout
    ) -> None:
        self.names = names
        # Whether entries have other dtypes here than where they arrive.
        self.converts = any(entry.dtype is not arriving[entry.name].dtype for entry in layout)
        self._layout = layout
        self.device = device
        # Whether both layouts are the same, so that an update can be copied in one piece.
        self._whole = layout.entries == arriving.entries
        self._sides: list[tuple[Segment, LentViews]] = []
        # The side that each entry is staged into next.
        self._back = {entry.name: 0 for entry in layout}
        # Those that have been committed at least once: the other side of these is what the model has.
        self._in_service: set[str] = set()

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment, _ in self._sides)

    def has(self, address: int) -> bool:
        return any(segment.has(address) for segment, _ in self._sides)

    def reserve(self) -> None:
        while len(self._sides) < 2:
            segment = Segment.private(self._layout.nbytes, self.device)
            self._sides.append((segment, LentViews(self._layout, segment.buffer)))

    def stage(self, arrived: Tensor, source: Mapping[str, Tensor], names: Collection[str] | None) -> Pairs:
        """The copies to make, given the buffer that an update arrived in and its views."""
        self.reserve()
        sides = set(self._back.values())
        if self._whole and names is None and len(sides) == 1:
            nbytes = self._layout.nbytes
            return [(self._sides[sides.pop()][0].buffer[:nbytes], arrived[:nbytes])]
        views = self.views(names)
        return [(view, source[name]) for name, view in views.items() if names is None or name in names]

    def views(self, names: Collection[str] | None) -> dict[str, Tensor]:
        """Entry -> where it is staged; or where it is in service, if the update is not about it."""
        both = [views.tensors() for _, views in self._sides]
        if names is None:
            return {name: both[side][name] for name, side in self._back.items()}
        return {
            name: both[side if name in names else side ^ 1][name]
            for name, side in self._back.items()
            if name in names or name in self._in_service
        }

    def committed(self, names: Collection[str] | None) -> None:
        """These entries are in service now: the next update goes to their other side."""
        for name in self._back:
            if names is None or name in names:
                self._back[name] ^= 1
                self._in_service.add(name)


def _differing(binding: Binding) -> set[str]:
    """The entries that are one tensor at the sender and tensors of several dtypes or devices here."""
    kinds: dict[str, set[tuple[torch.dtype, torch.device]]] = {}
    for name, target in binding.targets().items():
        kinds.setdefault(binding.layout[name].name, set()).add((target.dtype, target.device))
    return {name for name, found in kinds.items() if len(found) > 1}


def _double_buffers(
    binding: Binding, inbound: InboundTransfer, source: torch.device, copies: bool
) -> list[_BackBuffers]:
    """One per device, for the entries that cannot be viewed where they arrive."""
    wanted: dict[torch.device, list[tuple[str, tuple[int, ...], torch.dtype]]] = {}
    layout = binding.layout
    # Where one entry becomes tensors of several dtypes, each commit converts it for each of them.
    differing = _differing(binding)
    names = {name: layout[name].name for name in binding.needs()}
    targets = {
        names[name]: target for name, target in binding.needs().items() if names[name] not in differing
    }
    own: Collection[str] = ()
    if inbound.access is not MemoryAccess.PRIVATE:
        own = {layout[name].name for name in binding.needs_own()}
    for entry in layout:
        target = targets.get(entry.name)
        device = source if target is None or target.is_meta else target.device
        dtype = entry.dtype if target is None else target.dtype
        if copies or dtype != entry.dtype or device != source or entry.name in own:
            wanted.setdefault(device, []).append((entry.name, entry.shape, dtype))
    found = []
    for device, specs in wanted.items():
        mine = Layout(specs)
        here = {name for name in layout.names if layout[name].name in mine}
        found.append(_BackBuffers(mine, device, here, layout))
    return found


def own_copies(views: Mapping[str, Tensor], model: WeightTarget | None) -> dict[str, Tensor]:
    """Copies of weights, each on the device and of the dtype of the model's tensor. Blocking."""
    targets = receiver_tensors(model) if model is not None else {}
    like = {name: target for name, target in targets.items() if not target.is_meta}
    own = {
        name: view.to(like[name].device, like[name].dtype, copy=True) if name in like else view.clone()
        for name, view in views.items()
    }
    wait_for_devices(cuda_devices([*views.values(), *own.values()]))
    return own


def leave(binding: Binding, inbound: InboundTransfer) -> None:
    """Copy what the model views in the memory of updates into its own memory. Blocking."""
    binding.detach(inbound.is_lent)
    # The copies, and forward passes that are queued, still read that memory.
    wait_for_devices(binding.devices)
