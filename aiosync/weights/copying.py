"""Copying many tensors at once, in pieces small enough to be given up in between.

torch divides each tensor's copy among its threads and wakes them for each; here the bytes of all tensors
together are divided, once, into lanes for as many threads. Where source and destination are plain memory
of the same kind a lane is a list of ``memmove``; everything else (another dtype, strides, a device) torch
copies.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from aiosync.errors import InvalidArgumentError
from aiosync.weights.checksum import checksum_of

__all__ = [
    "INLINE_LIMIT",
    "BlockCopy",
    "Courtesy",
    "Filling",
    "Lane",
    "Pairs",
    "copy_few",
    "copy_lanes",
    "copy_pairs",
    "nbytes_of",
    "read_at",
]

INLINE_LIMIT = 256 * 1024
"""Bytes up to which a copy takes less time than handing it to a thread and back."""

_PIECE = 32 * 1024 * 1024
"""Bytes that torch copies between two questions whether to give up."""

_STRETCH = 512 * 1024 * 1024
"""The same for ``memmove``, which passes the caches by, and is faster for it, only where one call moves more
than they hold."""

_LEAD = 4
"""Blocks that are copied ahead of who sends them: so few that a cache still has them by then."""

_TURN = 0.001
"""Seconds that an event loop runs at a time, at most, if it is not computing."""

_MADE_UP = 8
"""How often over the time for which the processor was left has to pass before it is left again."""

_PATIENCE = 0.005
"""Seconds after which the copy waits for no sender any more: then the network is slow."""

_NO_DISPATCH = Tensor.__torch_dispatch__

Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""(destination, source) of equal shapes."""

Lane: TypeAlias = Callable[[Callable[[], bool]], bool]
"""Does a share of a copy; asks its argument now and then whether to give up; returns whether it finished."""

_Range: TypeAlias = tuple[int, int, int]
"""Destination address, source address, bytes."""


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that these tensors hold."""
    return sum(t.nbytes for t in tensors)


def copy_pairs(pairs: Pairs) -> None:
    """Copy each second tensor into the first, converting dtype and device.

    Args:
        pairs: (destination, source) of equal shapes.

    Raises:
        InvalidArgumentError: the shapes differ, or a source's memory was freed.
    """
    if nbytes_of(destination for destination, _ in pairs) <= INLINE_LIMIT:
        copy_few(pairs)
        return
    for lane in copy_lanes(pairs, 1):
        lane(lambda: False)


def copy_few(pairs: Pairs) -> None:
    """The same in one go: for about :data:`INLINE_LIMIT` bytes."""
    rest: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        destination, source = pair
        if destination.shape != source.shape:
            _refuse_shape(destination, source)
        # A small model's send is mostly such things, and torch's own copy takes several times as long.
        address = source.data_ptr() if _is_memory_alike(destination, source) else 0
        if address:
            ctypes.memmove(destination.data_ptr(), address, destination.nbytes)
        else:
            rest.append(pair)
    if rest:
        _copy_by_torch(rest, lambda: False)


def read_at(fd: int, place: memoryview, offset: int) -> bool:
    """Fill ``place`` from a file; whether it has that much. Other threads run meanwhile."""
    filled = 0
    while filled < len(place):
        count = os.preadv(fd, [place[filled:]], offset + filled)
        if not count:
            return False
        filled += count
    return True


class Courtesy:
    """Leaves the processor, between two pieces of long work, to an event loop that waits for it.

    The kernel may give it to another process, though, and one that computes keeps it for milliseconds at a
    time, longer than a loop does: it is not left again to that one before most of the time has been made up
    for.
    """

    def __init__(self) -> None:
        self._again = 0.0

    def __call__(self) -> None:
        """A piece is done."""
        left = time.monotonic()
        if left >= self._again:
            os.sched_yield()
            back = time.monotonic()
            if back - left > _TURN:
                self._again = back + _MADE_UP * (back - left)


def copy_lanes(pairs: Pairs, count: int) -> list[Lane]:
    """The same copy divided into ``count`` shares at most, to be done in any order or at the same time.

    The lanes keep the memory that they copy from and to.

    Raises:
        As :func:`copy_pairs`.
    """
    plain: list[tuple[Tensor, Tensor]] = []
    rest: list[tuple[Tensor, Tensor]] = []
    for pair in _detached(pairs):
        (plain if _is_plain(*pair) else rest).append(pair)
    ranges = [(d.data_ptr(), s.data_ptr(), d.nbytes) for d, s in plain]
    share = -(-sum(nbytes for _, _, nbytes in ranges) // count)
    lanes: list[Lane] = [partial(_copy_by_torch, rest)] if rest else []
    return lanes + [partial(_copy_ranges, plain, shared) for shared in _divide(ranges, share)]


class Filling(ABC):
    """A buffer that is being filled, block after block from its beginning. The thread that fills it has each
    block in its cache, and so computes its checksum."""

    @abstractmethod
    def ready(self, block: int) -> bool:
        """Whether every block up to this one is there."""

    @property
    @abstractmethod
    def whole(self) -> bool:
        """Whether every block is there."""

    @abstractmethod
    def checksum(self, block: int) -> int:
        """That of a block that is there."""

    @abstractmethod
    def on_more(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in any thread, when more is there than now, or nothing more will come."""


