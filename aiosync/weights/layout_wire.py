"""A layout as plain builtins from another process, which is not trusted: its checks before it is rebuilt."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple, NoReturn, TypeAlias

import msgspec
import torch
from msgspec import Meta

from aiosync.errors import ProtocolError
from aiosync.weights.tensors import DTYPES

MAX_ENTRIES = 1_000_000
"""Most entries and aliases of a layout, and most names of its base."""

Spec: TypeAlias = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of an entry."""

_MAX_BYTES = 1 << 56
_Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
_Text: TypeAlias = Annotated[str, Meta(max_length=1024, pattern=r"^[ -~]*\Z")]
_Size: TypeAlias = Annotated[int, Meta(ge=0, le=2 * _MAX_BYTES)]
_Shape: TypeAlias = Annotated[tuple[_Size, ...], Meta(max_length=64)]


class _Wire(msgspec.Struct, forbid_unknown_fields=True):
    """What ``Layout.to_wire`` returns."""

    # (name, dtype, shape, offset, nbytes), and (alias, name). The lengths are checked before the rows.
    entries: Annotated[list[tuple[_Name, str, _Shape, _Size, _Size]], Meta(max_length=MAX_ENTRIES)]
    aliases: Annotated[list[tuple[_Name, _Name]], Meta(max_length=MAX_ENTRIES)]
    nbytes: _Size
    base: Annotated[list[tuple[_Name, _Text]], Meta(max_length=MAX_ENTRIES)] = []


class Parsed(NamedTuple):
    """A checked layout, from which it can be rebuilt."""

    specs: list[Spec]
    aliases: dict[str, str]
    base: dict[str, str]
    places: list[tuple[int, int]]  # offset and size of each entry as given
    nbytes: int  # as given


def parse(obj: object, max_entries: int) -> Parsed:
    """Check all but the offsets. Raises ProtocolError, as ``Layout.from_wire``."""
    try:
        wire = msgspec.convert(obj, _Wire)
    except msgspec.ValidationError as exc:
        refuse(f"{str(exc)[:200]!r}")  # the text may quote the peer
    count, aliases = len(wire.entries) + len(wire.aliases), dict(wire.aliases)
    if count > max_entries or len(wire.base) > max_entries:
        refuse(f"{max(count, len(wire.base))} entries and aliases, more than {max_entries}")
    names = {name for name, *_ in wire.entries}
    if len(names | aliases.keys()) < count:
        refuse("a name twice")
    if not names.issuperset(aliases.values()):
        refuse("an alias of a name that is not an entry")
    base = dict(wire.base)
    if len(base) < len(wire.base) or not base.keys().isdisjoint(names | aliases.keys()):
        refuse("a name twice")
    specs, total = list[Spec](), 0
    for name, text, shape, _, _ in wire.entries:
        dtype = DTYPES.get(text)
        if dtype is None:
            refuse(f"unknown dtype {text[:80]!r} of {name[:80]!r}")
        # Sizes of 0 count as 1 here: the strides of an empty tensor must not overflow either.
        total += math.prod(max(size, 1) for size in shape) * dtype.itemsize
        if total > _MAX_BYTES:
            refuse(f"entry {name[:80]!r} takes the layout past {_MAX_BYTES} bytes")
        specs.append((name, shape, dtype))
    return Parsed(specs, aliases, base, [row[3:] for row in wire.entries], wire.nbytes)


def refuse(reason: str) -> NoReturn:
    """Raise ProtocolError."""
    raise ProtocolError(f"malformed layout: {reason}")
