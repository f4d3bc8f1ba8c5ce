"""The memory that batches are written into, joining the parts of several workers, splitting trajectories."""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, pad
from torch import Tensor

from aiosync.collectors.command_pipe import NewBuffer
from aiosync.collectors.env import MASK, TRAJ_IDS, Fields, Key, Nested, Specs, flatten, unflatten
from aiosync.errors import InvalidArgumentError
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment
from aiosync.weights.tensors import spelled


class BatchBuffer:
    """Memory for a number of frames, one after the other. ``make`` returns memory of a number of bytes."""

    def __init__(
        self, specs: Specs, steps: int, make: Callable[[int], Segment], nested: Nested | None = None
    ) -> None:
        self.specs = specs
        self._nested = nested
        self.steps = steps  # how many frames fit
        self._layout = Layout((_name(key), (steps, *shape), dtype) for key, shape, dtype in specs)
        self.segment = make(self._layout.nbytes)
        self.views = self._views(self.segment.buffer)  # each of shape (steps, *shape)

    def _views(self, buffer: Tensor) -> Fields:
        views = self._layout.views(buffer)
        return {key: views[_name(key)] for key, _, _ in self.specs}

    def fits(self, specs: Specs, steps: int) -> bool:
        """Return whether ``steps`` frames of these specs fit."""
        return self.specs == specs and self.steps >= steps

    def write(self, places: Sequence[int], frames: Sequence[Fields]) -> None:
        """Write frames to their places. One copy for several frames: most of a copy's cost is its start.
        InvalidArgumentError: a frame differs from the first one of the batch in a key, shape or dtype."""
        first, last = places[0], places[0] + len(places)
        in_a_row = places == list(range(first, last))
        if any(len(frame) != len(self.views) for frame in frames):
            self._check(frames)
        try:
            for key, view in self.views.items():
                values = [frame[key] for frame in frames]
                if in_a_row and values[0].device == view.device:
                    torch.stack(values, out=view[first:last])
                else:
                    for place, value in zip(places, values, strict=True):
                        view[place] = value
        except (KeyError, RuntimeError, TypeError) as exc:
            self._check(frames)
            raise RuntimeError(f"a frame could not be written into the batch: {exc}") from exc

    def _check(self, frames: Iterable[Fields]) -> None:
        """Raise for the first field that differs from the batch's fields."""
        expected = {key: spelled(dtype, shape) for key, shape, dtype in self.specs}
        for frame in frames:
            found = {key: spelled(value.dtype, tuple(value.shape)) for key, value in frame.items()}
            for key in expected | found:
                if found.get(key) != expected.get(key):
                    raise InvalidArgumentError(
                        f"field {key!r}: expected {expected.get(key, 'nothing')}, as in the first step of "
                        f"the batch, got {found.get(key, 'nothing')}: make the environment and the policy "
                        "return the same fields, of the same shapes and dtypes, in every step, or give "
                        "use_buffers=False"
                    )

    def set_flags(self, keys: Iterable[Key], place: int) -> None:
        """Set these fields of the frame at a place to true."""
        for key in keys:
            self.views[key][place] = True

    def read(self, steps: int, shape: tuple[int, ...], order: list[int] | None) -> TensorDictBase:
        """Return the first ``steps`` frames, of the batch shape ``shape``: views of this memory; or copies of
        the places in ``order``."""
        which = slice(steps) if order is None else torch.tensor(order, device="cpu")
        return select_steps(self.views, which, len(shape), self._nested)

    def write_back(self, data: TensorDict, order: list[int], batch_dims: int) -> None:
        """Write the frames that :meth:`read` returned for ``order`` to their places."""
        for key, value in flatten(data).items():
            if key in self.views:
                self.views[key][torch.tensor(order)] = value.movedim(batch_dims, 0)

    def lend(self, on_returned: Callable[[], object]) -> Fields:
        """Return tensors that view this memory. ``on_returned`` is called when the last reference to them is
        dropped, in the thread that drops it."""
        buffer = self.segment.buffer
        memory: Any = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        memory.segment = self.segment  # keeps the segment mapped as long as a tensor views it
        weakref.finalize(memory, on_returned).atexit = False
        return self._views(torch.frombuffer(memory, dtype=torch.uint8))


def _name(key: Key) -> str:
    return key if isinstance(key, str) else "\x1f".join(key)


