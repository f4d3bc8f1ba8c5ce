"""Copy many tensors at once, in pieces, so that a copy can be cancelled between two pieces.

torch divides each tensor's copy among its threads, and waits for all of them at its end. Here a copy has a
few lanes, one per thread, which take piece after piece of all tensors' bytes. So a lane that gets less of a
processor copies less. A piece is one ``memmove`` if source and destination are plain CPU memory of the same
dtype, past the caches if the copy is large. torch copies everything else: other dtypes, strides and devices.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from aiosync.errors import InvalidArgumentError
from aiosync.weights.devices import QueuedCopies, copying_on, cuda_devices, queueing_on
from aiosync.weights.streaming import WORTH_STREAMING, Move, streaming_move

INLINE_LIMIT = 256 * 1024
"""Largest copy in bytes that takes less time here than a round trip to a thread."""

QUICK_COPY = 2 * 1024 * 1024
"""Largest copy in bytes, within plain memory, for which an event loop needs no thread. It takes a fraction of
a millisecond. Where workers compute on every processor, each way to a thread and back may take several."""

_PIECE = 32 * 1024 * 1024
"""Bytes that torch copies between two checks for cancellation."""

_QUEUED_ON_DEVICE = 2 << 30
_QUEUED_TO_HOST = 128 << 20
"""Most bytes of a copy that is queued at once: within a device's memory, where it takes 2 ms or less, and
through the processor's memory. What is queued cannot be cancelled."""

_CALLS_ON_DEVICE = 256
_CALLS_TO_HOST = 64
"""Most tensors of such a copy: each one takes the calling thread time, more if it is copied by itself."""

_GRAIN = 32 * 1024
"""torch uses OpenMP threads for an operation on this many elements or more."""

_MOVED = 16 * 1024 * 1024
"""Most bytes that a lane takes at a time."""

_TURN = 0.001
"""Most seconds that an event loop runs after the processor was yielded to it."""

_MADE_UP = 8
"""After a long yield, the processor is not yielded again for this multiple of the yield's duration."""

_NO_DISPATCH = Tensor.__torch_dispatch__

Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""(destination, source) of equal shapes."""

Lane: TypeAlias = Callable[[Callable[[], bool]], bool]
"""Copies one share. Its argument returns whether to stop. Returns whether the share is complete."""

Place: TypeAlias = tuple[torch.dtype, torch.Size, int, int]
"""A tensor in CPU memory: dtype, shape, address, bytes."""

Range: TypeAlias = tuple[int, int, int]
"""Destination address, source address, bytes."""


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(t.nbytes for t in tensors)


def copy_pairs(pairs: Pairs) -> None:
    """Copy each second tensor into the first, converting dtype and device.

    Raises:
        InvalidArgumentError: the shapes differ, or a source's memory was freed.
    """
    if nbytes_of(destination for destination, _ in pairs) <= INLINE_LIMIT:
        copy_few(pairs)
        return
    plain, rest = split_plain(pairs)
    copy_with_torch(rest, lambda: False)
    for lane in copy_lanes(plain, 1):
        lane(lambda: False)


def copy_few(pairs: Pairs) -> None:
    """Copy a few megabytes at most, without lanes; otherwise as :func:`copy_pairs`."""
    rest: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        destination, source = pair
        if destination.shape != source.shape:
            _refuse_shape(destination, source)
        # Most of a small model's send is such copies. torch's copy takes several times as long.
        address = source.data_ptr() if _is_memory_alike(destination, source) else 0
        if address:
            ctypes.memmove(destination.data_ptr(), address, destination.nbytes)
        else:
            rest.append(pair)
    if rest:
        copy_with_torch(rest, lambda: False)


def place_of(tensor: Tensor) -> Place:
    """Return where :func:`copy_to_places` copies to; the tensor is contiguous, in CPU memory."""
    return tensor.dtype, tensor.shape, tensor.data_ptr(), tensor.nbytes


def copy_to_places(places: Iterable[Place], sources: Iterable[Tensor]) -> bool:
    """Copy each source to its place; returns false at the first one that ``memmove`` cannot copy.

    For few bytes. Takes two thirds of the time of :func:`copy_few`, which looks at two tensors for each copy.
    """
    for (dtype, shape, place, nbytes), source in zip(places, sources):  # noqa: B905 - strict= takes time too
        if source.dtype is not dtype or source.shape != shape or not _is_plain_memory(source):
            return False
        address = source.data_ptr()
        if nbytes and not address:
            return False
        ctypes.memmove(place, address, nbytes)
    return True


def read_at(fd: int, place: memoryview, offset: int) -> bool:
    """Read ``len(place)`` bytes at ``offset`` of a file, without the GIL; returns false at the file's end."""
    filled = 0
    while filled < len(place):
        count = os.preadv(fd, [place[filled:]], offset + filled)
        if not count:
            return False
        filled += count
    return True


