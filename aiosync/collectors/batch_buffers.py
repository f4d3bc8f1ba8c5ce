"""A worker's slots: the memory that it puts batches into."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from aiosync.collectors.fields import Fields, Key, Specs, unflatten
from aiosync.collectors.messages import NewBuffer
from aiosync.errors import InvalidArgumentError
from aiosync.weights.dtypes import spelled
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = ["BatchBuffer", "BatchBuffers", "select_steps"]

_BETWEEN = "\x1f"


class BatchBuffers:
    """Slots are used again when the collector has given them back. Those that have got too small, or whose
    frames consisted of other things, are replaced.

    Args:
        tell: called with each new slot. None: the memory is this process's own.
        shape: of a frame.
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
        """A slot for so many frames like this one: its number.

        Raises:
            ArenaAllocationError: there is not that much memory.
        """
        specs = _specs_of(frame)
        for index in sorted(self._free):
            if self._buffers[index].holds(specs, steps):
                self._free.remove(index)
                return index
        return self._add(specs, steps)

    def _add(self, specs: Specs, steps: int) -> int:
        replaced = tuple(self._free)  # none of them holds what is wanted now
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
        """These are free again."""
        self._free.update(indices)


class BatchBuffer:
    """Shared memory for a number of steps, one after the other.

    Args:
        segment: where.
        specs: what a step consists of.
        steps: how many.

    Attributes:
        views: name -> tensor of shape ``(steps, *shape)``.
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
        """A new one, in shared memory or in this process's own.

        Raises:
            ArenaAllocationError: there is not that much memory.
        """
        nbytes = _layout(specs, steps).nbytes
        segment = Segment.shared(nbytes) if shared else Segment.private(nbytes)
        return cls(segment, specs, steps)

    def holds(self, specs: Specs, steps: int) -> bool:
        """Whether as many such steps fit."""
        return self.specs == specs and self.steps >= steps

    def write(self, places: Sequence[int], frames: Sequence[Mapping[Key, Tensor]]) -> None:
        """Put frames in their places: several at once, since what a copy costs is mostly its beginning.

        Raises:
            InvalidArgumentError: a frame consists of other fields than the first one of the batch, or of
                other shapes or dtypes.
        """
        try:
            self._write(places, frames)
        except (KeyError, RuntimeError, TypeError) as exc:
            self._check(frames)
            raise RuntimeError(f"a frame could not be put into the batch: {exc}") from exc

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
        """Raise for the first field that differs from those of the batch."""
        expected = {key: (dtype, shape) for key, shape, dtype in self.specs}
        for frame in frames:
            found = {key: (value.dtype, tuple(value.shape)) for key, value in frame.items()}
            for key in expected | found:
                if found.get(key) != expected.get(key):
                    raise InvalidArgumentError(
                        f"field {key!r}: the environment or the policy gave {_spelled(found.get(key))} in a "
                        f"later step, and {_spelled(expected.get(key))} in the batch's first one: every step "
                        "has to have the same fields, of the same shapes and dtypes"
                    )

    def read(self, steps: int, batch_dims: int, order: list[int] | None) -> TensorDict:
        """The first steps, in this memory unless there is another order; see :func:`steps_of`."""
        which = slice(steps) if order is None else torch.tensor(order, device="cpu")
        return select_steps(self.views, which, batch_dims)

    def lend(self, given_back: Callable[[], object]) -> Fields:
        """Its tensors; ``given_back`` is called when nothing refers to any of them any more, in whatever
        thread."""
        buffer = self.segment.buffer
        memory: Any = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        memory.segment = self.segment  # keeps it mapped as long as a tensor views it
        weakref.finalize(memory, given_back).atexit = False
        return self._views(torch.frombuffer(memory, dtype=torch.uint8))


def select_steps(views: Mapping[Key, Tensor], which: slice | Tensor, batch_dims: int) -> TensorDict:
    """Some of the steps in these tensors; the dimension of time comes after ``batch_dims`` others."""
    found = {key: view[which].movedim(0, batch_dims) for key, view in views.items()}
    return unflatten(found, next(iter(found.values())).shape[: batch_dims + 1])


def _specs_of(step: Mapping[Key, Tensor]) -> Specs:
    """What a slot has to hold for steps like this one."""
    return tuple((key, tuple(value.shape), value.dtype) for key, value in step.items())


def _spelled(look: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if look is None else spelled(*look)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else _BETWEEN.join(key)


def _layout(specs: Specs, steps: int) -> Layout:
    return Layout((_name(key), (steps, *shape), dtype) for key, shape, dtype in specs)
