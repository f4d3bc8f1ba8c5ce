"""The memory that batches are written into: one buffer per batch, reused."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from aiosync.collectors.fields import Fields, Key, Specs, unflatten
from aiosync.collectors.messages import NewBuffer
from aiosync.errors import InvalidArgumentError
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from aiosync.weights.tensors import spelled

__all__ = ["BatchBuffer", "BatchBuffers", "BufferLoans", "select_steps"]

_BETWEEN = "\x1f"


class BatchBuffers:
    """The buffers of one worker.

    A buffer is reused when the collector has released it. When no free buffer fits the next batch, all free
    ones are closed and a new one is allocated.

    Args:
        announce: called with each new buffer, so that the collector can map it. None: the memory is private
            to this process.
        shape: batch shape of one frame: ``()``, or ``(number,)`` of environments that step together.
    """

    def __init__(self, announce: Callable[[NewBuffer], None] | None, shape: tuple[int, ...]) -> None:
        self._announce = announce
        self._shape = shape
        self._buffers: dict[int, BatchBuffer] = {}
        self._free: set[int] = set()
        self._next = 0

    def __getitem__(self, index: int) -> BatchBuffer:
        return self._buffers[index]

    def allocate(self, frame: Fields, steps: int) -> int:
        """Reserve a buffer for ``steps`` frames like ``frame`` and return its number.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        specs = _specs_of(frame)
        for index in sorted(self._free):
            if self._buffers[index].holds(specs, steps):
                self._free.remove(index)
                return index
        return self._add(specs, steps)

    def _add(self, specs: Specs, steps: int) -> int:
        replaced = tuple(self._free)  # none of them fits
        for index in replaced:
            self._buffers.pop(index).segment.close()
        self._free.clear()
        index, self._next = self._next, self._next + 1
        buffer = self._buffers[index] = BatchBuffer.make(specs, steps, shared=self._announce is not None)
        if self._announce is not None:
            assert buffer.segment.handle is not None
            self._announce(NewBuffer(index, buffer.segment.handle, specs, steps, self._shape, replaced))
        return index

    def release(self, indices: Iterable[int]) -> None:
        """Make these buffers available again."""
        self._free.update(indices)