class ProcessorYielder:
    """Yields the processor between two pieces of long work, so that a waiting event loop can run.

    The kernel may run another process instead. A process that computes keeps the processor for milliseconds,
    longer than an event loop. After such a yield the processor is not yielded again until :data:`_MADE_UP`
    times its duration has passed.
    """

    def __init__(self) -> None:
        self._again = 0.0

    def __call__(self) -> None:
        """Yield the processor. Call it after each piece."""
        left = time.monotonic()
        if left >= self._again:
            os.sched_yield()
            back = time.monotonic()
            if back - left > _TURN:
                self._again = back + _MADE_UP * (back - left)


def copy_lanes(plain: Pairs, count: int) -> list[Lane]:
    """Make at most ``count`` lanes of a copy, which may run in any order or at the same time.

    The lanes share the pieces. They keep the memory that they copy from and to.

    Args:
        plain: what ``memmove`` copies, see :func:`split_plain`.
        count: at least 1.
    """
    pieces = _divide([(d.data_ptr(), s.data_ptr(), d.nbytes) for d, s in plain])
    streamed = sum(nbytes for _, _, nbytes in pieces) >= WORTH_STREAMING
    left = iter(pieces)  # a list's iterator gives each piece to one thread
    return [partial(_copy_ranges, plain, left, streamed)] * min(count, len(pieces))