def select_steps(
    views: Mapping[Key, Tensor], which: slice | Tensor, batch_dims: int, nested: Nested | None
) -> TensorDict:
    """Return some frames of tensors of shape ``(steps, *batch, ...)`` as a TensorDict of batch size
    ``(*batch, steps)``. ``batch_dims`` is the length of ``batch``."""
    found = {key: view[which].movedim(0, batch_dims) for key, view in views.items()}
    return unflatten(found, next(iter(found.values())).shape[: batch_dims + 1], nested)


class FrameList:
    """The frames of one batch, whose fields may differ in shape and dtype."""

    def __init__(self, nested: Nested) -> None:
        self._nested = nested
        self._frames: dict[int, Fields] = {}  # by place

    def write(self, places: Sequence[int], frames: Sequence[Fields]) -> None:
        """See :class:`BatchBuffer`."""
        self._frames.update(zip(places, frames, strict=True))

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
    collector can map it. None: the memory is private to this process. ``nested``: of the frames. ``fixed``:
    the fields of all frames of a batch have the same shapes and dtypes; otherwise each batch is a
    :class:`FrameList`.
    """

    def __init__(
        self, announce: Callable[[NewBuffer], None] | None, nested: Nested, *, fixed: bool = True
    ) -> None:
        self._announce = announce
        self._nested = nested
        self._fixed = fixed
        self._buffers: dict[int, Any] = {}  # BatchBuffer or FrameList, which have the same methods
        self._free: set[int] = set()
        self._numbers = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return self._buffers[index]

    def allocate(self, frame: Fields, steps: int) -> int:
        """Reserve a buffer for ``steps`` frames like ``frame`` and return its number."""
        if not self._fixed:
            index = next(self._numbers)
            self._buffers[index] = FrameList(self._nested)
            return index
        specs = tuple((key, tuple(value.shape), value.dtype) for key, value in frame.items())
        for index in sorted(self._free):
            if self._buffers[index].fits(specs, steps):
                self._free.remove(index)
                return index
        replaced = tuple(self._free)
        for index in replaced:
            self._buffers.pop(index).segment.close()
        self._free.clear()
        index = next(self._numbers)
        make = Segment.private if self._announce is None else Segment.shared
        buffer = self._buffers[index] = BatchBuffer(specs, steps, make, self._nested)
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


class BufferLoans:
    """Which of a worker's buffers the trainer holds, and which of them the worker may reuse.

    Each lent batch keeps this object alive, so it refers to no other object.
    """

    def __init__(self) -> None:
        self.lent: set[int] = set()  # buffers of batches that the trainer holds
        self._released: list[int] = []  # buffers that the worker may reuse and has not been notified of

    def lend(self, buffer: int) -> Callable[[], None]:
        """Record a loan. Returns the function that ends it, to be called from any thread."""
        self.lent.add(buffer)
        return functools.partial(self.release, buffer)

    def release(self, buffer: int) -> None:
        """Let the worker reuse a buffer."""
        self.lent.discard(buffer)
        self._released.append(buffer)

    def take_released(self) -> tuple[int, ...]:
        """Return the released buffers for the next request, and forget them."""
        # Another thread may append a buffer meanwhile: no other method removes any.
        return tuple(self._released.pop() for _ in range(len(self._released)))


class BatchJoiner:
    """Joins the parts of several workers.

    A joined batch's memory is reused once the last reference to the batch is dropped: a copy into fresh
    memory takes several times as long. ``dim`` is the option ``cat_results``. ``may_differ``: parts may
    differ in length, so every stacked batch has ``("collector", "mask")``.
    """

    def __init__(self, dim: Literal["stack"] | int, *, may_differ: bool = False) -> None:
        self._dim = dim
        self._may_differ = may_differ
        self._free: list[BatchBuffer] = []

    def join(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        """Return one batch. Blocking. InvalidArgumentError: the parts' shapes do not fit together."""
        dim, put = 0, torch.stack
        if self._dim == "stack":
            longest = max(part.shape[-1] for part in parts)
            if self._may_differ or any(part.shape[-1] != longest for part in parts):
                parts = [pad_steps(part, longest, no_trajectory=-1) for part in parts]
            shape = (len(parts), *parts[0].shape)
        else:
            dim, put = self._check_dim(parts, int(self._dim)), torch.cat
            shape = tuple(parts[0].shape)
            shape = (*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :])
        if _differ(parts):
            return _join_frames(parts, None if self._dim == "stack" else dim)
        each = [flatten(part) for part in parts]
        rest = len(parts[0].shape)
        specs = tuple((key, (*shape[1:], *v.shape[rest:]), v.dtype) for key, v in each[0].items())
        buffer = self._buffer(specs, shape[0])
        views = buffer.lend(functools.partial(self._free.append, buffer))
        for key, view in views.items():
            put([fields[key] for fields in each], dim, out=view[: shape[0]])
        return unflatten({key: view[: shape[0]] for key, view in views.items()}, shape, nested_of(parts[0]))

    def _check_dim(self, parts: Sequence[TensorDictBase], dim: int) -> int:
        shapes = [tuple(part.shape) for part in parts]
        count = len(shapes[0])
        if -count <= dim < count:
            dim %= count
            if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1:
                return dim
        raise InvalidArgumentError(
            f"cat_results={dim}: the workers' parts have shapes {', '.join(map(str, shapes))}, which cannot "
            "be put together along that dimension; expected cat_results=-1 or 'stack'"
        )

    def _buffer(self, specs: Specs, steps: int) -> BatchBuffer:
        while self._free:  # another thread may append a buffer meanwhile
            buffer = self._free.pop()
            if buffer.fits(specs, steps):
                return buffer
        return BatchBuffer(specs, steps, Segment.private)


