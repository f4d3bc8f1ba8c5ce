"""The plan of one contiguous buffer: names, shapes, dtypes, offsets, and a signature.

A layout is made once from the tensors of a model and then checks, on every send and without
touching a byte, that what is given still fits. It goes over the wire as plain builtins.
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

from aiosync.errors import InvalidArgumentError, LayoutMismatchError, ProtocolError
from aiosync.weights.dense import check_dense, describe, memory_key
from aiosync.weights.dtypes import FLOATING, convertible, dtype_name, spelled
from aiosync.weights.names import extra_state_root, is_extra_state
from aiosync.weights.storage import tensor_in, tensor_over
from aiosync.weights.ties import untied
from aiosync.weights.wire import decode_layout

__all__ = ["ALIGNMENT", "Entry", "Layout"]

ALIGNMENT = 64
"""Bytes. Every entry starts at a multiple of this: a cache line, and more than any dtype needs."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in the buffer.

    Attributes:
        name: its dotted name.
        shape: its shape; ``()`` for a scalar.
        dtype: its dtype in the buffer, which a ``cast`` may have narrowed.
        offset: where it starts, in bytes; a multiple of :data:`ALIGNMENT`.
        nbytes: how many bytes it takes, without padding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """Dtype and shape as text, such as ``float32[4, 2]``."""
        return spelled(self.dtype, self.shape)