class BatchBuffer:
    """Memory for a number of frames, one after the other.

    Args:
        segment: the memory.
        specs: key, shape and dtype of each field of a frame.
        steps: how many frames fit.

    Attributes:
        views: key -> tensor of shape ``(steps, *shape)`` in that memory.
    """

    def __init__(self, segment: Segment, specs: Specs, steps: int) -> None:
        self.segment = segment
        self.specs = specs
        self.steps = steps
        self._layout = _layout(specs, steps)
        self.views = self._views(segment.buffer)

    def _views(self, buffer: Tensor) -> dict[Key, Tensor]:
        views = self._layout.views(buffer)
        return {key: views[_name(key)] for key, _, _ in self.specs}

    @classmethod
    def make(cls, specs: Specs, steps: int, *, shared: bool = True) -> BatchBuffer:
        """Allocate a buffer, in shared memory or in memory private to this process.

        Raises:
            ArenaAllocationError: there is not enough memory.
        """
        nbytes = _layout(specs, steps).nbytes
        segment = Segment.shared(nbytes) if shared else Segment.private(nbytes)
        return cls(segment, specs, steps)

    def holds(self, specs: Specs, steps: int) -> bool:
        """Return whether ``steps`` frames of these specs fit."""
        return self.specs == specs and self.steps >= steps

    def write(self, places: Sequence[int], frames: Sequence[Mapping[Key, Tensor]]) -> None:
        """Write frames to their places. One copy for several frames: most of a copy's cost is its start.

        Raises:
            InvalidArgumentError: a frame has other fields than the first one of the batch, or fields of
                another shape or dtype.
        """
        try:
            self._write(places, frames)
        except (KeyError, RuntimeError, TypeError) as exc:
            self._check(frames)
            raise RuntimeError(f"a frame could not be written into the batch: {exc}") from exc

    def _write(self, places: Sequence[int], frames: Sequence[Mapping[Key, Tensor]]) -> None:
        if any(len(frame) != len(self.views) for frame in frames):
            self._check(frames)
        first = places[0]
        in_a_row = places == list(range(first, first + len(places)))
        for key, view in self.views.items():
            values = [frame[key] for frame in frames]
            if in_a_row and values[0].device == view.device:
                torch.stack(values, out=view[first : first + len(places)])
            else:
                for place, value in zip(places, values, strict=True):
                    view[place] = value

    def _check(self, frames: Iterable[Mapping[Key, Tensor]]) -> None:
        """Raise for the first field that differs from the batch's fields."""
        expected = {key: (dtype, shape) for key, shape, dtype in self.specs}
        for frame in frames:
            found = {key: (value.dtype, tuple(value.shape)) for key, value in frame.items()}
            for key in expected | found:
                if found.get(key) != expected.get(key):
                    raise InvalidArgumentError(
                        f"field {key!r}: expected {_spelled(expected.get(key))}, as in the first step of the "
                        f"batch, got {_spelled(found.get(key))}: make the environment and the policy return "
                        "the same fields, of the same shapes and dtypes, in every step"
                    )

    def read(self, steps: int, batch_dims: int, order: list[int] | None) -> TensorDict:
        """Return the first ``steps`` frames: views of this memory, or copies if ``order`` is given.

        Args:
            steps: how many frames.
            batch_dims: how many batch dimensions a frame has.
            order: the places to read, in order of time; None: ``0, 1, ...``.
        """
        which = slice(steps) if order is None else torch.tensor(order, device="cpu")
        return select_steps(self.views, which, batch_dims)

    def lend(self, on_returned: Callable[[], object]) -> Fields:
        """Return tensors that view this memory.

        Args:
            on_returned: called when the last reference to these tensors is dropped, in the thread that drops
                it.
        """
        buffer = self.segment.buffer
        memory: Any = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        memory.segment = self.segment  # keeps the segment mapped as long as a tensor views it
        weakref.finalize(memory, on_returned).atexit = False
        return self._views(torch.frombuffer(memory, dtype=torch.uint8))


class BufferLoans:
    """Which of a worker's buffers the trainer holds, and which of them the worker may reuse.

    Each lent batch keeps this object alive, so it refers to no other object.

    Attributes:
        lent: buffers of batches that the trainer holds.
    """

    def __init__(self) -> None:
        self.lent: set[int] = set()
        # Buffers that the worker may reuse and has not been notified of.
        self._released: list[int] = []

    def lend(self, buffer: int) -> Callable[[], None]:
        """Record a loan. Returns the function that ends it, to be called from any thread."""
        self.lent.add(buffer)
        return functools.partial(self._return, buffer)

    def _return(self, buffer: int) -> None:
        self.lent.discard(buffer)
        self.release(buffer)

    def release(self, buffer: int) -> None:
        """Let the worker reuse a buffer."""
        self._released.append(buffer)

    def take_released(self) -> tuple[int, ...]:
        """Return the released buffers for the next request, and forget them."""
        released = []
        while self._released:  # another thread may append a buffer meanwhile
            released.append(self._released.pop())
        return tuple(released)


def select_steps(views: Mapping[Key, Tensor], which: slice | Tensor, batch_dims: int) -> TensorDict:
    """Return some of the frames in these tensors as a TensorDict, with time as the last batch dimension.

    Args:
        views: key -> tensor of shape ``(steps, *batch, ...)``.
        which: the frames.
        batch_dims: how many batch dimensions a frame has.
    """
    found = {key: view[which].movedim(0, batch_dims) for key, view in views.items()}
    return unflatten(found, next(iter(found.values())).shape[: batch_dims + 1])


def _specs_of(step: Mapping[Key, Tensor]) -> Specs:
    """Return what a buffer for frames like this one consists of."""
    return tuple((key, tuple(value.shape), value.dtype) for key, value in step.items())


def _spelled(look: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if look is None else spelled(*look)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else _BETWEEN.join(key)


def _layout(specs: Specs, steps: int) -> Layout:
    return Layout((_name(key), (steps, *shape), dtype) for key, shape, dtype in specs)
