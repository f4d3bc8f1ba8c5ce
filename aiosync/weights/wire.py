"""Decode a layout that came over the network. Its content is not trusted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from aiosync.errors import ProtocolError
from aiosync.weights.tensors import DTYPES

Spec: TypeAlias = "tuple[str, tuple[int, ...], torch.dtype]"
"""Name, shape and dtype of an entry."""

_MAX_DIMS = 64
_MAX_NAME = 4096
_MAX_BYTES = 1 << 56
_FIELDS = {"entries", "aliases", "nbytes"}


class Decoded(NamedTuple):
    """A peer's layout, each part valid by itself."""

    specs: list[Spec]
    aliases: dict[str, str]
    places: list[tuple[int, int]]
    """``(offset, nbytes)`` of each entry. :class:`Layout` checks them."""
    nbytes: int


def decode_layout(obj: object, *, max_entries: int) -> Decoded:
    """Check the types and ranges of all values in a layout, which was received as builtins.

    Raises:
        ProtocolError: a type is wrong, a dtype is unknown, a size is out of range, a name appears twice, an
            alias has no entry, or there are too many entries.
    """
    if type(obj) is not dict or obj.keys() != _FIELDS:
        _refuse(f"expected a dict with {sorted(_FIELDS)}, got {_brief(obj)}")
    entries, aliases = obj["entries"], obj["aliases"]
    if type(entries) is not list or type(aliases) is not list:
        _refuse("expected lists of entries and of aliases")
    if len(entries) + len(aliases) > max_entries:
        _refuse(f"{len(entries) + len(aliases)} entries and aliases, more than {max_entries}")
    specs: list[Spec] = []
    places: list[tuple[int, int]] = []
    names: set[str] = set()
    total = 0
    for row in entries:
        name, dtype_text, shape, offset, nbytes = _row(row, 5)
        spec = (_name(name, names), _shape(name, shape), _dtype(name, dtype_text))
        # Sizes of 0 count as 1 here: the strides of an empty tensor must not overflow either.
        total += math.prod(max(size, 1) for size in spec[1]) * spec[2].itemsize
        if total > _MAX_BYTES:
            _refuse(f"entry {_brief(name)} takes the layout past {_MAX_BYTES} bytes")
        specs.append(spec)
        places.append((_size("an offset", offset), _size("an nbytes", nbytes)))
    primaries = frozenset(names)
    ties: dict[str, str] = {}
    for row in aliases:
        alias, primary = _row(row, 2)
        if type(primary) is not str or primary not in primaries:
            _refuse(f"alias {_brief(alias)} of {_brief(primary)}, which is not an entry")
        ties[_name(alias, names)] = primary
    return Decoded(specs, ties, places, _size("nbytes", obj["nbytes"]))


def _refuse(reason: str) -> NoReturn:
    raise ProtocolError(f"malformed layout: {reason}")


def _brief(value: object) -> str:
    # The repr of a peer's value may be huge.
    if type(value) is str:
        return repr(value[:80])
    return f"a {type(value).__name__}"


def _row(row: object, width: int) -> list[Any]:
    if type(row) is not list or len(row) != width:
        _refuse(f"expected a list of {width}, got {_brief(row)}")
    return row


def _name(name: object, taken: set[str]) -> str:
    if type(name) is not str or not 0 < len(name) <= _MAX_NAME:
        _refuse(f"a name must be a string of 1 to {_MAX_NAME} characters, got {_brief(name)}")
    if name in taken:
        _refuse(f"the name {_brief(name)} twice")
    taken.add(name)
    return name


def _shape(name: str, shape: object) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > _MAX_DIMS:
        _refuse(f"the shape of {_brief(name)} must be a list of at most {_MAX_DIMS} sizes")
    return tuple(_size(f"a size in the shape of {_brief(name)}", size) for size in shape)


def _dtype(name: str, text: object) -> torch.dtype:
    dtype = DTYPES.get(text) if type(text) is str else None
    if dtype is None:
        _refuse(f"unknown dtype {_brief(text)} of {_brief(name)}")
    return dtype


def _size(what: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= 2 * _MAX_BYTES:
        _refuse(f"{what} is out of range or not an integer")
    return value