class Layout:
    """Names, shapes, dtypes and offsets of a model's tensors in one contiguous buffer.

    Two layouts are equal when their entries and ties are. Immutable, hashable, picklable.

    Attributes:
        entries: one per piece of memory, in buffer order.
        aliases: a tied tensor's other names: alias -> name of the entry that holds the bytes.
        nbytes: size of the buffer; a multiple of :data:`ALIGNMENT` and never 0, so that a model
            without tensors has a buffer too.
        optional: names that the other side may give or leave out (see
            :func:`~aiosync.weights.optional_names`); they take no part in signature or equality.
    """

    __slots__ = ("_identity", "_index", "_signature", "aliases", "entries", "nbytes", "optional")

    def __init__(
        self,
        specs: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
        aliases: Mapping[str, str] | None = None,
        optional: Iterable[str] = (),
    ) -> None:
        """Pack ``(name, shape, dtype)`` in the order given. Most callers want :meth:`of`."""
        entries = []
        offset = 0
        for name, shape, dtype in specs:
            nbytes = math.prod(shape) * dtype.itemsize
            entries.append(Entry(name, shape, dtype, offset, nbytes))
            offset += _aligned(nbytes)
        self.entries: tuple[Entry, ...] = tuple(entries)
        self.aliases: Mapping[str, str] = MappingProxyType(dict(aliases or {}))
        self.nbytes: int = max(offset, ALIGNMENT)
        self.optional: frozenset[str] = frozenset(optional)
        self._index = {entry.name: entry for entry in self.entries}
        self._index.update({alias: self._index[name] for alias, name in self.aliases.items()})
        self._signature: str | None = None
        self._identity: str | None = None

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        cast: torch.dtype | None = None,
        optional: Iterable[str] = (),
    ) -> Layout:
        """Plan a buffer for these tensors, in the order of the mapping.

        Names that stand for the same memory (same address, shape, strides and dtype) or for the
        same object become one entry with aliases. Only shapes and dtypes are read, so tensors on
        ``meta`` will do.

        Args:
            tensors: flat dotted names -> tensors of any shape, dtype and strides.
            cast: a floating dtype that floating entries are narrowed to in the buffer. Integers,
                booleans, complex numbers and extra state keep theirs.
            optional: names that :meth:`fit` and :meth:`check_receiver` let pass.

        Raises:
            UnsupportedTensorError: a sparse, quantised, nested or uninitialised tensor.
            InvalidArgumentError: ``cast`` is not a floating dtype that torch converts to.
        """
        if cast is not None and cast not in FLOATING:
            raise InvalidArgumentError(
                f"cast={dtype_name(cast)}: expected a floating dtype such as torch.bfloat16"
            )
        specs: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        aliases: dict[str, str] = {}
        seen: dict[object, str] = {}
        for name, tensor in tensors.items():
            check_dense(name, tensor)
            first = seen.setdefault(memory_key(tensor), name)
            # Extra state is restored entry by entry; a tie there would be a coincidence.
            if first != name and is_extra_state(first) == is_extra_state(name):
                aliases[name] = first
                continue
            narrowed = cast is not None and tensor.dtype in FLOATING and not is_extra_state(name)
            dtype = cast if narrowed and cast is not None else tensor.dtype
            specs.append((name, tuple(tensor.shape), dtype))
        return cls(specs, aliases, optional)

    @property
    def signature(self) -> str:
        """A hex digest of all names, shapes and dtypes, the same whatever the order or the ties."""
        if self._signature is None:
            rows = sorted((name, list(e.shape), dtype_name(e.dtype)) for name, e in self._index.items())
            text = json.dumps(rows, separators=(",", ":"))
            self._signature = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._signature

    @property
    def identity(self) -> str:
        """A hex digest of all that :meth:`to_wire` tells, order, places and ties too."""
        if self._identity is None:
            text = json.dumps(self.to_wire(), separators=(",", ":"))
            self._identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._identity

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, aliases after the entries."""
        return tuple(self._index)

    def __len__(self) -> int:
        """How many entries there are; aliases do not count."""
        return len(self.entries)

    def __bool__(self) -> bool:
        """Always true: a layout without entries is still a layout."""
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        """The entry that holds this name's bytes; an alias gives its primary's."""
        return self._index[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.entries == other.entries and self.aliases == other.aliases

    def __hash__(self) -> int:
        return hash((self.entries, frozenset(self.aliases.items())))

    def __reduce__(self) -> tuple[object, ...]:
        specs = [(e.name, e.shape, e.dtype) for e in self.entries]
        return (Layout, (specs, dict(self.aliases), self.optional))

    def __repr__(self) -> str:
        ties = f", {len(self.aliases)} tied" if self.aliases else ""
        return f"Layout({len(self)} entries{ties}, {self.nbytes} bytes, {self.signature[:8]})"

    def views(
        self, buffer: Tensor, on_part: Callable[[memoryview], object] | None = None
    ) -> dict[str, Tensor]:
        """Every name, aliases too, as a typed contiguous view of ``buffer``. Copies nothing.

        Each tensor has a storage of its own that covers its own bytes. So a tensor pickles at its own size,
        ``torch.save`` accepts tensors of several dtypes, and ``share_memory_()`` moves that tensor alone.
        The storages keep the memory of ``buffer`` alive.

        Args:
            buffer: 1-D, contiguous, ``uint8``, at least :attr:`nbytes` long, on any device, and
                starting at a multiple of :data:`ALIGNMENT` in its storage.
            on_part: called with the memory of each entry that has any, if the buffer is in CPU memory. Its
                storage alone keeps that object: if the storage is moved into other memory, it is gone.

        Raises:
            InvalidArgumentError: the buffer is not such a one.
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
        storage = buffer.untyped_storage()
        # A caller may run in inference mode, where new tensors do not fit parameters made outside of it.
        with torch.inference_mode(False):
            if on_part is None or not buffer.is_cpu:
                out = {e.name: tensor_in(storage, start + e.offset, e.shape, e.dtype) for e in self.entries}
            else:
                memory = buffer.numpy().data
                out = {}
                for e in self.entries:
                    part = memory[e.offset : e.offset + e.nbytes]
                    out[e.name] = tensor_over(part, e.shape, e.dtype)
                    if e.nbytes:
                        on_part(part)
        for alias, name in self.aliases.items():
            out[alias] = out[name]
        return out

    def fit(self, tensors: Mapping[str, Tensor], *, strict: bool = True) -> list[tuple[str, Tensor]]:
        """Check a source on the sender; return ``(entry name, tensor)`` in buffer order.

        Shapes must be equal; a floating dtype may differ (the copy converts), any other may not.
        Aliases are left out of the result: a tied tensor given as two pieces of memory must hold
        the same bits in both. Names in :attr:`optional` that are no entries are ignored.

        Args:
            tensors: flat dotted names -> dense tensors.
            strict: every name must be there. Otherwise a subset will do, in which an alias can
                stand for its primary.

        Raises:
            LayoutMismatchError: lists every missing, unexpected and differing name.
            InvalidArgumentError: not strict, and nothing that this layout knows was given.
            UnsupportedTensorError: a tensor with no dense bytes, or one on ``meta``.
        """
        index = self._index
        missing = [name for name in index if name not in tensors] if strict else []
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
        pairs = self._pairs(tensors)
        if not pairs and self.entries:
            raise InvalidArgumentError("strict=False takes a subset of the entries, got none")
        return pairs

    def _pairs(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        stand_ins = {name: alias for alias, name in self.aliases.items() if alias in tensors}
        pairs = []
        for e in self.entries:
            given = e.name if e.name in tensors else stand_ins.get(e.name)
            if given is not None:
                pairs.append((e.name, tensors[given]))
        return pairs

    def check_receiver(
        self,
        other: Layout | Mapping[str, Tensor],
        *,
        optional: Collection[str] = (),
        strict: bool = True,
    ) -> None:
        """Check, on the receiver, that this layout of the sender's fits the receiver's model.

        Names and shapes must match; dtypes must be equal or both floating. Ties need not match.
        A name in ``optional`` may be missing here or there. One that ends in the extra-state part
        accepts everything below it, whatever its shape: the module's ``set_extra_state`` judges.

        Args:
            other: the receiver's own layout, or its names -> tensors (``meta`` will do).
            optional: further names besides the receiver's layout's own :attr:`optional`.
            strict: otherwise this layout may lack names that the receiver has.

        Raises:
            LayoutMismatchError: "expected" is the receiver's side, "got" the sender's.
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
            name for name in mine if strict and name not in self._index and lenient.isdisjoint(_keys(name))
        ]
        if missing or unexpected or differing:
            raise LayoutMismatchError(missing=missing, unexpected=unexpected, differing=differing)

    def subset(self, names: Iterable[str]) -> tuple[Entry, ...]:
        """The entries that hold these names' bytes, each once, in buffer order.

        Raises:
            LayoutMismatchError: a name that is not in this layout, as "unexpected".
        """
        wanted = set(names)
        unknown = sorted(wanted - self._index.keys())
        if unknown:
            raise LayoutMismatchError(unexpected=unknown)
        holders = {self._index[name].name for name in wanted}
        return tuple(e for e in self.entries if e.name in holders)

    def to_wire(self) -> dict[str, Any]:
        """This layout as dicts, lists, strings and integers; :attr:`optional` stays behind.

        ``{"entries": [[name, dtype, shape, offset, nbytes], …], "aliases": [[alias, name], …],
        "nbytes": int}``, where a dtype is text such as ``bfloat16``.
        """
        return {
            "entries": [
                [e.name, dtype_name(e.dtype), list(e.shape), e.offset, e.nbytes] for e in self.entries
            ],
            "aliases": [[alias, name] for alias, name in self.aliases.items()],
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_wire(cls, obj: object, *, max_entries: int = 1_000_000) -> Layout:
        """Rebuild what :meth:`to_wire` gave, trusting nothing in it.

        A layout is packed in one way only, so the places are worked out anew from names, shapes
        and dtypes, and what came must say the same: that rules out overlaps, gaps, misplaced and
        unaligned entries at once.

        Args:
            obj: what came over the network, decoded into builtins.
            max_entries: entries and aliases together beyond which it is refused.

        Raises:
            ProtocolError: it is anything but what :meth:`to_wire` would have written.
        """
        decoded = decode_layout(obj, max_entries=max_entries)
        layout = cls(decoded.specs, decoded.aliases)
        places = [(e.offset, e.nbytes) for e in layout.entries]
        if decoded.places != places or decoded.nbytes != layout.nbytes:
            raise ProtocolError("malformed layout: its entries are not packed one after another")
        return layout


def _keys(name: str) -> tuple[str, ...]:
    return (name, extra_state_root(name)) if is_extra_state(name) else (name,)
