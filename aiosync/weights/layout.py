"""The plan of one contiguous buffer: names, shapes, dtypes, offsets, and a signature.

A layout is made once from a model's tensors. Every send then checks the given tensors against it, without
reading their values. A layout is sent as plain builtins.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from aiosync.errors import InvalidArgumentError, LayoutMismatchError
from aiosync.weights.layout_wire import MAX_ENTRIES, Spec, parse, refuse
from aiosync.weights.tensors import (
    FLOATING,
    check_dense,
    convertible,
    describe,
    dtype_name,
    memory_key,
    spelled,
    tensor_in,
    tensor_over,
    untied,
)
from aiosync.weights.walk import extra_state_root, is_extra_state

ALIGNMENT = 64
"""Every entry starts at a multiple of this many bytes: a cache line, and more than any dtype needs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the buffer; a ``cast`` may have narrowed it
    offset: int  # where the tensor starts, in bytes; a multiple of ALIGNMENT
    nbytes: int  # without padding

    def describe(self) -> str:
        """Return dtype and shape as text, such as ``float32[4, 2]``."""
        return spelled(self.dtype, self.shape)


class Layout:
    """Names, shapes, dtypes and offsets of a model's tensors in one contiguous buffer.

    Two layouts are equal when their entries, ties and base are. Immutable, hashable, picklable.

    Attributes:
        entries: one per piece of memory, in buffer order.
        aliases: a tied tensor's other names: alias -> name of the entry that holds the bytes.
        nbytes: size of the buffer in bytes; a multiple of :data:`ALIGNMENT`, and never 0.
        optional: names that the other side may include or omit (see
            :func:`~aiosync.weights.flatten.optional_names`). The signature and equality ignore them.
        base: what updates presume of the receiver's model, name -> text (see :mod:`aiosync.weights.peft`).
            These names are not sent. The signature ignores them.
    """

    __slots__ = ("_identity", "_index", "_signature", "aliases", "base", "entries", "nbytes", "optional")

    def __init__(
        self,
        specs: Iterable[Spec],
        aliases: Mapping[str, str] | None = None,
        optional: Iterable[str] = (),
        base: Mapping[str, str] | None = None,
    ) -> None:
        """Lay out ``(name, shape, dtype)`` in the given order. Most callers use :meth:`of`."""
        entries = []
        offset = 0
        for name, shape, dtype in specs:
            nbytes = math.prod(shape) * dtype.itemsize
            entries.append(Entry(name, shape, dtype, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.entries: tuple[Entry, ...] = tuple(entries)
        self.aliases: Mapping[str, str] = MappingProxyType(dict(aliases or {}))
        self.nbytes: int = max(offset, ALIGNMENT)
        self.optional: frozenset[str] = frozenset(optional)
        self.base: Mapping[str, str] = MappingProxyType(dict(base or {}))
        self._index = {entry.name: entry for entry in self.entries}
        self._index.update({alias: self._index[name] for alias, name in self.aliases.items()})
        self._signature = self._identity = ""  # computed when they are first read

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        cast: torch.dtype | None = None,
        optional: Iterable[str] = (),
        base: Mapping[str, str] | None = None,
    ) -> Layout:
        """Lay out these tensors, in the order of the mapping. They may be on ``meta``.

        Names of the same object or the same memory (equal address, shape, strides and dtype) become one entry
        with aliases.

        Args:
            tensors: flat dotted names -> tensors of any shape, dtype and strides.
            cast: a floating dtype to which floating entries are narrowed in the buffer. Integers, booleans,
                complex numbers and extra state keep their dtypes.
            optional: names that :meth:`fit` and :meth:`check_receiver` accept without an entry.
            base: as the attribute.

        Raises:
            UnsupportedTensorError: a tensor is sparse, quantised, nested or uninitialised.
            InvalidArgumentError: ``cast`` is not a floating dtype that torch converts to.
        """
        if cast is not None and cast not in FLOATING:
            raise InvalidArgumentError(
                f"cast={dtype_name(cast)}: expected a floating dtype such as torch.bfloat16"
            )
        specs, aliases = list[Spec](), dict[str, str]()
        seen: dict[object, str] = {}
        for name, tensor in tensors.items():
            check_dense(name, tensor)
            first = seen.setdefault(memory_key(tensor), name)
            # Extra state is restored entry by entry; a tie there would be a coincidence.
            if first != name and is_extra_state(first) == is_extra_state(name):
                aliases[name] = first
                continue
            cast_here = cast if tensor.dtype in FLOATING and not is_extra_state(name) else None
            specs.append((name, tuple(tensor.shape), cast_here or tensor.dtype))
        return cls(specs, aliases, optional, base)

    @property
    def signature(self) -> str:
        """Hex digest of all names, shapes and dtypes. It does not depend on order or ties."""
        if not self._signature:
            rows = sorted((name, list(e.shape), dtype_name(e.dtype)) for name, e in self._index.items())
            self._signature = _digest(rows)
        return self._signature

    @property
    def identity(self) -> str:
        """Hex digest of the result of :meth:`to_wire`, with order, offsets and ties."""
        if not self._identity:
            self._identity = _digest(self.to_wire())
        return self._identity

    @property
    def names(self) -> tuple[str, ...]:
        """All names, aliases after entries."""
        return tuple(self._index)

    def __len__(self) -> int:
        """Return the number of entries, without aliases."""
        return len(self.entries)

    def __bool__(self) -> bool:
        """Return true, also for a layout without entries."""
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        """Return the entry with this name's bytes; for an alias, the entry that it is tied to."""
        return self._index[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self.entries, self.aliases, self.base) == (other.entries, other.aliases, other.base)

    def __hash__(self) -> int:
        return hash((self.entries, frozenset(self.aliases.items())))

    def __reduce__(self) -> tuple[object, ...]:
        specs = [(e.name, e.shape, e.dtype) for e in self.entries]
        return (Layout, (specs, dict(self.aliases), self.optional, dict(self.base)))

    def __repr__(self) -> str:
        ties = f", {len(self.aliases)} tied" if self.aliases else ""
        return f"Layout({len(self)} entries{ties}, {self.nbytes} bytes, {self.signature[:8]})"

    def views(
        self, buffer: Tensor, on_part: Callable[[memoryview], object] | None = None
    ) -> dict[str, Tensor]:
        """Return every name, aliases too, as a typed contiguous view of ``buffer``. Copies nothing.

        Each tensor's storage covers only the tensor's own bytes. So a tensor pickles at its own size,
        ``torch.save`` accepts tensors of several dtypes, and ``share_memory_()`` moves only that tensor. The
        storages keep the memory of ``buffer`` alive.

        Args:
            buffer: 1-D, contiguous, ``uint8``, at least :attr:`nbytes` long, on any device, starting at a
                multiple of :data:`ALIGNMENT` in its storage.
            on_part: called with a memoryview of each entry that has bytes, if the buffer is in CPU memory.
                Only the tensor's storage refers to it. So it is released when the storage moves elsewhere.

        Raises:
            InvalidArgumentError: the buffer has another dtype, shape or alignment.
        """
        start = int(buffer.storage_offset())
        if (
            buffer.dtype is not torch.uint8
            or buffer.dim() != 1
            or buffer.numel() < self.nbytes
            or not buffer.is_contiguous()
            or start % ALIGNMENT
        ):
            raise InvalidArgumentError(
                f"expected a contiguous uint8 buffer of {self.nbytes} bytes or more, starting "
                f"at a multiple of {ALIGNMENT}; got {describe(buffer)} starting at {start}"
            )
        storage, out = buffer.untyped_storage(), {}
        # In the caller's inference mode, new tensors would not fit parameters made outside of that mode.
        with torch.inference_mode(False):
            if on_part is None or not buffer.is_cpu:
                out = {e.name: tensor_in(storage, start + e.offset, e.shape, e.dtype) for e in self.entries}
            else:
                memory = buffer.numpy().data
                for e in self.entries:
                    part = memory[e.offset : e.offset + e.nbytes]
                    out[e.name] = tensor_over(part, e.shape, e.dtype)
                    if e.nbytes:
                        on_part(part)
        out |= {alias: out[name] for alias, name in self.aliases.items()}
        return out

    def fit(self, tensors: Mapping[str, Tensor], *, strict: bool = True) -> list[tuple[str, Tensor]]:
        """Check the sender's tensors against this layout; return ``(entry name, tensor)`` in buffer order.

        Shapes must be equal. A floating dtype may be another floating dtype, which the copy converts; other
        dtypes must be equal. The result has no aliases. Tied names with separate memory must have equal bits.
        Names of :attr:`optional` may be missing, and are ignored if they are no entries.

        Args:
            tensors: flat dotted names -> dense tensors.
            strict: whether every name must be given. If not, a subset suffices, and an alias may replace its
                entry.

        Raises:
            LayoutMismatchError: names are missing or unexpected, or tensors differ. The error lists all of
                them.
            InvalidArgumentError: not strict, and none of the names is in this layout.
            UnsupportedTensorError: a tensor has no dense bytes, or is on ``meta``.
        """
        index = self._index
        missing = [name for name in index if name not in tensors and name not in self.optional]
        missing = missing if strict else []
        unexpected: list[str] = []
        differing: dict[str, tuple[str, str]] = {}
        for name, tensor in tensors.items():
            entry = index.get(name)
            if entry is None:
                if name not in self.optional:
                    unexpected.append(name)
                continue
            check_dense(name, tensor, allow_meta=False)
            if tensor.shape != entry.shape or not convertible(tensor.dtype, entry.dtype):
                differing[name] = (entry.describe(), describe(tensor))
        if not (missing or unexpected or differing):
            dtypes = {alias: index[alias].dtype for alias in self.aliases}
            differing = untied(tensors, self.aliases, dtypes)
        if missing or unexpected or differing:
            raise LayoutMismatchError(missing=missing, unexpected=unexpected, differing=differing)
        stand_ins = {name: tensors[alias] for alias, name in self.aliases.items() if alias in tensors}
        given = {**stand_ins, **tensors}
        pairs = [(e.name, given[e.name]) for e in self.entries if e.name in given]
        if not pairs and self.entries:
            raise InvalidArgumentError("strict=False takes a subset of the entries, got none")
        return pairs

    def check_receiver(
        self, other: Layout | Mapping[str, Tensor], *, optional: Collection[str] = (), strict: bool = True
    ) -> None:
        """Check, on the receiver, that this layout from the sender fits the receiver's model.

        Names and shapes must match. Dtypes must be equal or both floating. Ties need not match. Names of
        :attr:`base` may be missing; their values are not compared here. A name in
        ``optional`` may be missing on either side. An optional name that ends in the extra-state part accepts
        all names below it, of any shape: the module's ``set_extra_state`` checks them.

        Args:
            other: the receiver's layout, or its names -> tensors, which may be on ``meta``.
            optional: more optional names, besides those of the receiver's layout.
            strict: whether this layout must have all names of the receiver.

        Raises:
            LayoutMismatchError: they do not fit. "expected" is the receiver's side, "got" the sender's.
        """
        lenient = frozenset(optional)
        if isinstance(other, Layout):
            lenient |= other.optional
            mine = {name: (e.shape, e.dtype) for name, e in other._index.items()}
        else:
            mine = {name: (tuple(t.shape), t.dtype) for name, t in other.items()}
        differing: dict[str, tuple[str, str]] = {}
        unexpected: list[str] = []
        for name, entry in self._index.items():
            if is_extra_state(name) and extra_state_root(name) in lenient:
                continue
            want = mine.get(name)
            if want is None:
                if name not in lenient:
                    unexpected.append(name)
            elif want[0] != entry.shape or not convertible(entry.dtype, want[1]):
                differing[name] = (spelled(want[1], want[0]), entry.describe())
        missing = [
            name
            for name in mine
            if strict
            and not (name in self._index or name in self.base)
            and lenient.isdisjoint((name, extra_state_root(name)))
        ]
        if missing or unexpected or differing:
            raise LayoutMismatchError(missing=missing, unexpected=unexpected, differing=differing)

    def subset(self, names: Iterable[str]) -> tuple[Entry, ...]:
        """Return the entries with these names' bytes, each once, in buffer order.

        Raises:
            LayoutMismatchError: a name is not in this layout; the error lists it as "unexpected".
        """
        wanted = set(names)
        unknown = sorted(wanted - self._index.keys())
        if unknown:
            raise LayoutMismatchError(unexpected=unknown)
        holders = {self._index[name].name for name in wanted}
        return tuple(e for e in self.entries if e.name in holders)

    def to_wire(self) -> dict[str, Any]:
        """Return this layout as dicts, lists, strings and integers, without :attr:`optional`.

        ``{"entries": [[name, dtype, shape, offset, nbytes], …], "aliases": [[alias, name], …],
        "nbytes": int}``, where a dtype is text such as ``bfloat16``. With :attr:`base` also ``"base": [[name,
        text], …]``.
        """
        base = {"base": [[name, text] for name, text in self.base.items()]} if self.base else {}
        return {
            "entries": [
                [e.name, dtype_name(e.dtype), list(e.shape), e.offset, e.nbytes] for e in self.entries
            ],
            "aliases": [[alias, name] for alias, name in self.aliases.items()],
            "nbytes": self.nbytes,
            **base,
        }

    @classmethod
    def from_wire(cls, obj: object, *, max_entries: int = MAX_ENTRIES) -> Layout:
        """Rebuild a layout from the result of :meth:`to_wire`, which is not trusted.

        The offsets are computed again, and the given offsets must be equal. So entries cannot overlap, leave
        gaps or be misaligned.

        Raises:
            ProtocolError: there are more than ``max_entries`` entries and aliases, or :meth:`to_wire` cannot
                have returned ``obj``.
        """
        parsed = parse(obj, max_entries)
        layout = cls(parsed.specs, parsed.aliases, base=parsed.base)
        if parsed.places != [(e.offset, e.nbytes) for e in layout.entries] or parsed.nbytes != layout.nbytes:
            refuse("its entries are not packed one after another")
        return layout


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=16).hexdigest()