class BlockCopy(Filling):
    """A copy into one buffer, from its beginning to its end, by the thread that needs the next block first.

    So a network can begin with the first block while the last are still to be copied. Who needs a block
    hardly waits for longer than its copy takes; who only wants the copy to end (:meth:`complete`) may keep a
    few blocks ahead of the others, for as long as they are quick.

    Args:
        buffer: 1-D uint8, in CPU memory.
        nbytes: how much of it is in use.
        pairs: (a view of the buffer, source); what memmove cannot do is copied here and now.
        block: bytes of a block.
        checked: whether checksums are wanted.
    """

    def __init__(
        self, buffer: Tensor, nbytes: int, pairs: Pairs, block: int, *, checked: bool = True
    ) -> None:
        pairs = _detached(pairs)
        plain = [pair for pair in pairs if _is_plain(*pair)]
        _copy_by_torch([pair for pair in pairs if not _is_plain(*pair)], lambda: False)
        ranges = sorted((d.data_ptr(), s.data_ptr(), d.nbytes) for d, s in plain)
        self._memory = buffer.numpy().data[:nbytes]
        self._start = buffer.data_ptr()
        self._block = block
        self._checked = checked
        self._checksums: list[int] = []
        self._alive = plain
        self._ranges = iter(ranges)
        self._range: _Range | None = next(self._ranges, None)
        self._lock = threading.Lock()
        self._asked = 0
        self._waiting = False
        self._nearer = threading.Event()
        self._give_way = Courtesy()

    def ready(self, block: int) -> bool:
        """Always: what is not there is copied now."""
        self._asked = max(self._asked, block)
        self._waiting = True
        self._copy_up_to(block)
        self._waiting = False
        if self._lead <= _LEAD // 2:
            self._nearer.set()
        return True

    @property
    def whole(self) -> bool:
        return len(self._checksums) * self._block >= len(self._memory)

    def complete(self, *, paced: bool) -> None:
        """Have every block copied; ``paced``: a few blocks ahead of those who ask for them, if they do."""
        last = -(-len(self._memory) // self._block) - 1
        while paced and len(self._checksums) <= last:
            self._nearer.clear()
            self._copy_up_to(min(self._asked + _LEAD, last))
            if self._lead > _LEAD // 2:
                paced = self._nearer.wait(_PATIENCE)
        while len(self._checksums) <= last:
            self._copy_up_to(len(self._checksums))
            if self._waiting:
                time.sleep(0)  # lets a thread run that needs the next block and waits for the lock

    @property
    def _lead(self) -> int:
        return len(self._checksums) - self._asked

    def checksum(self, block: int) -> int:
        return self._checksums[block]

    def on_more(self, callback: Callable[[], None]) -> None:
        """Never needed."""
        callback()

    def _copy_up_to(self, block: int) -> None:
        done = self._checksums
        while len(done) <= block:
            with self._lock:
                begin = len(done) * self._block
                if len(done) <= block:
                    self._copy_until(self._start + begin + self._block)
                    copied = self._memory[begin : begin + self._block]
                    done.append(checksum_of(copied) if self._checked else 0)  # it is still in the cache
            self._give_way()

    def _copy_until(self, end: int) -> None:
        while self._range is not None and self._range[0] < end:
            destination, source, nbytes = self._range
            piece = min(nbytes, end - destination)
            ctypes.memmove(destination, source, piece)  # lets other threads run meanwhile
            rest = nbytes - piece
            self._range = (destination + piece, source + piece, rest) if rest else next(self._ranges, None)
        if self._range is None:
            self._alive = []


def _detached(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    """The same memory, also if a parameter's ``.data`` is pointed elsewhere while it is being copied."""
    detached = [(destination.detach(), source.detach()) for destination, source in pairs]
    for destination, source in detached:
        if destination.shape != source.shape:
            _refuse_shape(destination, source)
    return detached


def _refuse_shape(destination: Tensor, source: Tensor) -> NoReturn:
    # It was right when ``send`` began; a parameter may have been given another ``.data`` since.
    raise InvalidArgumentError(
        f"expected a tensor of shape {tuple(destination.shape)}, got {tuple(source.shape)}: "
        "the model was changed while its weights were being sent"
    )


def _check_memory(source: Tensor) -> None:
    """Check that there is something to be copied: torch itself reads from address 0 then."""
    if not source.is_cpu or source.layout is not torch.strided or source._is_zerotensor():
        return
    if type(source).__torch_dispatch__ is _NO_DISPATCH and source.numel() and not source.data_ptr():
        raise InvalidArgumentError(
            f"a tensor of shape {tuple(source.shape)} has no memory: its storage was freed, as FSDP frees "
            "what it shards; gather the parameters before they are sent"
        )


def _is_plain(destination: Tensor, source: Tensor) -> bool:
    """Whether ``memmove`` copies it, and there is enough of it to be divided."""
    return (
        destination.nbytes > INLINE_LIMIT and _is_memory_alike(destination, source) and source.data_ptr() != 0
    )


def _is_memory_alike(destination: Tensor, source: Tensor) -> bool:
    """Whether the bytes in memory are the same for equal values, so that ``memmove`` copies them."""
    return (
        destination.dtype is source.dtype
        and destination.is_cpu
        and source.is_cpu
        and destination.is_contiguous()
        and source.is_contiguous()
        # Bits that say "negated" or "conjugated" are not in the memory.
        and not (source.is_conj() or source.is_neg())
        # Such a subclass need not have any memory, or may mean something else by it.
        and type(source).__torch_dispatch__ is _NO_DISPATCH
    )


def _divide(ranges: Sequence[_Range], share: int) -> list[list[_Range]]:
    """Lists of ``share`` bytes each, cut into pieces."""
    shares: list[list[_Range]] = []
    room = 0
    for start, source, nbytes in ranges:
        done = 0
        while done < nbytes:
            if room == 0:
                shares.append([])
                room = share
            piece = min(nbytes - done, room, _STRETCH)
            shares[-1].append((start + done, source + done, piece))
            done += piece
            room -= piece
    return shares


def _copy_ranges(alive: Pairs, ranges: Sequence[_Range], cancelled: Callable[[], bool]) -> bool:
    """Copy; ``alive`` are the tensors that the addresses belong to."""
    since = _STRETCH
    give_way = Courtesy()
    for destination, source, nbytes in ranges:
        if since >= _STRETCH:
            if cancelled():
                return False
            since = 0
        ctypes.memmove(destination, source, nbytes)  # lets other threads run meanwhile
        give_way()
        since += nbytes
    return True


def _copy_by_torch(pairs: Pairs, cancelled: Callable[[], bool]) -> bool:
    for _, source in pairs:
        _check_memory(source)
    with torch.no_grad():
        for batch in _batches(pairs):
            if cancelled():
                return False
            torch._foreach_copy_([d for d, _ in batch], [s for _, s in batch])
    _await_devices(pairs)
    return True


def _await_devices(pairs: Pairs) -> None:
    for device in {t.device for pair in pairs for t in pair if t.is_cuda}:
        # A copy on a device has only begun by now. The worker that is notified next reads in another stream.
        torch.cuda.current_stream(device).synchronize()


def _batches(pairs: Pairs) -> Iterator[Pairs]:
    if sum(destination.nbytes for destination, _ in pairs) <= _PIECE:
        if pairs:
            yield pairs
        return
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        for piece in _pieces(*pair):
            batch.append(piece)
            size += piece[0].nbytes
            if size >= _PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(destination: Tensor, source: Tensor) -> Pairs:
    source = source.detach()
    if destination.nbytes <= 2 * _PIECE or not (destination.is_contiguous() and source.is_contiguous()):
        return [(destination, source)]
    step = _PIECE // destination.element_size()
    return list(zip(destination.view(-1).split(step), source.view(-1).split(step), strict=True))
