"""The memory that a worker writes the frames of its batches into."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import TypeIs

from aiosync.collectors.command_pipe import NewBuffer
from aiosync.collectors.env import (
    Fields,
    Key,
    Nested,
    Specs,
    Value,
    Values,
    as_array,
    as_tensor,
    assemble,
    flatten,
    under,
    unflatten,
)
from aiosync.errors import InvalidArgumentError
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from aiosync.weights.tensors import array_at, maker_over_arrays, spelled


@dataclass(frozen=True)
class Part:
    """Frames of one worker."""

    data: TensorDictBase
    fields: Fields  # the tensors; empty for a lazy stack, whose frames may differ, or with other leaves
    nbytes: int

    @classmethod
    def of(cls, data: TensorDictBase) -> Self:
        """Return the part with these frames."""
        if isinstance(data, LazyStackedTensorDict):
            return cls(data, {}, sum(cls.of(each).nbytes for each in data.tensordicts))
        fields = flatten(data)
        tensors = {key: leaf for key, leaf in fields.items() if isinstance(leaf, Tensor)}
        nbytes = sum(leaf.nbytes for leaf in tensors.values())
        return cls(data, fields if len(tensors) == len(fields) else {}, nbytes)

    @functools.cached_property
    def specs(self) -> dict[Key, tuple[torch.Size, torch.dtype]]:
        """Shape in one frame and dtype of each field."""
        dims = self.data.batch_dims
        return {key: (value.shape[dims:], value.dtype) for key, value in self.fields.items()}


class Column(NamedTuple):
    """The memory of one field in the frames of a batch."""

    key: Key
    shape: tuple[int, ...]  # of the field in one frame
    dtype: torch.dtype
    view: Tensor  # of shape (steps, *shape)
    array: np.ndarray[Any, Any] | None  # the same memory; None: NumPy has no such dtype

    @classmethod
    def of(cls, key: Key, view: Tensor) -> Self:
        """Return the column with this memory."""
        try:
            array = view.numpy()  # a write by NumPy takes a fifth of the time of one by torch
        except TypeError:
            array = None
        return cls(key, tuple(view.shape[1:]), view.dtype, view, array)


def write_fields(columns: Mapping[Key, Column], place: int, fields: Values) -> None:
    """Write fields of the frame at a place; see :meth:`BatchBuffer.write`."""
    for key, value in fields.items():
        column = columns.get(key)
        if column is None:
            raise _differs(key, "nothing", _spelled(value))
        _, shape, dtype, view, array = column
        found: Any
        if array is None:
            found, expected = as_tensor(value), dtype
        else:
            try:
                found, expected = value if type(value) is np.ndarray else as_array(value), array.dtype
            except TypeError as exc:  # NumPy has no such dtype
                raise _differs(column.key, spelled(dtype, shape), _spelled(value)) from exc
        if found.dtype != expected or found.shape != shape:
            raise _differs(column.key, spelled(dtype, shape), _spelled(value))
        if array is None:
            view[place] = found
        else:
            array[place] = found


def _is_next(key: Key) -> TypeIs[tuple[str, ...]]:
    return key[0] == "next" and isinstance(key, tuple)


def _spelled(value: Value) -> str:
    found = as_tensor(value)
    return spelled(found.dtype, tuple(found.shape))


def _differs(key: Key, expected: str, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"field {key!r}: expected {expected}, as in the first step of the batch, got {found}: make the "
        "environment and the policy return the same fields, of the same shapes and dtypes, in every step, or "
        "give use_buffers=False"
    )


class BatchBuffer:
    """Memory for a number of frames, in the layout of the batch: ``(*batch, steps, ...)``, where ``batch``
    are the first ``batch_dims`` dimensions of a frame. So a batch is contiguous. ``make`` returns memory of a
    number of bytes."""

    def __init__(
        self,
        specs: Specs,
        steps: int,
        make: Callable[[int], Segment],
        batch_dims: int = 0,
        nested: Nested | None = None,
    ) -> None:
        self.specs = specs
        self._nested, self._dims = nested, batch_dims
        self.steps = steps  # how many frames fit
        self._layout = Layout(
            (_name(key), (*shape[:batch_dims], steps, *shape[batch_dims:]), dtype)
            for key, shape, dtype in specs
        )
        entries = {entry.name: entry for entry in self._layout.entries}
        self._entries = [(key, entries[_name(key)]) for key, _, _ in specs]
        self.segment = make(self._layout.nbytes)
        self._fields = self._views(self.segment.buffer)  # of the batch
        self.views = {key: view.movedim(batch_dims, 0) for key, view in self._fields.items()}  # steps first
        self._part: Part | None = None
        self._was_lent = False
        self._checked: tuple[Set[Key], Set[Key]] = set(), set()  # the fields of a frame that lacks none
        # What writes frames into this memory (DirectFrames), and for which fields; None: not known.
        self.direct: tuple[object, object] | None = None

    def _views(self, buffer: Tensor) -> Fields:
        views = self._layout.views(buffer)
        return {key: views[_name(key)] for key, _, _ in self.specs}

    def fits(self, specs: Specs, steps: int) -> bool:
        """Return whether ``steps`` frames of these specs fit."""
        return self.specs == specs and self.steps >= steps

    @functools.cached_property
    def columns(self) -> Mapping[Key, Column]:
        return {key: Column.of(key, view) for key, view in self.views.items()}

    @functools.cached_property
    def next_columns(self) -> Mapping[Key, Column]:
        below = ((key[1:], column) for key, column in self.columns.items() if _is_next(key))
        return {key if len(key) > 1 else key[0]: column for key, column in below}

    def write(self, place: int, fields: Values) -> None:
        """Write fields of the frame at a place. InvalidArgumentError: a field differs from that of the first
        frame in shape or dtype, or the first frame has no such field."""
        write_fields(self.columns, place, fields)

    def write_next(self, place: int, fields: Values) -> None:
        """Write fields that the frame at a place has below ``"next"``; see :meth:`write`."""
        write_fields(self.next_columns, place, fields)

    def check(self, step: Set[Key], after: Set[Key]) -> None:
        """InvalidArgumentError: a frame with these fields, of which ``after`` are below ``"next"``, lacks a
        field of the first frame."""
        if step == self._checked[0] and after == self._checked[1]:
            return
        found = {*step, *(under("next", key) for key in after)}
        for key, shape, dtype in self.specs:
            if key not in found:
                raise _differs(key, spelled(dtype, shape), "nothing")
        self._checked = set(step), set(after)

    def set_flags(self, keys: Iterable[Key], place: int) -> None:
        """Set these fields of the frame at a place to true."""
        for key in keys:
            self.views[key][place] = True

    def read(self, steps: int, shape: tuple[int, ...], order: list[int] | None) -> TensorDictBase:
        """Return the first ``steps`` frames, of the batch shape ``shape``: views of this memory; or copies of
        the places in ``order``."""
        return select_steps(self._fields, steps if order is None else order, shape, self._nested)

    def part(self, steps: int, shape: tuple[int, ...]) -> Part:
        """Return the first ``steps`` frames, of the batch shape ``shape``: views of this memory, which every
        call for as many frames returns again."""
        if self._part is None or self._part.data.shape != (*shape, steps):
            self._part = Part.of(self.read(steps, shape, None))
        return self._part

    def write_back(self, data: TensorDict, order: list[int]) -> None:
        """Write the frames that :meth:`read` returned for ``order`` to their places."""
        for key, value in flatten(data).items():
            if key in self._fields:
                self._fields[key].index_copy_(self._dims, torch.tensor(order), value)

    @functools.cached_property
    def _arrays(self) -> list[tuple[Key, Any, Callable[[Any], Tensor]]]:
        """The arrays in this memory that lent tensors refer to, with what makes such a tensor; and one array
        that is never lent."""
        buffer = self.segment.buffer
        memory: Any = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        memory.segment = self.segment  # keeps the segment mapped as long as a tensor views it
        found = [
            (key, array_at(memory, e.offset, e.shape, e.dtype), maker_over_arrays(e.dtype))
            for key, e in self._entries
        ]
        return [*found, ("", np.empty(0), torch.from_numpy)]

    def lend(self, steps: int) -> Fields:
        """Return tensors that view the memory of the first ``steps`` frames; see :attr:`is_lent`."""
        self._was_lent = True
        # In the caller's inference mode, the tensors would not fit parameters made outside of that mode; and
        # views that are made without gradients cannot be changed in place with gradients.
        usual = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with nullcontext() if usual else torch.inference_mode(False):
            found = {key: make(array) for key, array, make in self._arrays[:-1]}
            whole, dim = steps == self.steps, self._dims
            return found if whole else {key: each.narrow(dim, 0, steps) for key, each in found.items()}

    @property
    def is_lent(self) -> bool:
        """Whether anything still views the tensors of :meth:`lend`: their storages refer to the arrays. A
        callback for their end would take as long again as :meth:`lend`."""
        if not self._was_lent:
            return False
        # A debugger that refers to what is counted here refers to the last array too.
        *references, unlent = [sys.getrefcount(array) for _, array, _ in self._arrays]
        return max(references) > unlent


def _name(key: Key) -> str:
    return key if isinstance(key, str) else "\x1f".join(key)


def select_steps(
    fields: Fields, which: int | list[int], shape: tuple[int, ...], nested: Nested | None
) -> TensorDict:
    """Return some frames of tensors of shape ``(*shape, steps, ...)`` as a TensorDict of batch size
    ``(*shape, steps)``: views of the first ``which`` ones, or copies of those in this list."""
    dim = len(shape)
    if isinstance(which, int):
        found = {key: field.narrow(dim, 0, which) for key, field in fields.items()}
        return assemble(found, (*shape, which), nested)
    places = torch.tensor(which, device="cpu")
    found = {key: field.index_select(dim, places.to(field.device)) for key, field in fields.items()}
    return unflatten(found, (*shape, len(which)), nested)


class FrameList:
    """The frames of one batch, whose fields may differ in shape and dtype. ``device``: of the environment."""

    def __init__(self, nested: Nested, device: torch.device | None) -> None:
        self._nested = nested
        self._device = device
        self._frames: dict[int, Fields] = {}  # by place

    def write(self, place: int, fields: Values) -> None:
        """See :class:`BatchBuffer`."""
        self._frames.setdefault(place, {}).update({key: self._copy(v) for key, v in fields.items()})

    def write_next(self, place: int, fields: Values) -> None:
        """See :class:`BatchBuffer`."""
        self.write(place, {under("next", key): value for key, value in fields.items()})

    def _copy(self, value: Value) -> Tensor:
        if not isinstance(value, Tensor | np.ndarray):
            return value  # NonTensorData
        found = as_tensor(value).detach().clone()
        # The collector's own fields are arrays, also if the environment's tensors are on another device.
        return found if self._device is None or isinstance(value, Tensor) else found.to(self._device)

    def check(self, step: Set[Key], after: Set[Key]) -> None:
        """See :class:`BatchBuffer`: here a frame may have any fields."""

    def specs_of(self, place: int) -> Specs:
        """Return the specs of the frame at a place. InvalidArgumentError: a field is no tensor."""
        for key, value in self._frames[place].items():
            if not isinstance(value, Tensor):
                raise InvalidArgumentError(
                    f"field {key!r}: expected a tensor, got {type(value).__name__}: give use_buffers=False"
                )
        return tuple((key, tuple(v.shape), v.dtype) for key, v in self._frames[place].items())

    def move_to(self, buffer: BatchBuffer) -> None:
        """Write all frames into a buffer, also incomplete ones."""
        for place, frame in self._frames.items():
            buffer.write(place, dict(frame))

    def set_flags(self, keys: Iterable[Key], place: int) -> None:
        """See :class:`BatchBuffer`."""
        frame = self._frames[place]
        frame.update({key: torch.ones_like(frame[key]) for key in keys})

    def read(self, steps: int, shape: tuple[int, ...], order: list[int] | None) -> TensorDictBase:
        """Return the frames: a TensorDict; or, if their fields differ, a lazy stack of one per step."""
        frames = [self._frames[place] for place in order or range(steps)]
        if len({tuple((key, v.shape, v.dtype) for key, v in frame.items()) for frame in frames}) > 1:
            steps_of = [unflatten(frame, shape, self._nested) for frame in frames]
            return LazyStackedTensorDict.lazy_stack(steps_of, len(shape))
        stacked = {key: torch.stack([frame[key] for frame in frames], len(shape)) for key in frames[0]}
        return unflatten(stacked, (*shape, len(frames)), self._nested)


class BatchBuffers:
    """The buffers of one worker.

    A buffer is reused when the collector has released it. When no free buffer fits the next batch, all free
    ones are closed and a new one is allocated. ``announce`` is called with each new buffer, so that the
    collector can map it. None: the memory is private to this process. ``batch_dims``, ``nested``,
    ``device``: of the environment. ``fixed``: the fields of all frames of a batch have the same shapes and
    dtypes; otherwise each batch is a :class:`FrameList`.
    """

    def __init__(
        self,
        announce: Callable[[NewBuffer], None] | None,
        batch_dims: int,
        nested: Nested,
        device: torch.device | None,
        *,
        fixed: bool = True,
    ) -> None:
        self._announce = announce
        self._dims, self._nested = batch_dims, nested
        self._device = device
        self._fixed = fixed
        self._buffers: dict[int, Any] = {}  # BatchBuffer or FrameList, which have the same methods
        self._free: set[int] = set()
        self._numbers = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return self._buffers[index]

    def begin(self) -> FrameList:
        """Return the memory of a batch until a frame is complete, which shows the fields."""
        return FrameList(self._nested, self._device)

    def allocate(self, frames: FrameList, place: int, steps: int) -> int:
        """Reserve memory for ``steps`` frames like the one at ``place``, which is complete, and return its
        number. ``frames``: what has been written so far."""
        if not self._fixed:
            index = next(self._numbers)
            self._buffers[index] = frames
            return index
        index = self._reserve(frames.specs_of(place), steps)
        frames.move_to(self._buffers[index])
        return index

    def take_free(self, specs: Specs, steps: int) -> int | None:
        """Reserve free memory for ``steps`` frames of these specs, and return its number. None: there is
        none."""
        for index in sorted(self._free):
            if self._buffers[index].fits(specs, steps):
                self._free.remove(index)
                return index
        return None

    def _reserve(self, specs: Specs, steps: int) -> int:
        found = self.take_free(specs, steps)
        if found is not None:
            return found
        replaced = tuple(self._free)
        for index in replaced:
            self._buffers.pop(index).segment.close()
        self._free.clear()
        index = next(self._numbers)
        make = Segment.private if self._announce is None else Segment.shared
        buffer = self._buffers[index] = BatchBuffer(specs, steps, make, self._dims, self._nested)
        if self._announce is not None:
            assert buffer.segment.handle is not None
            self._announce(NewBuffer(index, buffer.segment.handle, specs, steps, replaced))
        return index

    def release(self, indices: Iterable[int]) -> None:
        """Make these buffers available again."""
        if self._fixed:
            self._free.update(indices)
        else:
            for index in indices:
                del self._buffers[index]