def split_plain(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Split ``pairs`` into those that ``memmove`` copies in pieces, and the rest.

    The tensors in the result are detached. So they keep their memory if a parameter's ``.data`` is replaced
    during the copy.

    Raises:
        InvalidArgumentError: the shapes of a pair differ.
    """
    plain: list[tuple[Tensor, Tensor]] = []
    rest: list[tuple[Tensor, Tensor]] = []
    for pair in [(destination.detach(), source.detach()) for destination, source in pairs]:
        destination, source = pair
        if destination.shape != source.shape:
            _refuse_shape(destination, source)
        # One call of torch copies the smaller ones. It would divide a larger one among OpenMP threads.
        large = destination.numel() >= _GRAIN
        movable = large and _is_memory_alike(destination, source) and source.data_ptr()
        (plain if movable else rest).append(pair)
    return plain, rest


def _refuse_shape(destination: Tensor, source: Tensor) -> NoReturn:
    # The shape was checked when ``send`` began. A parameter's ``.data`` may have been replaced since.
    raise InvalidArgumentError(
        f"expected a tensor of shape {tuple(destination.shape)}, got {tuple(source.shape)}: "
        "the model was changed while its weights were being sent"
    )


def _check_memory(source: Tensor) -> None:
    """Raise InvalidArgumentError if the tensor's storage was freed: torch would read from address 0."""
    if not source.is_cpu or source.layout is not torch.strided or source._is_zerotensor():
        return
    if type(source).__torch_dispatch__ is _NO_DISPATCH and source.numel() and not source.data_ptr():
        raise InvalidArgumentError(
            f"a tensor of shape {tuple(source.shape)} has no memory: its storage was freed, as FSDP frees "
            "what it shards; gather the parameters before they are sent"
        )


def _is_memory_alike(destination: Tensor, source: Tensor) -> bool:
    """Return whether equal values have equal bytes in memory, so that ``memmove`` can copy them."""
    return (
        destination.dtype is source.dtype
        and destination.is_cpu
        and destination.is_contiguous()
        and _is_plain_memory(source)
    )


def _is_plain_memory(source: Tensor) -> bool:
    """Return whether a tensor's values are the bytes of one range of CPU memory."""
    return (
        source.is_cpu
        and source.is_contiguous()
        # The negative bit and the conjugate bit are not in the memory.
        and not (source.is_conj() or source.is_neg())
        # A subclass with __torch_dispatch__ may have no memory, or may interpret it differently.
        and type(source).__torch_dispatch__ is _NO_DISPATCH
    )


def _divide(ranges: Sequence[Range]) -> list[Range]:
    """Divide ``ranges`` into pieces."""
    return [
        (destination + done, source + done, min(_MOVED, nbytes - done))
        for destination, source, nbytes in ranges
        for done in range(0, nbytes, _MOVED)
    ]


def _copy_ranges(alive: Pairs, left: Iterator[Range], streamed: bool, cancelled: Callable[[], bool]) -> bool:
    """Copy the ranges that are left. ``alive`` keeps the tensors that the addresses belong to."""
    move: Move = (streaming_move() if streamed else None) or ctypes.memmove
    give_way = ProcessorYielder()
    for destination, source, nbytes in left:
        if cancelled():
            return False
        move(destination, source, nbytes)  # releases the GIL
        give_way()
    return True


def copy_with_torch(pairs: Pairs, cancelled: Callable[[], bool], *, settled: bool = False) -> bool:
    """Copy with torch's kernels; returns false if ``cancelled()`` ended the copy early.

    ``settled``: the caller has waited for the CUDA devices, see :func:`copying_on`.
    """
    for _, source in pairs:
        _check_memory(source)
    devices = cuda_devices(chain.from_iterable(pairs))
    with torch.no_grad(), copying_on(devices, settled=settled) as copies:
        for batch in _batches(pairs):
            if cancelled():
                return False
            # Otherwise the device finishes each tensor's copy before the next one's is queued.
            ahead = bool(devices) and all(_can_be_queued(*pair) for pair in batch)
            copies.add([d for d, _ in batch], [s for _, s in batch], non_blocking=ahead)
            copies.wait()
    return True


def queue_copy(pairs: Pairs) -> QueuedCopies | None:
    """Queue a copy to, from or within CUDA devices that the caller has waited for, without blocking.

    Returns None, and does nothing, if that might block: the copy needs this processor or is long, or a thread
    captures a CUDA graph. Also for tensors on the CPU alone, and for those of other shapes than their
    destinations.
    """
    if len(pairs) > _CALLS_ON_DEVICE:
        return None
    devices = cuda_devices(chain.from_iterable(pairs))
    if not devices:
        return None
    nbytes = nbytes_of(destination for destination, _ in pairs)
    through_host = len(devices) > 1 or any(d.device != s.device for d, s in pairs)
    if through_host and (len(pairs) > _CALLS_TO_HOST or nbytes > _QUEUED_TO_HOST):
        return None
    if nbytes > _QUEUED_ON_DEVICE:
        return None
    # Detached, so that they keep their memory if a parameter's .data is replaced during the copy.
    pairs = [(destination.detach(), source.detach()) for destination, source in pairs]
    with torch.no_grad(), queueing_on(devices) as copies:
        if copies is None or not all(d.shape == s.shape and _can_be_queued(d, s) for d, s in pairs):
            return None
        copies.add([d for d, _ in pairs], [s for _, s in pairs], non_blocking=True)
    return copies


def _can_be_queued(destination: Tensor, source: Tensor) -> bool:
    """Return whether torch only queues such a copy on a device: nothing is copied or converted by the CPU."""
    if type(source).__torch_dispatch__ is not _NO_DISPATCH:
        return False
    if destination.is_cuda and source.is_cuda:
        return True
    host, other = (source, destination) if destination.is_cuda else (destination, source)
    if not (host.is_cpu and other.is_cuda and destination.dtype is source.dtype):
        return False
    return destination.is_contiguous() and source.is_contiguous() and host.is_pinned()


def _batches(pairs: Pairs) -> Iterator[Pairs]:
    if nbytes_of(destination for destination, _ in pairs) <= _PIECE:
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
