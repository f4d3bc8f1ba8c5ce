"""Steps as plain tensors by name, and slots of shared memory that hold many of them.

A name is a string, or a tuple of strings for what is nested, as TensorDict has it. Between an environment,
a policy and a slot these stay what they are: a TensorDict is made once per batch, and where a policy wants
one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from aiosync.errors import InvalidArgumentError
from aiosync.weights.dtypes import spelled
from aiosync.weights.layout import Layout
from aiosync.weights.segment import Segment

__all__ = [
    "MASK",
    "TRAJ_IDS",
    "Fields",
    "Key",
    "Slot",
    "Specs",
    "flattened",
    "nested",
    "specs_of",
    "steps_of",
    "under",
]

Key: TypeAlias = str | tuple[str, ...]
Fields: TypeAlias = dict[Key, Tensor]
Specs: TypeAlias = tuple[tuple[Key, tuple[int, ...], torch.dtype], ...]
"""Name, shape of one step's, dtype."""

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")

_BETWEEN = "\x1f"


def flattened(data: TensorDictBase) -> Fields:
    """The leaves of a TensorDict."""
    return dict(data.items(include_nested=True, leaves_only=True))


def nested(fields: Mapping[Key, Tensor], shape: Iterable[int]) -> TensorDict:
    """A TensorDict of batch size ``shape`` with these leaves."""
    found = TensorDict({}, batch_size=torch.Size(shape))
    for key, value in fields.items():
        found.set(key, value)
    return found


def under(first: str, key: Key) -> tuple[str, ...]:
    """A name, one level further down."""
    return (first, key) if isinstance(key, str) else (first, *key)


def specs_of(step: Mapping[Key, Tensor]) -> Specs:
    """What a slot has to hold for steps like this one."""
    return tuple((key, tuple(value.shape), value.dtype) for key, value in step.items())


class Slot:
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
    def make(cls, specs: Specs, steps: int, *, shared: bool = True) -> Slot:
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
        return steps_of(self.views, which, batch_dims)

    def lend(self, given_back: Callable[[], object]) -> Fields:
        """Its tensors; ``given_back`` is called when nothing refers to any of them any more, in whatever
        thread."""
        buffer = self.segment.buffer
        memory: Any = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        memory.segment = self.segment  # keeps it mapped as long as a tensor views it
        weakref.finalize(memory, given_back).atexit = False
        return self._views(torch.frombuffer(memory, dtype=torch.uint8))


def steps_of(views: Mapping[Key, Tensor], which: slice | Tensor, batch_dims: int) -> TensorDict:
    """Some of the steps in these tensors; the dimension of time comes after ``batch_dims`` others."""
    found = {key: view[which].movedim(0, batch_dims) for key, view in views.items()}
    return nested(found, next(iter(found.values())).shape[: batch_dims + 1])


def _spelled(look: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if look is None else spelled(*look)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else _BETWEEN.join(key)


def _layout(specs: Specs, steps: int) -> Layout:
    return Layout((_name(key), (steps, *shape), dtype) for key, shape, dtype in specs)