def nested_of(part: TensorDictBase) -> Nested:
    """Return the batch dimensions of nested entries beside those of ``part``."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for key in part.keys(True):
        inner = part.get(key)
        if isinstance(inner, TensorDictBase) and inner.batch_dims > part.batch_dims:
            found[key if isinstance(key, tuple) else (key,)] = tuple(inner.batch_size[part.batch_dims :])
    return found


def _differ(parts: Sequence[TensorDictBase]) -> bool:
    """Return whether the parts' frames have different fields, or shapes or dtypes of fields."""
    if not all(isinstance(part, TensorDict) for part in parts):
        return True
    first, *others = (_frame_specs(part) for part in parts)
    return any(other != first for other in others)


def _frame_specs(part: TensorDictBase) -> dict[Key, tuple[torch.Size, torch.dtype]]:
    rest = part.batch_dims
    return {key: (value.shape[rest:], value.dtype) for key, value in flatten(part).items()}


def _join_frames(parts: Sequence[TensorDictBase], dim: int | None) -> TensorDictBase:
    """Join parts with frames that differ into a lazy stack. ``dim``: the dimension to concatenate along;
    None: stack along a new first dimension."""
    if dim is None:
        return LazyStackedTensorDict.lazy_stack(list(parts), 0)
    last = parts[0].batch_dims - 1
    if dim != last:
        raise InvalidArgumentError(
            f"cat_results={dim}: the shapes of fields differ from step to step: expected cat_results=-1 or "
            "'stack'"
        )
    return LazyStackedTensorDict.lazy_stack([frame for part in parts for frame in part.unbind(last)], last)


def size_of(part: TensorDictBase) -> int:
    """Return the bytes of all tensors."""
    if isinstance(part, LazyStackedTensorDict):
        return sum(size_of(each) for each in part.tensordicts)
    return sum(leaf.nbytes for leaf in part.values(True, True))


def pad_steps(part: TensorDictBase, length: int, *, no_trajectory: int = 0) -> TensorDictBase:
    """Return ``part`` padded with zeros to ``length`` steps, with a mask that is true for its own steps.
    ``no_trajectory``: the trajectory number of the padding."""
    *batch, steps = part.shape
    result = pad(part, [0, 0] * len(batch) + [0, length - steps])
    mask = torch.zeros(result.batch_size, dtype=torch.bool, device=part.device or "cpu")
    mask[..., :steps] = part.get(MASK, True)
    if no_trajectory:
        result[TRAJ_IDS][..., steps:] = no_trajectory
    result.set(MASK, mask)
    return result


def valid_frames(batch: TensorDictBase) -> TensorDictBase:
    """Return the frames of a batch in one dimension, without those that its mask excludes."""
    flat = batch.reshape(-1)
    valid = flat.get(MASK, None)
    return flat if valid is None else flat[valid]


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch, whose last dimension is time, as ``(trajectories, steps)``: one row per trajectory,
    padded with zeros, with ``("collector", "mask")``."""
    flat = valid_frames(batch)
    ids = flat[TRAJ_IDS]
    rows = [(ids == number).nonzero().view(-1) for number in ids.unique()]  # each in order of time
    longest = max(len(row) for row in rows)
    return torch.stack([pad_steps(flat[row], longest) for row in rows], 0)
